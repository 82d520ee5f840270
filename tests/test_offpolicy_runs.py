"""Whole runs of the off-policy scripts: identities, the replay buffer, stopping and resuming, refusals, learning."""

import ast
import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, Dying, contents, finish, history, records, start, timeless
from toy_envs import Toy

import mdpo_offpolicy as mdpo
import mdpo_tsallis as tsallis
import sac

OFF_POLICY = ("mdpo_offpolicy", "mdpo_tsallis", "sac")
SMALL = ("--hidden-size", 32, "--batch-size", 32, "--learning-starts", 64, "--buffer-size", 150, "--run-name", "r")
SHORT = ("--env-id", "Toy-v0", "--total-timesteps", 300, *SMALL)
PENDULUM = ("--env-id", "InvertedPendulum-v4", "--total-timesteps", 300, *SMALL)  # for processes of their own
LOSSES = {f"losses/{name}_loss" for name in ("actor", "qf1", "qf2", "vf")} | {"losses/qf1_values", "losses/entropy"}


@pytest.fixture(params=OFF_POLICY)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(name: str = "r") -> dict:
    return torch.load(Path("runs", name, "checkpoint.pt"), weights_only=True)


def merged(points: list[dict]) -> list[dict]:
    """As W&B keeps them, those of one step in one."""
    steps = {}
    for point in points:
        steps.setdefault(point["global_step"], {}).update(point)
    return list(steps.values())


def assert_equal_agents(one: dict, other: dict) -> None:
    assert {"policy.flat", "q.flat", "v.flat", "slow_v.flat", "q_optimizer.square"} <= set(one) & set(other)
    for name in set(one) & set(other):
        assert torch.equal(one[name], other[name]), name


# ------------------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("steps", [1, 3])
def test_mdpo_at_stepsize_lambda_is_sac_to_the_bit(in_process, steps):
    common = (*SHORT, "--gradient-steps", steps, "--total-timesteps", 600 if steps == 1 else 200)
    first = in_process(mdpo, *common, "--bregman-stepsize", 0.2, "--old-policy-interval", 50).points
    second = in_process(sac, *common, "--run-name", "sac").points
    assert_equal_agents(load("r")["agent"], load("sac")["agent"])
    kl = [p.pop("losses/kl_to_old") for p in first if "losses/kl_to_old" in p]
    assert kl and timeless(first) == timeless(second)


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
def test_tsallis_at_q_1_is_mdpo_to_the_bit(in_process, kind):
    common = (*SHORT, "--bregman-stepsize", 0.5, "--old-policy-interval", 50)
    in_process(mdpo, *common)
    in_process(tsallis, *common, "--tsallis-q", 1, "--entropy-q", 1, "--log-q", kind, "--run-name", "tsallis")
    in_process(tsallis, *common, "--tsallis-q", 1.2, "--entropy-q", 1, "--log-q", kind, "--run-name", "other")
    assert_equal_agents(load("r")["agent"], load("tsallis")["agent"])
    assert not torch.equal(load("r")["agent"]["policy.flat"], load("other")["agent"]["policy.flat"])


def after_300_updates(update):
    torch.manual_seed(0)
    agent = mdpo.Agent(
        5, np.float32([-0.4, -2.0]), np.float32([0.4, 3.0]), mdpo.Args(hidden_size=64, bregman_stepsize=0.5)
    )
    torch.manual_seed(1)
    for _ in range(300):
        batch = torch.randn(64, 14)
        batch[:, -1] = (batch[:, -1] > 1).float()
        losses = update(agent, batch, torch.randn(64, 2))
    return agent, losses


def test_a_compiled_update_agrees_with_the_eager_one_over_hundreds_of_updates(monkeypatch):
    """To rounding, where both run the same lines. Eager runs otherwise use torch's kernel for Adam, which rounds
    differently: that flips a ReLU now and then, and Adam makes a whole step of it, so that the median is compared."""
    if not mdpo.can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    compiled, compiled_losses = after_300_updates(mdpo.compiled(mdpo.update))
    fused, fused_losses = after_300_updates(mdpo.update)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # Adam as it is written out
    written, _ = after_300_updates(mdpo.update)
    for name in ("policy", "q", "v", "slow_v"):
        ours = getattr(compiled, name).flat
        torch.testing.assert_close(getattr(written, name).flat, ours, rtol=1e-5, atol=1e-6, msg=name)
        assert (getattr(fused, name).flat - ours).abs().median() < 1e-4, name  # of a way of up to 0.09
    for name, loss in fused_losses.items():
        torch.testing.assert_close(loss, compiled_losses[name], rtol=1e-3, atol=1e-3)


