"""Whole runs of the on-policy scripts: what they do, record, survive and learn."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT, TESTS, Dying, contents, finish, history, records, start, timeless
from torch.distributions import Independent, Normal, kl_divergence
from toy_envs import Toy

import mdpo_onpolicy as mdpo
import ppo
import trpo

LOSSES = {f"losses/{name}" for name in ("policy_loss", "value_loss", "kl", "entropy", "explained_variance")}
EPISODE = {"global_step", "charts/episodic_return", "charts/episodic_length"}
ITERATION = LOSSES | {"global_step", "charts/SPS", "charts/learning_rate"}


def load(run: Path) -> dict:
    return torch.load(run / "checkpoint.pt", weights_only=True)


# ------------------------------------------------------------------------------------- what an iteration computes


@pytest.fixture
def watched_run(in_process, monkeypatch):
    """Three iterations on Toy, with what gae and update_policy were given, and what really happened."""

    def run(script, *flags, num_envs: int = 1) -> SimpleNamespace:
        iterations, gae, update_policy = [], script.gae, script.update_policy

        def watched_gae(*given):
            iterations.append(SimpleNamespace(gae=copy.deepcopy(given)))
            return gae(*given)

        def watched_update(agent, batch, *rest):
            vars(iterations[-1]).update(agent=copy.deepcopy(agent), batch=copy.deepcopy(batch), later_agent=agent)
            return update_policy(agent, batch, *rest)

        monkeypatch.setattr(script, "gae", watched_gae)
        monkeypatch.setattr(script, "update_policy", watched_update)
        Toy.made.clear()
        args = dict(env_id="Toy-v0", run_name="r", num_steps=50, num_envs=num_envs, total_timesteps=150 * num_envs)
        args = [f"--{name}={value}" for name, value in args.items()]
        points = in_process(script, *args, "--critic-minibatch-size", 25, *flags).points
        transitions = zip(*(env.transitions for env in Toy.made if env.transitions), strict=True)
        happened = [np.array(column) for column in zip(*(zip(*step, strict=True) for step in transitions), strict=True)]
        for k, iteration in enumerate(iterations):
            names = ("obs", "actions", "next_obs", "rewards", "terminated", "truncated")
            rows = [column[50 * k : 50 * (k + 1)] for column in happened]
            vars(iteration).update(zip(names, rows, strict=True))
        return SimpleNamespace(iterations=iterations, points=points)

    return run


ON_TOY = {"ppo": ("--minibatch-size", 25)}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_truncation_is_bootstrapped_from_the_last_observation_and_termination_is_not(script, watched_run, num_envs):
    run = watched_run(script, "--no-norm-reward", *ON_TOY.get(script.__name__, ()), num_envs=num_envs)
    assert len(run.iterations) == 3
    for k, it in enumerate(run.iterations):
        rewards, values, next_values, terminated, done, gamma, gae_lambda = it.gae
        assert (gamma, gae_lambda) == (0.99, 0.95)
        mean, deviation = it.agent.obs_moments.mean, it.agent.obs_moments.var.sqrt()

        def value(obs):
            inputs = ((torch.as_tensor(obs) - mean) / deviation).clamp(-10, 10).float()
            return it.agent.critic(inputs)[0].squeeze(-1).detach().numpy()

        np.testing.assert_allclose(values, value(it.obs), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(next_values, value(it.next_obs), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rewards, it.rewards)
        np.testing.assert_array_equal(terminated, it.terminated)
        np.testing.assert_array_equal(done, it.terminated | it.truncated)
        assert it.terminated.any() and it.truncated.any() and (k == 0) == (it.agent.obs_moments.count == 0)
        returns = it.batch["returns"].view(50, num_envs).numpy()
        np.testing.assert_allclose(returns[it.terminated], it.rewards[it.terminated], rtol=1e-4, atol=1e-4)
        bootstrapped = it.rewards + 0.99 * value(it.next_obs)
        np.testing.assert_allclose(returns[it.truncated], bootstrapped[it.truncated], rtol=1e-4, atol=1e-4)


def test_the_batch_is_what_the_policy_did_and_saw(script, watched_run):
    run = watched_run(script, *ON_TOY.get(script.__name__, ()), num_envs=2)
    for it in run.iterations:
        actions = it.batch["actions"].numpy().reshape(50, 2, 2)
        np.testing.assert_allclose(np.clip(actions, -0.5, 0.5), it.actions)  # the bounds are the environment's affair
        assert (abs(actions) > 0.5).any()
        old = Independent(Normal(it.batch["means"], it.batch["log_std"].exp()), 1)
        torch.testing.assert_close(it.batch["log_probs"], old.log_prob(it.batch["actions"]))
        torch.testing.assert_close(it.batch["obs"], it.agent.normalize(torch.as_tensor(it.obs)).flatten(0, 1))
        advantages = it.batch["advantages"].double()
        assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert advantages.std(correction=0).item() == pytest.approx(1, rel=1e-5)
        torch.testing.assert_close(it.batch["means"], it.agent.policy(it.batch["obs"])[0].detach())
    mean, log_std = it.later_agent.policy(it.batch["obs"])
    new = Independent(Normal(mean, log_std.exp()), 1)
    assert run.points[-1]["losses/kl"] == pytest.approx(kl_divergence(new, old).mean().item(), rel=1e-3, abs=1e-6)
    assert run.points[-1]["losses/entropy"] == pytest.approx(new.entropy().mean().item())
    assert it.batch["log_std"].tolist() == it.agent.policy.parts()[-1].tolist() != log_std.tolist()


def test_normalisation_is_by_the_statistics_of_all_that_was_seen(script, watched_run):
    run = watched_run(script, *ON_TOY.get(script.__name__, ()), num_envs=2)
    discounted, past = [], np.zeros(2)
    for it in run.iterations:
        for reward, done in zip(it.rewards, it.terminated | it.truncated, strict=True):
            past = 0.99 * past + reward
            discounted.append(past)
            past = past * ~done
        np.testing.assert_allclose(it.gae[0], np.clip(it.rewards / np.std(discounted), -10, 10), rtol=1e-6)
    seen = np.concatenate([it.obs.reshape(-1, 3) for it in run.iterations]).astype(np.float64)
    np.testing.assert_allclose(it.later_agent.obs_moments.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(it.later_agent.obs_moments.var, seen.var(0), rtol=1e-5)


def test_every_episode_is_logged_with_its_true_return_length_and_step(script, watched_run):
    run = watched_run(script, *ON_TOY.get(script.__name__, ()), num_envs=2)
    expected, total, length = [], np.zeros(2), np.zeros(2)
    for t in range(150):
        it = run.iterations[t // 50]
        total, length = total + it.rewards[t % 50], length + 1
        for i in np.flatnonzero((it.terminated | it.truncated)[t % 50]):
            expected.append((2 * t + i + 1, pytest.approx(total[i]), length[i]))
            total[i] = length[i] = 0
    logged = [p for p in run.points if "charts/episodic_return" in p]
    assert [tuple(p[key] for key in sorted(EPISODE, reverse=True)) for p in logged] == expected


# ------------------------------------------------------------------------------------------------ what is recorded


@pytest.mark.parametrize("preset", ["minimal", "loaded", "loaded-gae"])
def test_every_preset_runs_and_its_offline_wandb_run_reads_back(script, preset, in_process, tmp_path):
    assert in_process(script, *SHORT, "--preset", preset, record=False).status == 0
    points = history(tmp_path / "runs/r")
    episodes = [p for p in points if "charts/episodic_return" in p]
    iterations = [p for p in points if "charts/SPS" in p]
    assert episodes and all(set(p) >= EPISODE for p in episodes)
    assert [p["global_step"] for p in iterations] == [256, 512] and all(set(p) >= ITERATION for p in iterations)
    assert all("global_step" in p for p in points) and all(np.isfinite(float(x)) for p in points for x in p.values())
    rate, decay = script.Args().learning_rate, 1 if preset == "minimal" or script is mdpo else 0.5
    assert [p["charts/learning_rate"] for p in iterations] == pytest.approx([rate, rate * decay])

    (segment,) = tmp_path.glob("runs/r/wandb/offline-run-*")
    (run,) = (record["run"] for record in records(segment) if record["type"] == "run")
    config = run["config"]["update"]
    assert {field.name for field in fields(script.Args)} | {"versions", "git_commit"} <= set(config)
    assert (config["preset"], config["env_id"], config["exp_name"]) == (preset, SHORT[1], script.__name__)
    assert config["versions"]["torch"] == version("torch")


def test_the_same_seed_gives_the_same_metrics_to_the_last_bit(script, in_process, finished_run):
    elsewhere = history(finished_run(script.__name__) / "runs/r")  # by another process, through W&B's file
    here = in_process(script, *SHORT).points
    other_seed = in_process(script, *SHORT, "--run-name", "other", "--seed", 2).points
    assert len(here) > 10
    assert timeless(here) == timeless(elsewhere)
    assert timeless(here) != timeless(other_seed)


def test_worker_processes_give_the_same_metrics(script, in_process):
    serial, parallel = (
        in_process(script, *SHORT, "--num-envs", 2, "--run-name", f"with{flag}", flag).points
        for flag in ("--no-async-envs", "--async-envs")
    )
    assert len(serial) > 10
    assert timeless(serial) == timeless(parallel)


# ------------------------------------------------------------------------------------------------- stop and resume


def test_a_checkpoint_is_the_whole_learner(script, watched_run, tmp_path):
    run = watched_run(script, *ON_TOY.get(script.__name__, ()))
    assert torch.equal(load(tmp_path / "runs/r")["rng"], torch.get_rng_state())
    agent = script.Agent(3, 2, script.Args())
    assert script.load_checkpoint(script.Args(run_name="r"), agent)
    learner = run.iterations[-1].later_agent.state_dict()
    names = {"policy.flat", "critic.flat", "critic_optimizer.square", "critic_optimizer.count", "return_moments.var"}
    assert names | {"obs_moments.mean", "obs_moments.count"} <= set(learner)
    for name, tensor in agent.state_dict().items():
        assert torch.equal(tensor, learner[name]), name


def test_two_resumes_of_one_checkpoint_agree_to_the_bit(script, in_process, copied_run, tmp_path):
    shutil.copytree(copied_run(script.__name__), tmp_path / "runs/twin", symlinks=True)
    for name in ("r", "twin"):
        path = tmp_path / "runs" / name / "checkpoint.pt"
        torch.save(torch.load(path) | dict(args=torch.load(path)["args"] | dict(run_name=name)), path)
    first, second = (
        in_process(script, "--resume", "--run-name", name, "--total-timesteps", 1024).points for name in ("r", "twin")
    )
    assert [p["global_step"] for p in first if "charts/SPS" in p][-2:] == [768, 1024]
    assert timeless(first) == timeless(second)
    for name, tensor in load(tmp_path / "runs/r")["agent"].items():
        assert torch.equal(tensor, load(tmp_path / "runs/twin")["agent"][name]), name


def test_a_resumed_run_goes_on_with_the_random_numbers_of_its_checkpoint(script, in_process, copied_run, monkeypatch):
    saved, states, noise = load(copied_run(script.__name__))["rng"], [], script.Agent.noise
    monkeypatch.setattr(script.Agent, "noise", lambda *a: states.append(torch.get_rng_state()) or noise(*a))
    in_process(script, "--resume", "--run-name", "r", "--total-timesteps", 768)
    assert len(states) == 1 and torch.equal(states[0], saved)


def wait_for_saves(process: subprocess.Popen, run: Path, saves: int) -> None:
    """Until a run has written its checkpoint so many times, the first of them before it trains."""
    times, give_up = set(), time.monotonic() + 90
    while len(times) < saves:
        assert process.poll() is None and time.monotonic() < give_up, (run.parents[1] / "stderr").read_text()
        with suppress(FileNotFoundError):
            times.add((run / "checkpoint.pt").stat().st_mtime_ns)
        time.sleep(0.01)


def test_a_run_killed_after_a_checkpoint_and_resumed_misses_no_episode_and_doubles_none(tmp_path):
    run, flags = tmp_path / "runs/r", (*SHORT, "--checkpoint-interval", 512, "--total-timesteps", 10_240)
    process = start("mdpo_onpolicy", *flags, cwd=tmp_path)
    wait_for_saves(process, run, 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    saved = load(run)["state"]["iteration"] * 256
    assert 0 < saved < 10_240 and saved % 512 == 0
    resumed = finish("mdpo_onpolicy", "--resume", *flags, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
    points = history(run)
    assert [p["global_step"] for p in points if "charts/SPS" in p] == list(range(256, 10_241, 256))
    episodes = [(p["global_step"], p["charts/episodic_length"]) for p in points if "charts/episodic_length" in p]
    end, restarts = 0, []
    for step, length in episodes:
        if step - length != end:
            restarts.append((end, step - length))
        end = step
    ((before, after),) = restarts or [(saved, saved)]  # no restart: an episode happened to end at the checkpoint
    assert before <= saved == after
    assert 10_240 - end < 1000


@pytest.mark.parametrize(("name", "number"), [("trpo", signal.SIGTERM), ("ppo", signal.SIGINT)])
def test_a_signal_stops_a_run_with_a_checkpoint_to_resume_from(name, number, tmp_path, in_process):
    run = tmp_path / "runs/r"
    process = start(name, *SHORT, "--total-timesteps", 1_000_000, "--checkpoint-interval", 512, cwd=tmp_path)
    wait_for_saves(process, run, 2)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    step = load(run)["state"]["iteration"] * 256
    assert [p["global_step"] for p in history(run) if "charts/SPS" in p] == list(range(256, step + 1, 256))
    resumed = in_process(sys.modules[name], "--resume", "--run-name", "r", "--total-timesteps", step + 256)
    assert resumed.status == 0 and resumed.points[-1]["global_step"] == step + 256


KILLED_WHILE_SAVING = """
import io, os, signal, sys, torch
import {name} as script
save, saves = torch.save, []

