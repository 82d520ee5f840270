"""benchmark.sh on this machine: the grid it makes, and what becomes of it when jobs fail, are stopped or are killed."""

import importlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import tyro
from conftest import ROOT, history

VARIABLES = "ALGOS ENVS SEEDS PRESET STEPS WORKERS WANDB_MODE WANDB_PROJECT EXTRA DRY_RUN SLURM PARTITION TIME MEM GPUS"
SCRIPT = str(ROOT / "benchmark.sh")
ALGOS = ("mdpo_onpolicy", "trpo", "ppo", "mdpo_offpolicy", "mdpo_tsallis", "sac")
# A task that takes its time while the working directory has a file `hold`: tests interrupt runs where they want to, and
# the rest of a run takes no time.
HELD = """
import os, time
import gymnasium as gym, numpy as np
class Held(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,))
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        time.sleep(0.02 * os.path.exists("hold"))
        return self.observation_space.sample(), float(action[0]), False, False, {}
class Broken(Held):
    def __init__(self):
        assert "SLURM_JOB_ID" not in os.environ, "broken on the node"
gym.register("Held-v0", Held, max_episode_steps=50)
gym.register("Broken-v0", Broken, max_episode_steps=50)
"""
HELD_RUNS = dict(ENVS="held:Held-v0", ALGOS="ppo", STEPS=3840, WANDB_MODE="offline")
HELD_RUNS["EXTRA"] = "--num-steps 128 --checkpoint-interval 128 --no-compile"
# Stands in for Python: notes how it was called, and says that the run is finished.
STUB = f"""#!/usr/bin/env bash
[[ ${{1-}} == *.py ]] || exec {shlex.quote(sys.executable)} "$@"
command="OMP_NUM_THREADS=$OMP_NUM_THREADS$(printf ' %q' "$0" "$@")"
echo "$(date +%s.%N) $BASHPID start $command" >>calls
[[ $command =~ --total-timesteps\\ ([0-9]+).*--run-name\\ ([^ ]+) ]]
while [[ -e hold ]]; do sleep 0.1; done
sleep "${{NAP:-0}}"
mkdir -p "runs/${{BASH_REMATCH[2]}}"
echo "${{BASH_REMATCH[1]}}" >"runs/${{BASH_REMATCH[2]}}/finished"
echo "$(date +%s.%N) $BASHPID end" >>calls
"""


def settings(**variables) -> dict[str, str]:
    """The environment, with the variables that benchmark.sh reads set to these and no others."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES.split()}
    return clean | dict(PYTHON=sys.executable) | {name: str(value) for name, value in variables.items()}


def benchmark(*flags, cwd: Path, **variables) -> subprocess.CompletedProcess:
    command = [SCRIPT, *flags]
    return subprocess.run(command, cwd=cwd, env=settings(**variables), capture_output=True, text=True, timeout=120)


def until(condition, seconds: float = 90):
    deadline = time.time() + seconds
    while not (value := condition()):
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.1)
    return value


def processes_in(folder: Path) -> list[str]:
    """The command lines of all processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def iterations(folder: Path) -> list[int]:
    """Of each checkpoint below a folder. It is replaced by renaming, so what is read is whole."""
    checkpoints = sorted(folder.glob("runs/*/checkpoint.pt"))
    return [torch.load(path, weights_only=True)["state"]["iteration"] for path in checkpoints]


def calls(folder: Path, kind: str = "start") -> list[list[str]]:
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line.split(maxsplit=3) for line in lines if line.split()[2] == kind]


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


@pytest.fixture
def held(tmp_path, monkeypatch):
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hold").touch()
    return tmp_path / "hold"


# ------------------------------------------------------------------------------------------------------- the grid