def test_both_forms_of_adam_agree_on_the_same_gradients(script, monkeypatch):
    torch.manual_seed(0)
    gradients = torch.randn(300, 50) * 10.0 ** torch.randint(-6, 3, (50,))
    results = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
        params = torch.zeros(50)
        optimizer = script.Adam(params)
        optimizer.lr.fill_(3e-4)
        for gradient in gradients:
            optimizer.step(params, gradient)
        results.append(params)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------------------------ the order of an iteration


def test_the_old_policy_changes_exactly_every_m_updates(in_process, monkeypatch):
    for script in (mdpo, tsallis):
        seen, update = [], script.update

        def watched(agent, *given):
            seen.append((agent.policy.flat.detach().clone(), agent.old_policy.flat.clone()))
            return update(agent, *given)

        monkeypatch.setattr(script, "update", watched)
        in_process(script, *SHORT, "--old-policy-interval", 7, "--total-timesteps", 120, "--run-name", script.__name__)
        assert len(seen) == 120 - 64
        for i, (_, old) in enumerate(seen):
            assert torch.equal(old, seen[i - i % 7][0])  # the policy as it was when the seven began


def test_gradient_steps_is_algorithm_2(in_process, monkeypatch, script):
    """m policy steps and one critic step on one batch; pi_k is the policy that the environment step began with."""
    events, update, policy_step = [], script.update, script.policy_step

    def watch(kind, function):
        def watched(agent, batch, noise):
            old = agent.old_policy.flat.clone() if script is not sac else None
            events.append((kind, agent.policy.flat.detach().clone(), old, batch.clone(), noise.clone()))
            return function(agent, batch, noise)

        return watched

    monkeypatch.setattr(script, "update", watch("all", update))
    monkeypatch.setattr(script, "policy_step", watch("policy", policy_step))
    in_process(script, *SHORT, "--gradient-steps", 3, "--total-timesteps", 100)
    assert [e[0] for e in events] == ["policy", "policy", "all"] * 36
    for i in range(0, len(events), 3):
        group = events[i : i + 3]
        assert all(torch.equal(e[3], group[0][3]) for e in group)
        assert not torch.equal(group[0][4], group[1][4])
        assert not torch.equal(group[0][1], group[1][1])
        assert script is sac or all(torch.equal(e[2], group[0][1]) for e in group)


def test_the_first_steps_are_uniform_and_then_the_policy_acts(in_process, script, monkeypatch):
    Toy.made.clear()
    updates, update = [], script.update
    monkeypatch.setattr(script, "update", lambda *a: updates.append(len(Toy.made[-1].transitions)) or update(*a))
    in_process(script, *SHORT, "--learning-starts", 250)
    env = Toy.made[-1]
    assert updates == list(range(251, 301))  # one a step, each after its own step's transition
    random = np.array([t[1] for t in env.transitions[:250]])
    assert abs(random.mean()) < 0.04 and random.std() == pytest.approx(1 / math.sqrt(12), rel=0.1)
    assert abs(random).max() < 0.5


# --------------------------------------------------------------------------------------------------- the replay buffer


def test_the_buffer_holds_what_happened_and_only_termination_as_an_end(in_process, script):
    Toy.made.clear()
    in_process(script, *SHORT)
    env = max(Toy.made, key=lambda env: len(env.transitions))
    rows = np.fromfile("runs/r/replay.bin", np.float32).reshape(-1, 2 * 3 + 2 + 2)
    assert len(rows) == 150 + script.ReplayBuffer.HEADROOM and len(env.transitions) == 300
    for row, (obs, action, next_obs, reward, terminated, truncated) in zip(rows, env.transitions, strict=False):
        np.testing.assert_array_equal(row, np.float32([*obs, *action, *next_obs, reward, terminated]))
        assert not (terminated and truncated)
    assert any(t[-1] for t in env.transitions) and any(t[-2] for t in env.transitions)


