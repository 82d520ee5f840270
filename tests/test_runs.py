"""Whole runs of all six scripts: what they record, how they repeat, stop and resume, what breaks, and learning."""

import importlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ON_POLICY, Dying, Process, Recorder, by_step, contents, history, main_of, records, short, timeless
from toy_envs import Toy
from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

EPISODE = {"charts/episodic_return", "charts/episodic_length"}
CHARTS = {"charts/SPS", "charts/learning_rate"}
LOSSES = {
    True: {f"losses/{name}" for name in ("policy_loss", "value_loss", "kl", "entropy", "explained_variance")},
    False: {f"losses/{name}" for name in ("actor_loss", "qf1_loss", "qf2_loss", "vf_loss", "qf1_values", "entropy")},
}
SMALL = ("--hidden-size", 16, "--batch-size", 16, "--buffer-size", 150, "--learning-starts", 200)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def is_on_policy(script: ModuleType | str) -> bool:
    return getattr(script, "__name__", script) in ON_POLICY


def tiny(script: ModuleType | str, env_id: str = "Toy-v0", steps: int = 256, name: str = "r") -> tuple:
    """Flags for a run of a fraction of a second: iterations of 64 steps, or updates after 200 of them."""
    own = ("--num-steps", 64) if is_on_policy(script) else SMALL
    return ("--env-id", env_id, "--total-timesteps", steps, "--run-name", name, *own)


def long(name: str) -> tuple:
    """Flags for a run that takes long enough to be interrupted between its many checkpoints."""
    own = (
        ("--checkpoint-interval", 128) if name in ON_POLICY else ("--checkpoint-interval", 50, "--learning-starts", 600)
    )
    return (*tiny(name, "InvertedPendulum-v4", 1920 if name in ON_POLICY else 1100), *own)


def load(name: str = "r") -> dict:
    return torch.load(Path("runs", name, "checkpoint.pt"), weights_only=True)