def test_help_names_everything_and_fits_a_screen(tmp_path):
    for flag in ("--help", "-h"):
        process = benchmark(flag, cwd=tmp_path)
        assert (process.returncode, process.stderr) == (0, "")
        assert len(process.stdout.splitlines()) <= 40 and max(map(len, process.stdout.splitlines())) <= 120
        for word in (*VARIABLES.split(), "PYTHON", *ALGOS):
            assert re.search(rf"\b{word}\b", process.stdout), word


@pytest.mark.skipif(not shutil.which("shellcheck") and not os.environ.get("REQUIRE_SLURM"), reason="no shellcheck here")
def test_the_shell_scripts_are_clean(tmp_path):
    batch = benchmark(SLURM=1, DRY_RUN=1, cwd=tmp_path).stdout
    (tmp_path / "batch.sh").write_text(batch[batch.index("#!") :])
    for script in (SCRIPT, tmp_path / "batch.sh", ROOT / ".ci/run"):
        process = subprocess.run(["shellcheck", "--exclude=SC1091", script], capture_output=True, text=True)
        assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (dict(ALGOS="ppo pp0"), "algorithm pp0 is not known; these are: mdpo_onpolicy trpo ppo mdpo_off"),
        (
            dict(ALGOS="ppo sac", PRESET="loaded-gae"),
            "of the on-policy algorithms, and sac is not",
        ),
        (dict(PRESET="full"), "PRESET full is not known; these are: loaded-gae loaded minimal"),
        (dict(WANDB_MODE="on"), "WANDB_MODE on is not known; these are: offline online disabled"),
        (dict(SEEDS="1 x"), "SEEDS must be whole numbers such as 1 2 3, and x is not"),
        (dict(SEEDS="1 -2"), "and -2 is not"),
        (dict(SEEDS="01"), "and 01 is not"),
        (dict(SEEDS=" "), "must not be blank"),
        (dict(STEPS="1e6"), "STEPS must be a positive whole number, not 1e6"),
        (dict(STEPS="0"), "STEPS must be a positive whole number, not 0"),
        (dict(WORKERS="two"), "WORKERS must be a positive whole number, not two"),
        (dict(DRY_RUN="yes"), "DRY_RUN and SLURM must be 0 or 1"),
        (dict(EXTRA="--gamma 0.9 --total_timesteps=5"), "EXTRA must not hold --total-timesteps"),
        (dict(EXTRA="--gamma " + 99 * "9"), "EXTRA is too long"),
        (dict(ENVS="Hopper-v4 Hoper-v4"), "Gymnasium cannot make Hoper-v4"),
        (dict(ENVS="CartPole-v1"), "CartPole-v1 has actions Discrete(2)"),
        (dict(EXTRA="--gamma 1.5"), "--gamma must lie in (0, 1], and 1.5 does not"),
        (dict(STEPS="512"), "--total-timesteps must be at least one rollout"),
        (dict(SEED="3"), "SEED is set, but it is ALGOS, ENVS and SEEDS that this script reads"),
        (dict(PYTHON="python0"), "there is no python0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(variables, sentence, tmp_path):
    process = benchmark(cwd=tmp_path, **variables)
    assert process.returncode == 2 and process.stdout == ""
    assert sentence in process.stderr and len(process.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_a_mistyped_flag_is_refused_in_the_scripts_own_words(tmp_path):
    process = benchmark(cwd=tmp_path, ALGOS="ppo", EXTRA="--gama 0.9")
    assert process.returncode == 2 and "--gama" in process.stderr and "ppo.py --help" in process.stderr
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused(stub, tmp_path):
    (tmp_path / "runs").write_text("in the way")
    process = benchmark(cwd=tmp_path, PYTHON=stub, ALGOS="ppo", ENVS="Hopper-v4")
    assert process.returncode == 2 and "cannot write to the folder runs" in process.stderr and not calls(tmp_path)


def test_arguments_and_a_python_without_the_dependencies_are_refused(tmp_path):
    process = benchmark("--seeds", cwd=tmp_path)
    assert process.returncode == 2 and "unknown argument --seeds" in process.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    process = benchmark(cwd=tmp_path, PYTHON=tmp_path / "bare/bin/python")
    assert process.returncode == 2 and "has no gymnasium, mujoco, numpy, torch" in process.stderr
    assert not (tmp_path / "runs").exists()


def parsed(line: str):
    """What a script makes of a command of the dry run."""
    threads, python, path, *flags = shlex.split(line)
    assert (threads, python) == ("OMP_NUM_THREADS=1", sys.executable)
    module = importlib.import_module(Path(path).stem)
    return tyro.cli(module.Args, args=flags)


def test_the_default_grid_is_the_papers(tmp_path):
    runs = [parsed(line) for line in benchmark(DRY_RUN=1, cwd=tmp_path).stdout.splitlines()]
    tasks = {f"{task}-v4" for task in ("Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "HumanoidStandup")}
    cells = {(run.exp_name, run.env_id, run.seed) for run in runs}
    assert len(runs) == len(cells) == 180
    assert cells == {(algo, task, seed) for algo in ALGOS for task in tasks for seed in range(1, 6)}
    for run in runs:
        on_policy = run.exp_name in ALGOS[:3]
        millions = 10 if on_policy else 3 if run.env_id in ("Ant-v4", "Humanoid-v4") else 1
        preset = "loaded-gae" if on_policy else "loaded"
        assert (run.preset, run.total_timesteps) == (preset, millions * 10**6)
        assert run.run_name == f"{run.env_id}__{run.exp_name}__{preset}__{millions}000000__{run.seed}"
        assert run.resume and run.compile == (run.exp_name != "trpo")
        assert (run.wandb_mode, run.wandb_project, run.wandb_group) == ("offline", "mdpo", None)


def test_the_variables_choose_a_part_of_the_grid(tmp_path):
    one = dict(DRY_RUN=1, cwd=tmp_path, ENVS="Hopper-v4", SEEDS="3 3\n3")
    runs = [parsed(line) for line in benchmark(PRESET="loaded-gae", **one).stdout.splitlines()]
    assert [run.exp_name for run in runs] == list(ALGOS[:3])
    runs = [parsed(line) for line in benchmark(PRESET="minimal", **one).stdout.splitlines()]
    assert [run.exp_name for run in runs] == list(ALGOS)
    variant = dict(ALGOS="mdpo_tsallis", STEPS=50000, EXTRA="--tsallis-q 1.5 --no-cuda --log-q=joint --no-compile")
    (line,) = benchmark(WANDB_PROJECT="a b", WANDB_MODE="online", **variant, **one).stdout.splitlines()
    run, slug = parsed(line), "tsallis-q-1.5_no-cuda_log-q-joint_no-compile"
    assert (run.tsallis_q, run.cuda, run.compile, run.total_timesteps) == (1.5, False, False, 50000)
    assert run.run_name == f"Hopper-v4__mdpo_tsallis__loaded__50000__3__{slug}"
    assert run.wandb_group == f"mdpo_tsallis__loaded__Hopper-v4__{slug}"
    assert (run.wandb_project, run.wandb_mode) == ("a b", "online")


def test_the_dry_run_is_what_runs_and_nothing_runs_twice(stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS="1 2", ENVS="Hopper-v4 Ant-v4", EXTRA="--gamma 0.9", WORKERS=3, NAP=0.5)
    dry = benchmark(DRY_RUN=1, cwd=tmp_path, **grid).stdout.splitlines()
    assert len(dry) == 24 and sorted(path.name for path in tmp_path.iterdir()) == ["stub"]
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 0, process.stderr
    assert "24 of 24 runs are finished." in process.stdout
    assert sorted(call[3] for call in calls(tmp_path)) == sorted(dry)
    events = sorted([(float(t), 1) for t, *_ in calls(tmp_path)] + [(float(t), -1) for t, *_ in calls(tmp_path, "end")])
    at_once = [sum(change for _, change in events[:n]) for n in range(1, len(events) + 1)]
    assert max(at_once) == 3
    for again in (dict(), dict(DRY_RUN=1)):
        process = benchmark(cwd=tmp_path, **grid, **again)
        assert process.returncode == 0 and "nothing to start: 24 of 24 runs are finished" in process.stdout
    assert len(calls(tmp_path)) == 24
    next(tmp_path.glob("runs/Ant*ppo*__2__*/finished")).write_text("7\n")  # finished, but of another length
    assert benchmark(cwd=tmp_path, **grid).returncode == 0
    assert len(calls(tmp_path)) == 25 and not list(tmp_path.glob("runs/*.pid-*"))


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_reader_that_goes_away_ends_no_job(reader, stub, tmp_path):
    """Ctrl-C also kills the `tee` behind this script. (subprocess gives its child the usual SIGPIPE.)"""
    grid = dict(PYTHON=stub, ALGOS="ppo", ENVS="Hopper-v4", SEEDS="1 2 3", WORKERS=1, NAP=1)
    piped = ["bash", "-c", f"{shlex.quote(SCRIPT)} 2>&1 | {reader}; exit ${{PIPESTATUS[0]}}"]
    process = subprocess.run(piped, cwd=tmp_path, env=settings(**grid), capture_output=True, timeout=60)
    assert process.returncode == 0 and len(calls(tmp_path, "end")) == 3
    assert not list(tmp_path.glob("runs/*.pid-*"))


def test_what_slurm_has_is_not_started_here(stub, tmp_path, monkeypatch):
    """Also with runs in the queue that were not asked for: they do not count."""
    grid = dict(PYTHON=stub, ALGOS="ppo", ENVS="Hopper-v4", SEEDS="1 2", WORKERS=1)
    lines = benchmark(cwd=tmp_path, DRY_RUN=1, **grid).stdout.splitlines()
    lines += [line.replace("__ppo__", "__sac__") for line in lines] * 3
    (tmp_path / "runs/slurm").mkdir(parents=True)
    (tmp_path / "runs/slurm/mdpo-1").write_text("\n".join(lines) + "\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\nfor i in 1 2 3 4 5; do echo mdpo-1 $i; done\necho other 0\n")
    (tmp_path / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 1 and "1 of 2 runs are finished" in process.stdout
    assert "0 done, 1 running, 0 failed, 0 to go" in process.stdout
    assert (
        "not started: Hopper-v4__ppo__loaded-gae__10000000__2: it is in SLURM's queue, array mdpo-1" in process.stderr
    )
    assert [re.search(r"--seed (\d)", call[3])[1] for call in calls(tmp_path)] == ["1"]


def test_the_time_left_is_about_right(stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS=" ".join(map(str, range(1, 101))), ENVS="Hopper-v4", ALGOS="ppo", WORKERS=2, NAP=3)
    process = subprocess.Popen(SCRIPT, cwd=tmp_path, env=settings(**grid), stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert lines[0] == "0 done, 2 running, 0 failed, 98 to go, time left not known yet\n"
    minutes = int(re.search(r"[12] done, .* about 0 h (\d+) min left", lines[1])[1])
    assert 2 <= minutes <= 5  # 98 runs of 3 to 5 seconds, two at once


# -------------------------------------------------------------------------------------------------------- real runs


def test_a_failing_job_stops_no_other_and_is_named(tmp_path):
    grid = dict(ENVS="InvertedPendulum-v4", ALGOS="trpo ppo", STEPS=512, WORKERS=2)
    grid["EXTRA"] = "--num-steps 256 --no-compile"
    names = [f"InvertedPendulum-v4__{algo}__loaded-gae__512__1__num-steps-256_no-compile" for algo in ("trpo", "ppo")]
    (tmp_path / "runs" / names[0]).mkdir(parents=True)
    (tmp_path / "runs" / names[0] / "checkpoint.pt").write_text("no checkpoint")
    process = benchmark(cwd=tmp_path, SEEDS=1, **grid)
    assert process.returncode == 1
    assert "1 of 2 runs are finished." in process.stdout and "0 running, 1 failed" not in process.stdout.split("\n")[0]
    assert f"failed: {names[0]}, exit status 2; the end of runs/{names[0]}.log:" in process.stderr
    assert "checkpoint.pt cannot be used here" in process.stderr and names[1] not in process.stderr
    assert (tmp_path / "runs" / names[1] / "finished").read_text() == "512\n"
    assert history(tmp_path / "runs" / names[1])[-1]["global_step"] == 512
    log = (tmp_path / "runs" / f"{names[1]}.log").read_text()
    process = benchmark(cwd=tmp_path, SEEDS=1, **grid)  # what has failed is tried again, what is finished is not
    assert process.returncode == 1 and "1 of 2 runs are finished." in process.stdout
    assert (tmp_path / "runs" / f"{names[1]}.log").read_text() == log
    assert (tmp_path / "runs" / f"{names[0]}.log").read_text().count("\n=== ") == 2


class Terminal:
    """benchmark.sh as the foreground process of a terminal."""

    def __init__(self, cwd: Path, **variables):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(SCRIPT, [SCRIPT], settings(**variables))
        self.output, self.ended = "", None

    def read(self) -> str:
        with suppress(OSError):  # the other end is closed
            while select.select([self.fd], [], [], 0.1)[0]:
                self.output += os.read(self.fd, 4096).decode()
        return self.output

    def ctrl_c(self) -> None:
        os.write(self.fd, b"\x03")

    def wait_for(self, condition) -> None:
        until(lambda: (self.read() and condition()) or self.status() is not None)
        assert condition(), self.output

    def status(self) -> int | None:
        self.read()  # or it would block
        if self.ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.ended = os.waitstatus_to_exitcode(status) if pid else None
        return self.ended


def test_stopped_runs_resume_from_their_checkpoints(held, tmp_path):
    grid = HELD_RUNS | dict(SEEDS="1 2 3", WORKERS=2)
    terminal = Terminal(tmp_path, **grid)
    terminal.wait_for(lambda: len(iterations(tmp_path)) == 2 and min(iterations(tmp_path)) >= 1)
    terminal.ctrl_c()
    assert until(lambda: terminal.status()) == 130
    assert "\r\x1b[K0 done, 2 running, 0 failed, 1 to go" in terminal.output
    assert "0 of 3 runs are finished." in terminal.output and "the same command goes on" in terminal.output
    assert "failed:" not in terminal.output
    logs = sorted(tmp_path.glob("runs/*.log"))
    for log in logs:
        assert f"--run-name {log.stem} --resume" in log.read_text().splitlines()[-1]
    assert len(logs) == 2 and until(lambda: not processes_in(tmp_path)) and not list(tmp_path.glob("runs/*.pid-*"))
    first = iterations(tmp_path)
    assert all(1 <= iteration < 30 for iteration in first)

    process = subprocess.Popen(SCRIPT, cwd=tmp_path, env=settings(**grid), stdout=subprocess.PIPE, text=True)
    until(lambda: all(now > then for now, then in zip(iterations(tmp_path), first, strict=True)))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # in the same moment, as some supervisors do: not a second wish
    assert "0 of 3 runs are finished." in process.communicate(timeout=60)[0]
    assert process.returncode in (130, 143)
    assert until(lambda: not processes_in(tmp_path))
    second = iterations(tmp_path)
    for log, iteration in zip(logs, second, strict=True):
        assert f"stopped after {iteration * 128} steps: go on with" in log.read_text()

    held.unlink()
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 0, process.stderr
    for name, iteration in zip([log.stem for log in logs], second, strict=True):
        assert f" {iteration * 128}/3840 [00:00<" in (tmp_path / "runs" / f"{name}.log").read_text()
        assert len(list(tmp_path.glob(f"runs/{name}/wandb/offline-run-*"))) == 3
    losses = [point["global_step"] for point in history(tmp_path / "runs" / name) if "losses/kl" in point]
    assert losses == list(range(128, 3841, 128))  # each iteration once
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")}
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 0 and "nothing to start: 3 of 3 runs are finished" in process.stdout
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")}


def test_a_second_ctrl_c_kills_at_once(held, tmp_path):
    # An iteration takes 40 seconds here, so that nothing can end it in time but a kill.
    grid = HELD_RUNS | dict(SEEDS="1 2", WORKERS=2, STEPS=2048, EXTRA="--no-compile", WANDB_MODE="disabled")
    terminal = Terminal(tmp_path, **grid)
    terminal.wait_for(lambda: len(iterations(tmp_path)) == 2)
    terminal.ctrl_c()
    terminal.wait_for(lambda: "stopping at checkpoints" in terminal.output)
    time.sleep(2)
    assert terminal.status() is None
    terminal.ctrl_c()
    assert until(lambda: terminal.status(), seconds=10) == 130
    assert until(lambda: not processes_in(tmp_path), seconds=10)


def test_what_a_killed_call_left_running_is_not_run_a_second_time(stub, tmp_path):
    (tmp_path / "hold").touch()
    grid = dict(PYTHON=stub, SEEDS="1 2", ENVS="Hopper-v4", ALGOS="ppo", WORKERS=1)
    first = subprocess.Popen(SCRIPT, cwd=tmp_path, env=settings(**grid), stdout=subprocess.DEVNULL)
    until(lambda: calls(tmp_path))
    first.kill()
    first.wait()
    pid, name = calls(tmp_path)[0][1], "Hopper-v4__ppo__loaded-gae__10000000__1"
    other = subprocess.Popen(SCRIPT, cwd=tmp_path, env=settings(**grid), stderr=subprocess.PIPE, text=True)
    until(lambda: len(calls(tmp_path)) == 2)
    (tmp_path / "hold").unlink()
    assert f"not started: {name}: process {pid} runs it" in other.communicate(timeout=30)[1]
    assert other.returncode == 1  # for it did not see that one finish
    until(lambda: len(calls(tmp_path, "end")) == 2)
    # A file whose process is gone, or whose number another program has by now, stops nobody; another machine's does.
    claim = f"runs/{name}.pid-{os.uname().nodename}-"
    (tmp_path / "runs" / name / "finished").unlink()
    for stale in (subprocess.Popen("true"), subprocess.Popen(["sleep", "60"], cwd="/")):
        if stale.args == "true":
            stale.wait()
        (tmp_path / f"{claim}{stale.pid}").touch()
        assert benchmark(cwd=tmp_path, **grid).returncode == 0
        assert not (tmp_path / f"{claim}{stale.pid}").exists()
        (tmp_path / "runs" / name / "finished").unlink()
    stale.kill()
    stale.wait()
    (tmp_path / f"runs/{name}.pid-elsewhere-1").touch()
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 1 and "another machine runs it" in process.stderr
    assert "nothing to start" in benchmark(cwd=tmp_path, SLURM=1, DRY_RUN=1, **grid).stdout
    assert len(calls(tmp_path)) == 4


def test_two_calls_at_once_share_the_runs(stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS="1 2 3 4", ENVS="Hopper-v4", ALGOS="ppo trpo", WORKERS=2, NAP=1)
    both = [subprocess.Popen(SCRIPT, cwd=tmp_path, env=settings(**grid), stderr=subprocess.DEVNULL) for _ in range(2)]
    assert {process.wait(timeout=60) for process in both} <= {0, 1}
    names = [re.search(r"--run-name (\S+)", call[3])[1] for call in calls(tmp_path)]
    assert len(names) == len(set(names))