def small_buffer(script, monkeypatch, size=60, headroom=20, path="replay.bin", resume=False):
    monkeypatch.setattr(script.ReplayBuffer, "HEADROOM", headroom)
    return script.ReplayBuffer(Path(path), 2, 1, size, resume)


def fill(buffer, first, last):
    for k in range(first, last):
        buffer.add(k, np.float64([k, k]), np.float32([k]), np.float32([k, k]), (float(k), False))


def test_the_buffer_wraps_around_and_samples_the_last_transitions_only(script, monkeypatch):
    buffer = small_buffer(script, monkeypatch)
    done = 0
    for k in (1, 5, 59, 60, 61, 80, 81, 200, 1003):
        fill(buffer, done, k)
        done = k
        drawn = {int(x) for x in buffer.sample(k, 3000)[:, -2]}
        assert drawn == set(range(max(0, k - 60), k)), k


def test_sampling_is_uniform(script, monkeypatch):
    buffer = small_buffer(script, monkeypatch)
    fill(buffer, 0, 145)
    torch.manual_seed(0)
    counts = np.bincount(buffer.sample(145, 60_000)[:, -2].int().numpy() - 85, minlength=60)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 30 < chi_square < 102  # 59 degrees of freedom: the 0.1 % and 99.95 % points


def test_a_buffer_is_read_back_as_it_was_written(script, monkeypatch):
    buffer = small_buffer(script, monkeypatch)
    fill(buffer, 0, 75)
    buffer.file.flush()
    again = small_buffer(script, monkeypatch, resume=True)
    assert torch.equal(again.rows, buffer.rows)


def test_a_million_transitions_of_humanoid_take_3_2_gigabytes_and_only_as_they_come(script):
    buffer = script.ReplayBuffer(Path("replay.bin"), 376, 17, 1_000_000, False)
    assert buffer.rows.nbytes == os.stat("replay.bin").st_size <= 3.2e9
    before = os.stat("replay.bin").st_blocks * 512
    for k in range(100):
        buffer.add(k, np.ones(376), np.ones(17), np.ones(376), (1.0, True))
    buffer.file.flush()
    assert before < 1e6 and os.stat("replay.bin").st_blocks * 512 < 2e6


def test_a_sample_takes_no_longer_from_a_fuller_buffer(script):
    buffer = script.ReplayBuffer(Path("replay.bin"), 3, 1, 300_000, False)
    buffer.array[:] = 1
    times = {1000: [], 300_000: []}
    for k in [*times] * 200:
        began = time.process_time_ns()
        buffer.sample(k, 256)
        times[k].append(time.process_time_ns() - began)
    assert np.median(times[300_000]) < 5 * np.median(times[1000])  # cache misses; a scan would take 300 times as long


def break_after(script, monkeypatch, updates: int) -> None:
    """Ends a run as a kill would: at once, between two checkpoints."""
    calls, update = [], script.update

    def broken(*given):
        calls.append(given)
        if len(calls) > updates:
            raise InterruptedError
        return update(*given)

    monkeypatch.setattr(script, "update", broken)


def test_a_resume_after_a_kill_does_not_depend_on_what_was_written_since_the_checkpoint(
    script, in_process, monkeypatch
):
    """The buffer has wrapped around: the run has overwritten rows since its checkpoint at 250, and is killed at 270."""
    monkeypatch.setattr(script.ReplayBuffer, "HEADROOM", 50)
    with monkeypatch.context() as patch:
        break_after(script, patch, 270 - 64)
        with pytest.raises(InterruptedError):
            in_process(script, *SHORT)
    assert load()["state"]["iteration"] == 250  # the headroom asks for a checkpoint every 50 steps
    for name in ("twin", "spoilt"):
        shutil.copytree("runs/r", f"runs/{name}", symlinks=True)
    rows = np.memmap("runs/spoilt/replay.bin", np.float32, "r+").reshape(200, -1)
    later = np.arange(250, 300) % 200
    assert np.isfinite(rows).all()
    rows[later] = np.nan
    results = [in_process(script, "--resume", "--run-name", name) for name in ("r", "twin", "spoilt")]
    assert [result.status for result in results] == [0, 0, 0]
    for name, result in zip(("twin", "spoilt"), results[1:], strict=True):
        assert timeless(result.points) == timeless(results[0].points)
        assert_equal_agents(load("r")["agent"], load(name)["agent"])