def half_a_save(state, file, *rest):
    saves.append(state)
    if len(saves) < 3:
        return save(state, file, *rest)
    save(state, whole := io.BytesIO(), *rest)
    with open(file, "wb") if isinstance(file, (str, os.PathLike)) else file as file:
        file.write(whole.getvalue()[:len(whole.getvalue()) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = half_a_save
script.main(sys.argv[1:])
"""


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


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, in_process):
    code = [sys.executable, "-c", KILLED_WHILE_SAVING.format(name="mdpo_onpolicy")]
    flags = (*SHORT, "--checkpoint-interval", "256", "--wandb-mode", "disabled")
    process = subprocess.run([*code, *flags], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert load(tmp_path / "runs/r")["state"]["iteration"] == 1
    resumed = in_process(mdpo, *flags, "--resume")
    assert resumed.status == 0 and resumed.points[-1]["global_step"] == 512


def test_resuming_a_finished_run_changes_nothing(script, in_process, copied_run, capsys):
    run = copied_run(script.__name__)
    before = contents(run)
    assert in_process(script, *SHORT, "--resume").status == 0
    assert contents(run) == before
    assert "finished" in capsys.readouterr().out


def test_a_resumed_run_carries_the_points_it_logged_again(in_process, copied_run, monkeypatch):
    """Or a second kill, before W&B has flushed them, would leave a hole."""
    path, saved, save = copied_run("ppo") / "checkpoint.pt", [], torch.save
    checkpoint = torch.load(path)
    points = [(0.0, step, point) for _, step, point in checkpoint["state"]["points"]]  # of long ago
    torch.save(checkpoint | dict(state=checkpoint["state"] | dict(points=points)), path)
    monkeypatch.setattr(torch, "save", lambda c, file: saved.append(list(c["state"]["points"])) or save(c, file))
    run = in_process(ppo, "--resume", "--run-name", "r", "--total-timesteps", 768)
    assert points and [p["global_step"] for p in run.points[: len(points)]] == [step for _, step, _ in points]
    assert [point[1:] for point in saved[0]] == [point[1:] for point in points]


def test_a_run_killed_after_its_last_checkpoint_still_comes_to_say_that_it_is_finished(in_process, copied_run):
    run = copied_run("ppo")
    (run / "finished").unlink()
    again = in_process(ppo, "--resume", "--run-name", "r")
    assert again.status == 0 and (run / "finished").read_text() == "512\n"
    assert again.points[-1]["global_step"] == 512


def test_a_worker_that_raises_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    flags = ("--env-id", "toy_envs:Raises-v0", "--num-envs", 2, "--async-envs", "--wandb-mode", "disabled")
    process = finish("ppo", *flags, "--num-steps", 1024, cwd=tmp_path)
    assert process.returncode == 1 and "the toy broke" in process.stderr


def test_resume_without_a_checkpoint_starts_the_run(script, in_process, tmp_path):
    assert in_process(script, *SHORT, "--resume").points[-1]["global_step"] == 512
    assert (tmp_path / "runs/r/finished").exists()


# --------------------------------------------------------------------------------------------------- what breaks


@pytest.mark.parametrize("fault", ["toy_envs:NanObservation-v0", "toy_envs:InfiniteReward-v0", "losses/value_loss"])
def test_training_that_breaks_says_what_and_where_and_keeps_the_last_good_checkpoint(
    script, fault, in_process, monkeypatch, tmp_path, capsys
):
    calls, update_critic = [], script.update_critic
    if fault == "losses/value_loss":
        spoil = lambda *a: calls.append(a) or update_critic(*a) | ({fault: np.nan} if len(calls) == 2 else {})  # noqa: E731
        monkeypatch.setattr(script, "update_critic", spoil)
    what = {"toy_envs:NanObservation-v0": "observations", "toy_envs:InfiniteReward-v0": "rewards"}.get(fault, fault)
    env_id = "Toy-v0" if fault == what else fault
    result = in_process(script, *SHORT, "--env-id", env_id, "--checkpoint-interval", 256, "--total-timesteps", 1024)
    error = capsys.readouterr().err
    assert result.status == 1
    assert f"{what} not finite at step 512" in error and "runs/r/checkpoint.pt" in error and "Traceback" not in error
    saved = load(tmp_path / "runs/r")
    assert saved["state"]["iteration"] == 1
    assert all(tensor.isfinite().all() for tensor in saved["agent"].values())
    assert not (tmp_path / "runs/r/finished").exists()


# -------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    ("module", "steps", "flags"),
    [
        (mdpo, 30_000, ("--learning-rate", 1e-3)),
        (trpo, 25_000, ()),
        (ppo, 25_000, ()),
    ],
)
def test_it_learns_to_balance_the_inverted_pendulum(module, steps, flags, in_process):
    """A mean return of 500 of the possible 1000 in the last ten episodes; a random policy has about 6."""
    flags = ("--num-steps", 1024, "--total-timesteps", steps, *flags)
    returns = [p["charts/episodic_return"] for p in in_process(module, *SHORT, *flags).points if set(p) >= EPISODE]
    assert np.mean(returns[:10]) < 50
    assert np.mean(returns[-10:]) >= 500