def tensors(part, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint or of a part of it, by name."""
    if torch.is_tensor(part):
        return {name: part}
    found = {}
    for key, value in part.items() if isinstance(part, dict) else ():
        found |= tensors(value, f"{name}.{key}")
    return found


def differing(one: dict, other: dict) -> set[str]:
    """Names of the parts of two checkpoints that are not equal to the bit."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    return {name.split(".")[1] for name in ours if not torch.equal(ours[name], theirs[name])}


def episodes(points: list[dict]) -> list[dict]:
    return [point for point in points if "charts/episodic_return" in point]


def stopping(number: int, at: int) -> type[Recorder]:
    """A recorder that sends a signal to this process, once, when a step is logged."""

    class Stopping(Recorder):
        sent = False

        def log(self, point: dict, step: int) -> None:
            super().log(point, step)
            if step >= at and not self.sent:
                self.sent = True
                signal.raise_signal(number)

    return Stopping


# ------------------------------------------------------------------------------------------------ what is recorded


def test_a_run_records_the_metrics_of_the_field_its_arguments_and_its_packages(script, finished_run):
    run = finished_run(script.__name__).run
    (segment,) = run.glob("wandb/offline-run-*")
    log = records(segment)
    rows = [record["history"]["item"] for record in log if record["type"] == "history"]
    assert all(row["global_step"] == row["_step"] for row in rows)
    assert all(np.isfinite(float(value)) for row in rows for value in row.values())
    assert len(episodes(rows)) > 10 and all(row.keys() >= EPISODE for row in episodes(rows))
    updates = [row for row in rows if "charts/SPS" in row]
    assert [row["_step"] for row in updates] == ([256, 512, 768, 1024] if is_on_policy(script) else [1000])
    own = {"losses/kl_to_old"} if "mdpo" in script.__name__ and not is_on_policy(script) else set()
    assert all(CHARTS | LOSSES[is_on_policy(script)] | own <= row.keys() for row in updates)

    (config,) = (record["run"]["config"]["update"] for record in log if record["type"] == "run")
    assert {field.name for field in fields(script.Args)} <= config.keys()
    assert (config["env_id"], config["exp_name"]) == ("InvertedPendulum-v4", script.__name__)
    assert script.__name__ == "sac" or is_on_policy(script) or config["bregman_stepsize"] == 0.5  # resolved, not None
    environment = {key: value for r in log if r["type"] == "environment" for key, value in r["environment"].items()}
    assert environment["args"] == list(short(script)) and environment["program"].endswith(f"{script.__name__}.py")
    assert f"torch=={version('torch')}" in (segment / "files/requirements.txt").read_text()


def test_a_run_in_a_git_repository_records_its_commit(launch, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    process = launch("ppo", *tiny("ppo", "Pendulum-v1", 64))
    process.join()
    assert process.exitcode == 0
    (segment,) = Path("runs/r/wandb").glob("offline-run-*")
    assert commit in str([record for record in records(segment) if record["type"] in ("environment", "run")])


@pytest.mark.parametrize("num_envs", [1, 2])
def test_every_episode_is_logged_with_its_true_return_length_and_step(script, num_envs, in_process):
    if num_envs > 1 and not is_on_policy(script):
        pytest.skip("one environment")
    Toy.made.clear()
    several = ("--num-envs", num_envs) if num_envs > 1 else ()
    points = in_process(script, *tiny(script, steps=256), *several).points
    envs = [env for env in Toy.made if env.transitions]
    assert len(envs) == num_envs and len({env.transitions[0][0][0] for env in envs}) == num_envs  # other seeds
    expected, total, length = [], np.zeros(num_envs), np.zeros(num_envs)
    for t in range(256 // num_envs):
        for i, env in enumerate(envs):
            reward, *ends = env.transitions[t][3:]
            total[i], length[i] = total[i] + reward, length[i] + 1
            if any(ends):
                expected.append((num_envs * t + i + 1, pytest.approx(total[i], rel=1e-5), length[i]))
                total[i] = length[i] = 0
    keys = ("global_step", "charts/episodic_return", "charts/episodic_length")
    assert len(expected) > 20 and [tuple(p[key] for key in keys) for p in episodes(points)] == expected


@pytest.mark.parametrize("preset", ["minimal", "loaded", "loaded-gae"])
def test_every_preset_trains(script, preset, in_process):
    if not is_on_policy(script) and preset == "loaded-gae":
        pytest.skip("on-policy only")
    steps = () if is_on_policy(script) else ("--total-timesteps", 1000, "--learning-starts", 990)
    run = in_process(script, *tiny(script, steps=128), "--preset", preset, *steps)
    assert run.status == 0 and all(np.isfinite(float(value)) for point in run.points for value in point.values())
    rates = [p["charts/learning_rate"] for p in run.points if "charts/SPS" in p]
    anneals = script.__name__ in ("trpo", "ppo") and preset != "minimal"
    ratios = [1, 0.5 if anneals else 1] if is_on_policy(script) else [1]
    assert rates == pytest.approx([ratio * script.Args().learning_rate for ratio in ratios])


def test_wandb_is_silent_and_one_line_says_where_the_run_is_and_how_to_go_on(script, finished_run, copied_run, capsys):
    process, name = finished_run(script.__name__).process, script.__name__
    (line,) = process.stdout.splitlines()
    assert line.startswith("finished: ") and "runs" in line
    assert "wandb" not in process.stderr.lower() and "warn" not in process.stderr.lower()
    assert "steps/s" in process.stderr and "/1024" in process.stderr and "return=" in process.stderr  # the bar
    copied_run(name)
    python, path, *flags = shlex.split(line.removeprefix("finished: "))
    assert (python, path) == ("python", f"{name}.py") and script.main([*flags, "--eval-episodes", "1"]) == 0
    assert "over 1 episodes" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------- determinism


def test_the_same_command_gives_the_same_log_and_the_same_checkpoint_to_the_bit(script, finished_run, in_process):
    first = finished_run(script.__name__).run  # by another process, through W&B's file
    second = by_step(in_process(script, *short(script)).points)
    assert len(second) > 20 and timeless(second) == timeless(history(first))
    assert differing(torch.load(first / "checkpoint.pt"), load()) == set()
    if not is_on_policy(script):
        assert (first / "replay.bin").read_bytes() == Path("runs/r/replay.bin").read_bytes()
    fewer = ("--total-timesteps", 256 if is_on_policy(script) else 832)
    other = in_process(script, *short(script), "--run-name", "other", "--seed", 2, *fewer).points
    assert timeless(by_step(other))[:5] != timeless(second)[:5] and "policy" in differing(load(), load("other"))


def test_runs_with_two_environments_or_two_gradient_steps_repeat_to_the_bit(script, in_process):
    flags = ("--num-envs", 2) if is_on_policy(script) else ("--gradient-steps", 2)
    one, two = (in_process(script, *tiny(script, name=name), *flags).points for name in ("one", "two"))
    assert timeless(one) == timeless(two) and differing(load("one"), load("two")) == set()
    in_process(script, *tiny(script, name="other"))
    assert "policy" in differing(load("one"), load("other"))


def test_two_resumes_of_one_checkpoint_agree_to_the_bit_and_follow_its_random_numbers(script, in_process):
    in_process(script, *tiny(script))
    first_obs = Toy.made[-1].transitions[0][0]
    for name in ("twin", "other"):
        shutil.copytree("runs/r", f"runs/{name}", symlinks=True)
    torch.manual_seed(99)
    torch.save(load("other") | dict(rng=torch.get_rng_state()), "runs/other/checkpoint.pt")
    points, obs = {}, {}
    for name in ("r", "twin", "other"):
        torch.manual_seed(len(points))  # of this process: it must not matter
        points[name] = in_process(script, "--resume", "--run-name", name, "--total-timesteps", 320).points
        obs[name] = Toy.made[-1].transitions[0][0].tolist()
    assert timeless(points["r"]) == timeless(points["twin"]) and points["r"][-1]["global_step"] > 256
    assert differing(load("r"), load("twin")) == set()
    assert {"policy", "rng"} <= differing(load("r"), load("other"))
    assert obs["r"] == obs["twin"] != first_obs.tolist()  # a new episode, not the first one again


def test_a_run_stopped_by_signals_and_resumed_is_the_uninterrupted_run_to_the_bit(script, in_process, capsys):
    """In an environment without chance, whose episodes end where it stops: the checkpoint is the whole learner."""
    flags = (*tiny(script, "Clockwork-v0", 192), *(() if is_on_policy(script) else ("--learning-starts", 32)))
    whole = in_process(script, *flags, "--run-name", "whole")
    points = []
    for number, step in ((signal.SIGTERM, 64), (signal.SIGINT, 128)):
        capsys.readouterr()
        stopped = in_process(script, *flags, "--resume", recorder=stopping(number, step))
        points += stopped.points
        assert stopped.status == 128 + number and load()["step"] == step and not Path("runs/r/finished").exists()
        output = capsys.readouterr()
        assert f"stopped at step {step}: python" in output.out and "--run-name r --resume" in output.out
        assert "Traceback" not in output.err
    resumed = in_process(script, "--resume", "--run-name", "r")
    assert resumed.status == 0 and Path("runs/r/finished").exists()
    points = by_step(points + resumed.points)
    assert len(points) > 20 and timeless(points) == timeless(by_step(whole.points))
    assert differing(load("r"), load("whole")) == set()
    if not is_on_policy(script):
        assert Path("runs/r/replay.bin").read_bytes() == Path("runs/whole/replay.bin").read_bytes()


# ------------------------------------------------------------------------------------------- kill, signal and resume


def wait_for_step(process: Process, step: int, name: str = "r") -> None:
    """Until a run's checkpoint is at least at a step."""
    give_up, reached = time.monotonic() + 60, -1
    while reached < step:
        assert process.is_alive() and time.monotonic() < give_up, Path("stderr").read_text()
        time.sleep(0.005)
        with suppress(FileNotFoundError):
            reached = load(name)["step"]


def interrupt(process: Process, how: str) -> int:
    """Interrupt a process and return the exit status it must have."""
    if how == "SIGKILL while suspended":
        process.signal(signal.SIGSTOP, everywhere=True)
        time.sleep(1.5)  # W&B writes its file every second
    number = getattr(signal, how.split()[0])
    process.signal(number, everywhere="SIGKILL" in how or "everywhere" in how)
    process.join(60)
    return -number if number == signal.SIGKILL else 128 + number


INTERRUPTIONS = [
    ("mdpo_onpolicy", ("SIGKILL", "SIGKILL")),
    ("mdpo_offpolicy", ("SIGKILL",)),
    ("trpo", ("SIGKILL while suspended",)),
    ("sac", ("SIGKILL while suspended",)),
    ("ppo", ("SIGTERM everywhere", "SIGINT")),
    ("mdpo_tsallis", ("SIGTERM everywhere",)),
]


@pytest.mark.parametrize(("name", "interruptions"), INTERRUPTIONS)
def test_the_log_of_an_interrupted_and_resumed_run_has_no_hole_and_no_doubled_point(
    name, interruptions, launch, in_process
):
    """It is the log of an uninterrupted run up to the checkpoint, and that of any resume of the checkpoint after it."""
    script, flags, step = importlib.import_module(name), long(name), 0
    expected = by_step(in_process(script, *flags, "--run-name", "whole").points)
    for number, how in enumerate(interruptions):
        process = launch(name, *flags, "--resume")
        wait_for_step(process, step + random.randint(1, 3) * 100)
        time.sleep(random.uniform(0, 0.05))
        status = interrupt(process, how)
        assert process.exitcode == status and "Traceback" not in Path("stderr").read_text()
        step = load()["step"]
        shutil.copytree("runs/r", f"runs/{number}", symlinks=True)
        after = by_step(in_process(script, "--resume", "--run-name", str(number)).points)
        expected = [p for p in expected if p["global_step"] <= step] + [p for p in after if p["global_step"] > step]
    process = launch(name, *flags, "--resume")
    process.join(60)
    assert process.exitcode == 0 and Path("runs/r/finished").exists()
    log = history(Path("runs/r"))
    steps = [point["global_step"] for point in log]
    assert steps == sorted(set(steps)) and len(list(Path("runs/r/wandb").glob("offline-run-*"))) > len(interruptions)
    assert timeless(log) == timeless(expected)


def test_a_second_signal_ends_a_run_at_once(launch):
    process = launch("mdpo_onpolicy", *tiny("mdpo_onpolicy", "InvertedPendulum-v4", 10**7), "--num-steps", 10**7)
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up and not (Path("stderr").exists() and "steps/s" in Path("stderr").read_text()):
        time.sleep(0.05)
    process.signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.is_alive()  # in the middle of its only iteration
    process.signal(signal.SIGTERM)
    process.join(10)
    assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("error", [ConnectionResetError, HandleAbandonedError, MailboxClosedError])  # all were seen
def test_a_run_whose_wandb_process_dies_stops_at_a_checkpoint_and_loses_no_point(
    error, script, in_process, monkeypatch, capsys
):
    """SLURM sends SIGTERM to all processes of a job: W&B's may be gone before the script's own handler runs."""
    monkeypatch.setattr(Dying, "error", error)
    flags = tiny(script, "Clockwork-v0", 256)
    whole = in_process(script, *flags, "--run-name", "whole").points
    for _ in range(2):  # the second time it dies while the points of the first are logged again
        died = in_process(script, *flags, "--resume", recorder=Dying)
        assert died.status == 143 and len(died.points) == 3 and not Path("runs/r/finished").exists()
        assert timeless(died.points) == timeless(whole[:3])
        assert f"W&B did not finish: {error.__name__}\n" in capsys.readouterr().err
    step = load()["step"]
    resumed = in_process(script, *flags, "--resume")
    assert resumed.status == 0 and Path("runs/r/finished").exists()
    first, second = ([p for p in by_step(points) if p["global_step"] <= step] for points in (resumed.points, whole))
    assert len(first) > 3 and timeless(first) == timeless(second)


def test_a_run_whose_wandb_process_dies_at_its_end_is_not_finished(script, in_process):
    in_process(script, *tiny(script))
    Path("runs/r/finished").unlink()
    assert in_process(script, "--resume", "--run-name", "r", recorder=Dying).status == 143
    assert not Path("runs/r/finished").exists()
    assert in_process(script, "--resume", "--run-name", "r").status == 0 and Path("runs/r/finished").exists()


class Killed(BaseException):
    """Ends a run as a kill does: no handler of the script catches it."""


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(script, in_process, monkeypatch):
    save, saves = torch.save, []

    def half_a_save(state, file, *rest):
        save(state, file, *rest)
        saves.append(state)
        if len(saves) == 2:
            file.truncate(file.tell() // 2)
            raise Killed

    flags = (*tiny(script), "--checkpoint-interval", 64)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half_a_save)
        with pytest.raises(Killed):
            in_process(script, *flags)
    assert load()["step"] == 64
    assert in_process(script, *flags, "--resume").status == 0 and load()["step"] == 256


def test_resuming_a_finished_run_changes_neither_the_learner_nor_the_log(script, in_process, copied_run, capsys):
    run = copied_run(script.__name__)
    files, points = contents(run), history(run)
    assert in_process(script, *short(script), "--resume").status == 0
    assert "finished: " in capsys.readouterr().out
    assert timeless(history(run)) == timeless(points) and len(points) > 3
    after = contents(run)
    assert all(after[name] == files[name] for name in files if name.startswith(("checkpoint", "replay", "finished")))


def test_the_progress_bar_of_a_resumed_run_never_goes_back(script, in_process, monkeypatch):
    """Logging the points of the checkpoint again is not progress: speed and time left would be wrong."""
    in_process(script, *tiny(script))
    updates, update = [], script.tqdm.update
    monkeypatch.setattr(script.tqdm, "update", lambda bar, n: updates.append(n) or update(bar, n))
    in_process(script, "--resume", "--run-name", "r")
    assert len(updates) > 3 and set(updates) == {0}


def test_a_run_killed_after_its_last_checkpoint_is_marked_finished_by_a_resume(script, in_process, copied_run):
    run = copied_run(script.__name__)
    (run / "finished").unlink()
    assert in_process(script, "--resume", "--run-name", "r").status == 0
    assert (run / "finished").read_text() == "1024\n"


def test_resume_without_a_checkpoint_says_so_and_starts_the_run(script, in_process, capsys):
    run = in_process(script, *tiny(script), "--resume")
    assert run.status == 0 and Path("runs/r/finished").exists() and load()["step"] == 256
    assert "no checkpoint in runs/r, starting a new run" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["trpo", "sac"])
def test_two_processes_cannot_train_one_run_and_the_lock_goes_with_its_holder(name, launch, in_process):
    flags = (*tiny(name, "InvertedPendulum-v4", 10**6), "--resume", "--checkpoint-interval", 64)
    first = launch(name, *flags)
    wait_for_step(first, 64)
    before = Path("runs/r/args.json").read_bytes()
    second = launch(name, *flags, "--gamma", 0.5)
    second.join(30)
    assert second.exitcode == 2 and "error: runs/r is in use by another process" in Path("stderr").read_text()
    assert Path("runs/r/args.json").read_bytes() == before
    wait_for_step(first, load()["step"] + 64)  # unharmed
    assert len(list(Path("runs/r/wandb").glob("offline-run-*"))) == 1
    first.signal(signal.SIGKILL, everywhere=True)
    first.join()
    step = max(load()["step"] // 64 * 64 + 64, 256)
    again = in_process(importlib.import_module(name), "--resume", "--run-name", "r", "--total-timesteps", step)
    assert again.status == 0 and again.points[-1]["global_step"] <= step == load()["step"]


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_resume_without_its_replay_buffer_gets_a_sentence(off_policy, damage, copied_run, in_process, capsys):
    path = copied_run(off_policy.__name__) / "replay.bin"
    size = path.stat().st_size
    path.unlink() if damage == "missing" else os.truncate(path, size - 4 if damage == "short" else size + 4)
    before = (path.parent / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as stop:
        in_process(off_policy, "--resume", "--run-name", "r", "--total-timesteps", 1100)
    assert stop.value.code == 2 and "runs/r/replay.bin" in capsys.readouterr().err
    assert (path.parent / "checkpoint.pt").read_bytes() == before
    assert off_policy.main(["--evaluate", "--run-name", "r", "--eval-episodes", "1"]) == 0  # needs no buffer


# ---------------------------------------------------------------------------------------------------- what breaks

NOT_FINITE = {"NanObservation-v0": "observations", "InfiniteReward-v0": "rewards"}


def spoil(script: ModuleType, fault: str, monkeypatch) -> str:
    """Make a loss NaN from the 21st on, or the weights in the update before a checkpoint. Returns the loss's name."""
    calls, name = [], "value_loss" if is_on_policy(script) else "update"
    function = getattr(script, name)

    def spoiled(first, *given):
        calls.append(function(first, *given))
        if name == "update" and fault == "weights" and len(calls) == 74:
            for parameter in first.parameters():
                parameter.data.fill_(torch.nan)
        elif name == "update" and fault == "loss" and len(calls) > 20:
            calls[-1]["losses/vf_loss"] = torch.tensor(torch.nan)
        elif name == "value_loss" and fault == "weights" and len(calls) == 25:
            return calls[-1] + (0 * first).sum().sqrt()  # its gradient is NaN
        elif name == "value_loss" and fault == "loss" and len(calls) > 20:
            return torch.nan * calls[-1]
        return calls[-1]

    monkeypatch.setattr(script, name, spoiled)
    return "losses/value_loss" if is_on_policy(script) else "losses/vf_loss"


@pytest.mark.parametrize("fault", [*NOT_FINITE, "loss", "weights"])
def test_training_that_breaks_says_what_and_where_and_keeps_the_last_good_checkpoint(
    script, fault, in_process, monkeypatch, capsys
):
    on_policy = is_on_policy(script)
    if fault in NOT_FINITE:  # at the 300th step. On-policy an episode may be logged before the rollout is checked
        env_id, steps, good = fault, range(300, 321), 256
        named = {NOT_FINITE[fault], *(["charts/episodic_return"] if on_policy else [])}
    else:
        loss = spoil(script, fault, monkeypatch)
        env_id, steps, good = (
            "Toy-v0",
            [320 if on_policy else 1000 if fault == "loss" else 1024],
            256 if on_policy else 960,
        )
        named = {loss} if fault == "loss" else None
    own = ("--critic-minibatch-size", 64, "--critic-epochs", 5) if on_policy else ("--learning-starts", 950)
    assert in_process(script, *tiny(script, env_id, 1280), "--checkpoint-interval", 64, *own).status == 1
    error = capsys.readouterr().err
    what, step = re.search(r"error: (\S+) not finite at step (\d+)", error).groups()
    assert (named is None or what in named) and int(step) in steps
    assert "runs/r, if any, is kept" in error and "Traceback" not in error and not Path("runs/r/finished").exists()
    saved = load()
    assert saved["step"] == good and all(x.isfinite().all() for x in tensors(saved).values())


DiskUsage = namedtuple("DiskUsage", "total used free")


def test_a_run_on_a_disk_that_is_nearly_full_stops_at_a_checkpoint_and_resumes_later(
    script, in_process, monkeypatch, capsys
):
    flags = (*tiny(script), "--checkpoint-interval", 64)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: DiskUsage(10**9, 9 * 10**8, 10**8))
        assert in_process(script, *flags).status == 1
    error = capsys.readouterr().err
    assert "disk" in error and "step 64" in error and "Traceback" not in error
    assert load()["step"] == 64 and not Path("runs/r/finished").exists()
    assert in_process(script, *flags, "--resume").status == 0 and load()["step"] == 256


def test_a_replay_buffer_that_will_not_fit_on_the_disk_gets_a_sentence(off_policy, in_process, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(1000, 0, 1000))
    with pytest.raises(SystemExit) as stop:
        in_process(off_policy, *tiny(off_policy))
    assert stop.value.code == 2 and "GB" in capsys.readouterr().err
    assert not Path("runs/r/checkpoint.pt").exists()


def test_a_disk_that_is_really_full_leaves_the_checkpoint_as_it_was(script, in_process, capsys):
    Path("runs").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "runs"], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        flags = ("--wandb-mode", "disabled", "--checkpoint-interval", 64)
        assert in_process(script, *tiny(script), *flags).status == 1 and "disk" in capsys.readouterr().err
        before = Path("runs/r/checkpoint.pt").read_bytes()
        assert load()["step"] == 64
        with suppress(OSError), open("runs/filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert shutil.disk_usage("runs").free < 4096
        with suppress(SystemExit):  # off-policy it does not even start
            assert in_process(script, "--resume", "--run-name", "r").status == 1
        assert "Traceback" not in capsys.readouterr().err
        assert Path("runs/r/checkpoint.pt").read_bytes() == before and not Path("runs/r/finished").exists()
    finally:
        subprocess.run(["umount", "--lazy", "runs"], check=True)


# -------------------------------------------------------------------------------------------------------- learning

BALANCE = ("--env-id", "InvertedPendulum-v4", "--run-name", "r")
SWING_UP = ("--env-id", "Pendulum-v1", "--run-name", "r", "--preset", "minimal", "--total-timesteps", 3000)
SWING_UP += ("--learning-starts", 300, "--learning-rate", 2e-3, "--tau", 0.02, "--gamma", 0.95)
LEARNING = {
    "mdpo_onpolicy": (*BALANCE, "--total-timesteps", 40_000, "--num-steps", 1024, "--learning-rate", 1e-3),
    "trpo": (*BALANCE, "--total-timesteps", 14_000, "--num-steps", 512),
    "ppo": (*BALANCE, "--total-timesteps", 16_000, "--num-steps", 1024),
    "mdpo_offpolicy": SWING_UP,
    "mdpo_tsallis": SWING_UP,
    "sac": SWING_UP,
}


@pytest.fixture(scope="session", autouse=True)
def learning(request, forkserver, tmp_path_factory):
    """The runs that learn, one after the other in other processes while the tests before them run."""

    def learn(name: str, folder: Path) -> Path:
        process = Process(target=main_of, args=(name, list(map(str, LEARNING[name])), folder))
        process.start()
        process.join()
        assert process.exitcode == 0, (folder / "stderr").read_text()
        return folder / "runs/r"

    tests = {item.name for item in request.session.items}
    names = [name for name in LEARNING if f"test_it_learns[{name}]" in tests]
    with ThreadPoolExecutor(1) as pool:
        yield {name: pool.submit(learn, name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize("name", LEARNING)
def test_it_learns(name, learning):
    """To balance: returns of about 6 by chance, 1000 at best. Or to swing up: about -1300 by chance, -150 at best."""
    returns = [point["charts/episodic_return"] for point in episodes(history(learning[name].result()))]
    worse, better = (50, 300) if name in ON_POLICY else (-1100, -850)
    assert np.mean(returns[:5]) < worse and np.mean(returns[-5:]) > better