def test_a_resume_goes_on_with_the_saved_random_numbers(script, in_process):
    in_process(script, *SHORT, "--total-timesteps", 200)
    for name in ("same", "other"):
        shutil.copytree("runs/r", f"runs/{name}", symlinks=True)
    torch.manual_seed(99)
    torch.save(load("other") | dict(rng=torch.get_rng_state()), "runs/other/checkpoint.pt")
    for name in ("r", "same", "other"):
        in_process(script, "--resume", "--run-name", name, "--total-timesteps", 220)
    policies = [load(name)["agent"]["policy.flat"] for name in ("r", "same", "other")]
    assert torch.equal(policies[0], policies[1]) and not torch.equal(policies[0], policies[2])


def test_the_headroom_decides_when_a_longer_checkpoint_interval_is_asked_for(script, in_process, monkeypatch):
    monkeypatch.setattr(script.ReplayBuffer, "HEADROOM", 90)
    saved = []
    monkeypatch.setattr(torch, "save", lambda content, file: saved.append(content["state"]["iteration"]))
    monkeypatch.setattr(os, "replace", lambda *names: None)
    in_process(script, *SHORT, "--checkpoint-interval", 1_000_000)
    assert saved == [0, 90, 180, 270, 300]


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_resume_without_its_buffer_is_refused(script, in_process, damage, capsys):
    in_process(script, *SHORT)
    path = Path("runs/r/replay.bin")
    path.unlink()
    if damage == "short":
        path.write_bytes(b"0" * 100)
    with pytest.raises(SystemExit) as stop:
        in_process(script, *SHORT, "--resume", "--total-timesteps", 350)
    assert stop.value.code == 2 and "replay.bin" in capsys.readouterr().err
    assert in_process(script, "--evaluate", "--run-name", "r", "--eval-episodes", 1).status == 0  # needs no buffer


def test_a_full_disk_is_refused_before_it_is_written_to(script, in_process, monkeypatch, capsys):
    monkeypatch.setattr(script, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(SystemExit) as stop:
        in_process(script, *SHORT)
    assert stop.value.code == 2 and "GB" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- records, stopping, resuming


def test_a_run_is_recorded_and_repeats_to_the_bit(script, in_process, tmp_path):
    process = finish(script.__name__, *PENDULUM, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    elsewhere = history(tmp_path / "runs/r")
    here = merged(in_process(script, *PENDULUM, "--run-name", "here").points)
    assert timeless(here) == timeless(elsewhere)
    assert_equal_agents(load("r")["agent"], load("here")["agent"])
    other = in_process(script, *PENDULUM, "--run-name", "other", "--seed", 2, "--total-timesteps", 70).points
    assert timeless(here)[:3] != timeless(other)[:3]

    assert (tmp_path / "runs/r/finished").exists()
    episodes = [p for p in here if "charts/episodic_return" in p]
    assert sum(p["charts/episodic_length"] for p in episodes) <= 300 and len(episodes) > 10
    own = {"losses/kl_to_old"} if script is not sac else set()
    assert LOSSES | own | {"charts/SPS", "charts/learning_rate"} <= set(here[-1]) and here[-1]["global_step"] == 300
    (segment,) = tmp_path.glob("runs/r/wandb/offline-run-*")
    (run,) = (record["run"] for record in records(segment) if record["type"] == "run")
    config = run["config"]["update"]
    assert {field.name for field in fields(script.Args)} | {"versions", "git_commit"} <= set(config)
    if script is not sac:
        assert config["bregman_stepsize"] == 0.5  # resolved, not None


def test_a_checkpoint_is_the_whole_learner_and_resuming_a_finished_run_changes_nothing(script, in_process, capsys):
    in_process(script, *SHORT)
    assert torch.equal(load()["rng"], torch.get_rng_state())
    before = contents(Path("runs"))
    assert in_process(script, *SHORT, "--resume").status == 0
    assert contents(Path("runs")) == before and "finished" in capsys.readouterr().out
    longer = in_process(script, "--resume", "--run-name", "r", "--total-timesteps", 350)
    assert longer.points[-1]["global_step"] == 350 and load()["state"]["iteration"] == 350
    old = {"old_policy.flat"} if script is not sac else set()
    optimizers = {f"{net}_optimizer.{part}" for net in ("policy", "q", "v") for part in ("mean", "square", "count")}
    assert set(load()["agent"]) >= old | optimizers | {"policy.flat", "q.flat", "v.flat", "slow_v.flat"}


def wait_for_saves(process: subprocess.Popen, run: Path, saves: int) -> None:
    times, give_up = set(), time.monotonic() + 90
    while len(times) < saves:
        assert process.poll() is None and time.monotonic() < give_up, (run.parents[1] / "stderr").read_text()
        with suppress(FileNotFoundError):
            times.add((run / "checkpoint.pt").stat().st_mtime_ns)
        time.sleep(0.01)


def test_a_run_killed_after_a_checkpoint_and_resumed_misses_no_episode_and_doubles_none(tmp_path):
    flags = (*PENDULUM, "--checkpoint-interval", 100, "--total-timesteps", 1200)
    process = start("mdpo_offpolicy", *flags, cwd=tmp_path)
    wait_for_saves(process, tmp_path / "runs/r", 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    saved = load()["state"]["iteration"]
    assert 0 < saved < 1200 and saved % 100 == 0
    resumed = finish("mdpo_offpolicy", "--resume", *flags, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    episodes = [p for p in history(tmp_path / "runs/r") if "charts/episodic_length" in p]
    end, restarts = 0, []
    for point in episodes:
        if point["global_step"] - point["charts/episodic_length"] != end:
            restarts.append((end, point["global_step"] - point["charts/episodic_length"]))
        end = point["global_step"]
    ((before, after),) = restarts or [(saved, saved)]  # no restart: an episode happened to end at the checkpoint
    assert before <= saved == after
    assert load()["state"]["iteration"] == 1200


@pytest.mark.parametrize(("name", "number"), [("sac", signal.SIGTERM), ("mdpo_tsallis", signal.SIGINT)])
def test_a_signal_stops_a_run_with_a_checkpoint_to_resume_from(name, number, tmp_path, in_process):
    process = start(name, *PENDULUM, "--total-timesteps", 1_000_000, "--checkpoint-interval", 100, cwd=tmp_path)
    wait_for_saves(process, tmp_path / "runs/r", 2)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert "Traceback" not in (tmp_path / "stderr").read_text() and not Path("runs/r/finished").exists()
    step = load()["state"]["iteration"]
    resumed = in_process(sys.modules[name], "--resume", "--run-name", "r", "--total-timesteps", step + 100)
    assert resumed.status == 0 and resumed.points[-1]["global_step"] == step + 100


def test_a_run_whose_wandb_process_dies_stops_with_a_checkpoint_and_loses_no_point(script, in_process):
    """SLURM sends SIGTERM to all processes of a job: the script's own handler may come too late."""
    died = in_process(script, *SHORT, recorder=Dying)
    assert died.status == 143 and len(died.points) == 3 and not Path("runs/r/finished").exists()
    carried = torch.load("runs/r/checkpoint.pt", weights_only=True)["state"]["points"]
    resumed = in_process(script, *SHORT, "--resume")
    assert resumed.status == 0 and Path("runs/r/finished").exists()
    assert timeless(resumed.points[:3]) == timeless(died.points)
    assert [p["global_step"] for p in resumed.points[: len(carried)]] == [step for _, step, _ in carried]
    assert len(carried) > 3  # with those that W&B did not take


def test_a_run_whose_wandb_process_dies_at_its_end_is_not_finished(script, in_process):
    in_process(script, *SHORT)
    Path("runs/r/finished").unlink()
    assert in_process(script, *SHORT, "--resume", recorder=Dying).status == 143
    assert not Path("runs/r/finished").exists()
    assert in_process(script, *SHORT, "--resume").status == 0


@pytest.mark.parametrize("fault", ["toy_envs:NanObservation-v0", "toy_envs:InfiniteReward-v0", "losses/vf_loss"])
def test_training_that_breaks_says_what_and_where_and_keeps_the_last_good_checkpoint(
    script, fault, in_process, monkeypatch, capsys
):
    what = {"toy_envs:NanObservation-v0": "observations", "toy_envs:InfiniteReward-v0": "rewards"}.get(fault, fault)
    if fault == what:
        calls, update = [], script.update
        spoil = lambda *a: calls.append(a) or update(*a) | ({fault: torch.tensor(np.nan)} if len(calls) > 300 else {})  # noqa: E731
        monkeypatch.setattr(script, "update", spoil)
    env_id = "Toy-v0" if fault == what else fault
    flags = ("--env-id", env_id, "--checkpoint-interval", 250, "--total-timesteps", 1000)
    assert in_process(script, *SHORT, *flags).status == 1
    error = capsys.readouterr().err
    step = 500 if fault == what else 300  # a loss is looked at before a checkpoint, a transition at once
    assert f"{what} not finite at step {step}" in error and "runs/r/checkpoint.pt" in error and "Traceback" not in error
    assert load()["state"]["iteration"] == 250
    assert all(tensor.isfinite().all() for tensor in load()["agent"].values())
    assert not Path("runs/r/finished").exists()


def test_evaluation_repeats_itself_and_trains_nothing(script, in_process, capsys):
    in_process(script, *PENDULUM)
    before = contents(Path("runs"))
    printed = []
    for _ in range(2):
        capsys.readouterr()
        assert script.main(["--evaluate", "--run-name", "r", "--eval-episodes", "3"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "over 3 episodes" in printed[0] and printed[0].count("episode") == 4
    assert contents(Path("runs")) == before


# --------------------------------------------------------------------------------------------------- the command line

TASKS = ("Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "HumanoidStandup", "Pendulum")


@pytest.mark.parametrize("preset", ["loaded", "minimal"])
def test_presets_and_defaults_of_a_task_are_the_papers(script, preset):
    stepsizes = (0.8, 0.4, 0.3, 0.5, 0.5, 0.3, 0.5)
    best_q = {"loaded": (1.0, 2.0, 1.0, 2.0, 1.2, 1.4, 1.5), "minimal": (1.0, 1.8, 1.4, 2.0, 1.6, 1.2, 1.5)}[preset]
    for task, stepsize, q in zip(TASKS, stepsizes, best_q, strict=True):
        env_id = f"{task}-v{1 if task == 'Pendulum' else 4}"
        args = script.parse_args(["--env-id", env_id, "--preset", preset])
        assert (args.hidden_size, args.batch_size) == ((64, 64) if preset == "minimal" else (256, 256))
        assert script is sac or args.bregman_stepsize == stepsize
        assert script is not tsallis or args.tsallis_q == args.entropy_q == q
    args = script.parse_args(["--preset", "minimal", "--hidden-size", "128"])
    assert (args.hidden_size, args.batch_size) == (128, 64)  # a flag by hand wins
    common = (args.gamma, args.tau, args.entropy_coef, args.learning_rate, args.buffer_size, args.learning_starts)
    assert common == (0.99, 0.005, 0.2, 3e-4, 1_000_000, 10_000)
    assert script is sac or args.old_policy_interval == 1000


class Unbounded(Toy):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


gym.register("Unbounded-v0", Unbounded, disable_env_checker=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--env-id Hoper-v4", "Hopper"),
        ("--env-id CartPole-v1", "Discrete(2)"),
        ("--env-id Unbounded-v0", "finite bounds"),
        ("--batch-size 100 --learning-starts 50", "--batch-size 100"),
        ("--batch-size 100 --buffer-size 50", "--buffer-size"),
        ("--total-timesteps 10000", "--learning-starts, 10000"),
        ("--entropy-coef -0.1", "--entropy-coef"),
        ("--entropy-coef nan", "--entropy-coef"),
        ("--tau 1.5", "--tau"),
        ("--tau 0", "--tau"),
        ("--gamma 1.5", "--gamma"),
        ("--gradient-steps 0", "--gradient-steps"),
        ("--hidden-size 0", "--hidden-size"),
        ("--learning-rate inf", "--learning-rate"),
        ("--seed -1", "--seed"),
        ("--evaluate --run-name absent", "runs/absent/checkpoint.pt"),
        ("--capture-video", "--evaluate"),
        ("--preset loaded-gae", "loaded-gae"),
    ],
)
def test_input_that_cannot_work_is_refused_in_plain_words(script, flags, said, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in " ".join(error.replace("│", " ").split()) and "Traceback" not in error
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("module", "flags"),
    [(module, f"--bregman-stepsize {x}") for module in (mdpo, tsallis) for x in (0, -1, "nan", "inf")]
    + [(module, "--old-policy-interval 0") for module in (mdpo, tsallis)]
    + [(tsallis, f"--{name}-q {q}") for name in ("tsallis", "entropy") for q in (0, -1, 2.01, "nan")]
    + [(tsallis, "--log-q sum")],
)
def test_an_algorithms_own_flags_are_checked_too(module, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        module.main(flags.split())
    assert stop.value.code == 2 and flags.split()[0] in capsys.readouterr().err


def test_a_resumed_run_keeps_its_flags_and_another_scripts_checkpoint_is_refused(script, in_process, capsys):
    in_process(script, *SHORT)
    args = script.parse_args(["--resume", "--run-name", "r", "--total-timesteps", "1000"])
    assert asdict(args) | dict(total_timesteps=300, resume=False) == load()["args"]
    other = mdpo if script is not mdpo else sac
    for module, flags, said in (
        (script, ("--resume", "--gamma", "0.5"), "--gamma is 0.99"),
        (script, SHORT, "--resume continues it"),
        (other, ("--resume",), f"written by {script.__name__}"),
        (other, ("--evaluate",), f"written by {script.__name__}"),
    ):
        with pytest.raises(SystemExit) as stop:
            in_process(module, "--run-name", "r", *flags)
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_help_describes_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"--{field.name.replace('_', '-')}" in text for field in fields(script.Args))


# ------------------------------------------------------------------------------------------------------- the family


def blocks(name: str) -> dict[str, str]:
    text = (ROOT / f"{name}.py").read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def test_all_but_the_algorithm_is_the_same_to_the_letter():
    ours, theirs, third = (blocks(name) for name in OFF_POLICY)
    own = {"mdpo_loss", "log_q", "log_q_density", "tsallis_loss", "sac_loss"}
    differing = {"Args", "Agent", "policy_loss", "policy_step", "update", "parse_args", "train"}
    assert (
        [k for k in ours if k not in own] == [k for k in theirs if k not in own] == [k for k in third if k not in own]
    )
    for key in set(ours) - own - differing:
        assert ours[key] == theirs[key] == third[key], key
    assert ours["train"] == theirs["train"] and ours["Agent"] == theirs["Agent"] and len(third["train"]) > 5000
    on_policy = blocks("mdpo_onpolicy")
    for key in ("refuse", "load_checkpoint", "provenance", "can_compile", "check_finite", "main"):
        assert ours[key] == on_policy[key], key


# -------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("name", OFF_POLICY)
def test_it_learns_to_swing_the_pendulum_up(name, in_process):
    """Within 4000 steps; a random policy has a return of about -1200, one that swings up and balances about -150."""
    flags = ("--learning-rate", 2e-3, "--tau", 0.02, "--gamma", 0.95, "--learning-starts", 300, "--run-name", "r")
    run = in_process(
        sys.modules[name], "--env-id", "Pendulum-v1", "--preset", "minimal", "--total-timesteps", 4000, *flags
    )
    returns = [p["charts/episodic_return"] for p in run.points if "charts/episodic_return" in p]
    assert np.mean(returns[:5]) < -900
    assert np.mean(returns[-5:]) > -500
