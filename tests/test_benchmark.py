"""benchmark.sh on this machine: its grid, and what happens when runs fail, are stopped, are killed or are taken."""

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
from conftest import ALL, ON_POLICY, ROOT, history
from filelock import FileLock

VARIABLES = "ALGOS ENVS SEEDS PRESET STEPS EXTRA WORKERS WANDB_MODE WANDB_PROJECT DRY_RUN SLURM PARTITION TIME MEM GPUS"
SCRIPT = str(ROOT / "benchmark.sh")
# A task that is slow while the working directory has a file `hold`, so that tests can interrupt a run anywhere.
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
HELD_RUNS = dict(ENVS="held:Held-v0", ALGOS="ppo", STEPS=3840)
HELD_RUNS["EXTRA"] = "--num-steps 128 --checkpoint-interval 128 --no-compile"
# Replaces Python. It does what benchmark.sh expects of a script: lock, `finished`, exit status, one signal to stop. It
# writes its events to the file `calls`, waits while there is a file `hold`, and exits with $FAIL on seed 1.
STUB = """#!/usr/bin/env bash
[[ ${1-} == *.py ]] || exit 0 # benchmark.sh checks its input
command="OMP_NUM_THREADS=$OMP_NUM_THREADS$(printf ' %q' "$0" "$@")"
[[ $command =~ --seed\\ ([0-9]+).*--total-timesteps\\ ([0-9]+).*--run-name\\ ([^ ]+) ]]
run=runs/${BASH_REMATCH[3]}
note() { echo "${EPOCHREALTIME:-$(date +%s.%N)} $BASHPID $*" >>calls; }
sleep "${START:-0}"
mkdir -p "$run"
exec 9>>"$run/lock"
flock -n 9 || { echo "in use by another process"; exit 2; }
[[ ! -e $run/finished || $(<"$run/finished") != "${BASH_REMATCH[2]}" ]] || exit 0
# Not `note`: bash may fail to parse its $(...) when a second signal comes meanwhile.
for signal in HUP INT TERM; do trap "echo 0 $$ $signal >>calls; stop=1" $signal; done
note start "$command"
[[ ${FAIL-} && ${BASH_REMATCH[1]} == 1 ]] && exit "$FAIL"
while [[ -e hold && ! ${stop-} ]]; do sleep 0.1; done
[[ ! ${stop-} ]] || { sleep 0.5; sleep 0.5; note stopped; exit 130; }
sleep "${NAP:-0}"
echo "${BASH_REMATCH[2]}" >"$run/finished"
note end
"""
HOPPER = dict(ALGOS="ppo", ENVS="Hopper-v4")  # what the stub pretends to train
NAME = "Hopper-v4__ppo__loaded-gae__10000000__{}"


def settings(**variables) -> dict[str, str]:
    """The environment, with only these of the variables that benchmark.sh reads."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES.split()}
    return clean | dict(PYTHON=sys.executable) | {name: str(value) for name, value in variables.items()}


def benchmark(*flags, cwd: Path, **variables) -> subprocess.CompletedProcess:
    command = [SCRIPT, *flags]
    return subprocess.run(command, cwd=cwd, env=settings(**variables), capture_output=True, text=True, timeout=120)


def launch(cwd: Path, **variables) -> subprocess.Popen:
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    return subprocess.Popen(SCRIPT, cwd=cwd, env=settings(**variables), **options)


def until(condition, seconds: float = 90):
    deadline = time.time() + seconds
    while not (value := condition()):
        assert time.time() < deadline, "timed out"
        time.sleep(0.1)
    return value


def processes_in(folder: Path) -> list[int]:
    """All processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                found.append(int(process.name))
    return found


def checkpoints(folder: Path, algo: str = "ppo") -> list[int]:
    """The steps of an algorithm's checkpoints. They are replaced by renaming, so a reader gets the whole file."""
    paths = sorted(folder.glob(f"runs/*__{algo}__*/checkpoint.pt"))
    return [torch.load(path, weights_only=True)["step"] for path in paths]


def calls(folder: Path, event: str = "start") -> list[list[str]]:
    """The stub's events of one kind: time, process, event, command."""
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line.split(maxsplit=3) for line in lines if line.split()[2] == event]


class Terminal:
    """A command, by default benchmark.sh, in the foreground of a terminal."""

    def __init__(self, cwd: Path, *command: str, **variables):
        command = command or (SCRIPT,)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(command[0], command, settings(**variables))
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


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub"
    path.write_text(STUB)
    path.chmod(0o755)
    return path


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Stubs and Held tasks wait until a test removes this file."""
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hold").touch()
    return tmp_path / "hold"


# --------------------------------------------------------------------------------------------------------------- input


def test_help_documents_every_variable_on_one_screen(tmp_path):
    for flag in ("--help", "-h"):
        process = benchmark(flag, cwd=tmp_path)
        assert (process.returncode, process.stderr) == (0, "")
        assert len(process.stdout.splitlines()) <= 40 and max(map(len, process.stdout.splitlines())) <= 120
        for word in (*VARIABLES.split(), "PYTHON", *ALL):
            assert re.search(rf"\b{word}\b", process.stdout), word
        assert "All runs get --compile" in process.stdout


@pytest.mark.skipif(not shutil.which("shellcheck") and not os.environ.get("REQUIRE_SLURM"), reason="no shellcheck")
def test_shellcheck_finds_nothing(stub, tmp_path):
    batch = benchmark(SLURM=1, DRY_RUN=1, PYTHON=stub, cwd=tmp_path).stdout
    (tmp_path / "batch.sh").write_text(batch[batch.index("#!") :])
    for script in (SCRIPT, tmp_path / "batch.sh", ROOT / ".ci/run"):
        process = subprocess.run(["shellcheck", "--exclude=SC1091", script], capture_output=True, text=True)
        assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (dict(ALGOS="ppo pp0"), "unknown algorithm pp0; choose from: mdpo_onpolicy trpo ppo mdpo_offpolicy"),
        (
            dict(ALGOS="ppo sac", PRESET="loaded-gae"),
            "unknown algorithm sac for PRESET loaded-gae; choose from: mdpo_on",
        ),
        (dict(SEEDS="1 x"), "SEEDS, STEPS and WORKERS must be whole numbers, not x"),
        (dict(SEEDS="1 -2"), "must be whole numbers, not -2"),
        (dict(SEEDS="01"), "must be whole numbers, not 01"),
        (dict(SEEDS=" "), "must not be blank"),
        (dict(SEED="3"), "SEED is set, but this script reads ALGOS, ENVS and SEEDS"),
        (dict(STEPS="1e6"), "must be whole numbers, not 1e6"),
        (dict(WORKERS="two"), "must be whole numbers, not two"),
        (dict(WORKERS="0"), "WORKERS at least 1"),
        (dict(DRY_RUN="yes"), "DRY_RUN and SLURM must be 0 or 1"),
        (dict(EXTRA="--gamma 0.9 --total_timesteps=5"), "EXTRA must not contain --total-timesteps"),
        (dict(ALGOS="ppo", ENVS="Hopper-v4", EXTRA="--wandb-entity " + 99 * "x"), "EXTRA is too long"),
        (dict(PYTHON="python0"), "python0 not found"),
        (dict(ALGOS="ppo", ENVS="Hopper-v4 Hoper-v4"), "benchmark.sh: Gymnasium cannot make Hoper-v4"),
        (dict(STEPS="512"), "--total-timesteps must be at least one iteration"),
    ],
)
def test_invalid_input_is_refused_in_one_line_before_anything_starts(variables, sentence, tmp_path):
    process = benchmark(cwd=tmp_path, **variables)
    assert process.returncode == 2 and process.stdout == ""
    assert sentence in process.stderr and len(process.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (dict(ALGOS="mdpo_onpolicy ppo", EXTRA="--sgd-steps 5"), ("--sgd-steps", "ppo.py --help")),
        (dict(ALGOS="sac", WANDB_MODE="on"), ("--wandb-mode", "sac.py --help")),
        (dict(ALGOS="sac", PRESET="full"), ("--preset", "minimal")),
    ],
)
def test_flags_are_refused_in_the_words_of_the_scripts(variables, words, tmp_path):
    process = benchmark(cwd=tmp_path, **variables)
    assert process.returncode == 2 and all(word in process.stderr for word in words)
    assert process.stderr.startswith("benchmark.sh: \n╭") and "WARN" not in process.stderr
    assert not any(tmp_path.iterdir())


def test_arguments_an_unusable_folder_and_missing_packages_are_refused(stub, tmp_path):
    process = benchmark("--seeds", cwd=tmp_path)
    assert process.returncode == 2 and "unknown argument --seeds" in process.stderr
    (tmp_path / "bare").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without site-packages
    (tmp_path / "bare").chmod(0o755)
    process = benchmark(cwd=tmp_path, PYTHON=tmp_path / "bare")
    assert process.returncode == 2 and process.stderr.startswith("benchmark.sh: No module named")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("a file")
    process = benchmark(cwd=tmp_path, PYTHON=stub, **HOPPER)
    assert process.returncode == 2 and "cannot write to the folder runs" in process.stderr and not calls(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- grid


def parsed(line: str):
    """The Args that a script makes of a command."""
    threads, python, path, *flags = shlex.split(line)
    assert threads == "OMP_NUM_THREADS=1" and shutil.which(python)
    module = importlib.import_module(Path(path).stem)
    return tyro.cli(module.Args, args=flags)


def test_the_default_grid_is_the_papers(tmp_path):
    runs = [parsed(line) for line in benchmark(DRY_RUN=1, cwd=tmp_path).stdout.splitlines()]
    tasks = [f"{task}-v4" for task in ("Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "HumanoidStandup")]
    cells = [(run.seed, run.env_id, run.exp_name) for run in runs]
    assert cells == [(seed, task, algo) for seed in range(1, 6) for task in tasks for algo in ALL]
    for run in runs:
        on_policy = run.exp_name in ON_POLICY
        millions = 10 if on_policy else 3 if run.env_id in ("Ant-v4", "Humanoid-v4") else 1
        preset = "loaded-gae" if on_policy else "loaded"
        assert (run.preset, run.total_timesteps) == (preset, millions * 10**6)
        assert run.run_name == f"{run.env_id}__{run.exp_name}__{preset}__{millions}000000__{run.seed}"
        assert run.resume and run.compile
        assert (run.wandb_mode, run.wandb_project, run.wandb_group) == ("offline", "mdpo", None)


def test_the_variables_choose_the_runs_and_extra_flags_become_part_of_their_names(stub, tmp_path):
    one = dict(DRY_RUN=1, PYTHON=stub, cwd=tmp_path, ENVS="Hopper-v4", SEEDS="3 3\n3")
    runs = [parsed(line) for line in benchmark(PRESET="loaded-gae", **one).stdout.splitlines()]
    assert [run.exp_name for run in runs] == list(ON_POLICY)
    runs = [parsed(line) for line in benchmark(PRESET="minimal", **one).stdout.splitlines()]
    assert [run.exp_name for run in runs] == list(ALL)
    variant = dict(ALGOS="mdpo_tsallis", STEPS=50000, EXTRA="--tsallis-q 1.5 --no-cuda --log-q=joint --no-compile")
    (line,) = benchmark(WANDB_PROJECT="a b", WANDB_MODE="online", **variant, **one).stdout.splitlines()
    run, slug = parsed(line), "tsallis-q-1.5_no-cuda_log-q-joint_no-compile"
    assert (run.tsallis_q, run.cuda, run.compile, run.total_timesteps) == (1.5, False, False, 50000)
    assert run.run_name == f"Hopper-v4__mdpo_tsallis__loaded__50000__3__{slug}"
    assert run.wandb_group == f"mdpo_tsallis__loaded__Hopper-v4__{slug}"
    assert (run.wandb_project, run.wandb_mode) == ("a b", "online")


def test_the_dry_run_prints_the_commands_that_run_each_once_and_workers_at_a_time(stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS="1 2", ENVS="Hopper-v4 Ant-v4", EXTRA="--gamma 0.9", WORKERS=3, NAP=0.5)
    dry = benchmark(DRY_RUN=1, cwd=tmp_path, **grid).stdout.splitlines()
    assert len(dry) == 24 and [path.name for path in tmp_path.iterdir()] == ["stub"]
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("24 of 24 runs are finished.\n")
    assert sorted(call[3] for call in calls(tmp_path)) == sorted(dry)
    events = sorted([(float(t), 1) for t, *_ in calls(tmp_path)] + [(float(t), -1) for t, *_ in calls(tmp_path, "end")])
    at_once = [sum(change for _, change in events[:n]) for n in range(1, len(events) + 1)]
    assert max(at_once) == 3
    for again in (dict(), dict(DRY_RUN=1)):
        process = benchmark(cwd=tmp_path, **grid, **again)
        assert (process.returncode, process.stdout) == (0, "24 of 24 runs are finished.\n")
    assert len(calls(tmp_path)) == 24
    next(tmp_path.glob("runs/Ant*ppo*__2__*/finished")).write_text("7\n")  # finished, but with other STEPS
    assert benchmark(cwd=tmp_path, **grid).returncode == 0
    assert len(calls(tmp_path)) == 25


# ------------------------------------------------------------------------------------------------ failures and signals


def test_a_failing_run_does_not_stop_the_others_and_is_listed_with_its_log(tmp_path):
    grid = dict(ENVS="InvertedPendulum-v4", ALGOS="trpo ppo", STEPS=512, SEEDS=1, WORKERS=2)
    grid["EXTRA"] = "--num-steps 256 --no-compile"
    names = [f"InvertedPendulum-v4__{algo}__loaded-gae__512__1__num-steps-256_no-compile" for algo in ("trpo", "ppo")]
    (tmp_path / "runs" / names[0]).mkdir(parents=True)
    (tmp_path / "runs" / names[0] / "checkpoint.pt").write_text("not a checkpoint")
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 1
    assert process.stdout.startswith("0 done, 1 running, 0 failed, 1 to go\n0 done, 2 running, 0 failed, 0 to go\n")
    assert process.stdout.endswith("1 done, 0 running, 1 failed, 0 to go\n1 of 2 runs are finished.\n")
    assert f"failed: {names[0]}, exit status 2; the end of runs/{names[0]}.log:\n" in process.stderr
    assert "checkpoint.pt" in process.stderr and names[1] not in process.stderr
    assert (tmp_path / "runs" / names[1] / "finished").read_text() == "512\n"
    assert history(tmp_path / "runs" / names[1])[-1]["global_step"] == 512


@pytest.mark.parametrize("status", [1, 137, 255])
def test_no_exit_status_stops_the_other_runs_and_the_next_call_tries_only_the_failed_run(status, stub, tmp_path):
    """GNU xargs itself would stop at 255."""
    grid = dict(cwd=tmp_path, PYTHON=stub, SEEDS="1 2 3", WORKERS=1, **HOPPER)
    process = benchmark(FAIL=status, **grid)
    assert process.returncode == 1 and "2 of 3 runs are finished." in process.stdout
    assert re.findall("failed: (.*);", process.stderr) == [f"{NAME.format(1)}, exit status {status}"]
    assert benchmark(**grid).returncode == 0 and len(calls(tmp_path)) == 4
    assert [(tmp_path / f"runs/{NAME.format(seed)}.log").read_text().count("\n=== ") for seed in (1, 2, 3)] == [2, 1, 1]


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_reader_that_goes_away_stops_no_run(reader, stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS="1 2 3", WORKERS=1, NAP=0.5, FAIL=1, **HOPPER)
    piped = ["bash", "-c", f"{shlex.quote(SCRIPT)} 2>&1 | {reader}; exit ${{PIPESTATUS[0]}}"]
    process = subprocess.run(piped, cwd=tmp_path, env=settings(**grid), capture_output=True, timeout=60)
    assert process.returncode == 1 and len(calls(tmp_path, "end")) == 2


def test_a_report_of_a_run_that_arrives_in_two_pieces_is_one_report(stub, tmp_path):
    name, xargs = NAME.format(1), tmp_path / "bin/xargs"
    xargs.parent.mkdir()
    pieces = f"echo '+1 {name}'; printf -; sleep 1.5; mkdir -p runs/{name}; echo 10000000 >runs/{name}/finished"
    xargs.write_text(f"#!/bin/bash\n{pieces}; printf '1 '; sleep 1.2; echo '{name} 0'\n")
    xargs.chmod(0o755)
    process = benchmark(cwd=tmp_path, PYTHON=stub, SEEDS=1, PATH=f"{xargs.parent}:{os.environ['PATH']}", **HOPPER)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[1:] == ["1 done, 0 running, 0 failed, 0 to go", "1 of 1 runs are finished."]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_each_run_once_and_leaves_none_behind(number, hold, stub, tmp_path):
    process = launch(tmp_path, PYTHON=stub, SEEDS="1 2 3", WORKERS=2, **HOPPER)
    until(lambda: len(calls(tmp_path)) == 2)
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)  # `timeout` sends its signal twice: that is not a second Ctrl-C
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + number
    assert "0 of 3 runs are finished." in output and "failed:" not in output
    assert [len(calls(tmp_path, event)) for event in ("start", "HUP", "INT", "TERM", "stopped")] == [2, 0, 2, 0, 2]
    assert until(lambda: not processes_in(tmp_path))


def test_when_a_supervisor_terminates_every_process_the_script_still_waits_for_the_runs(hold, stub, tmp_path):
    """As systemd does. The script passes on SIGINT, since a second SIGTERM would kill its runs."""
    process = launch(tmp_path, PYTHON=stub, SEEDS="1 2 3", WORKERS=2, **HOPPER)
    until(lambda: len(calls(tmp_path)) == 2)
    for pid in processes_in(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert [len(calls(tmp_path, event)) for event in ("start", "INT", "stopped")] == [2, 2, 2]


def test_ctrl_c_with_tee_behind_the_script_stops_each_run_once_and_leaves_none_behind(hold, stub, tmp_path):
    piped = f"trap : INT; {shlex.quote(SCRIPT)} 2>&1 | tee out; echo ${{PIPESTATUS[0]}} >status"
    terminal = Terminal(tmp_path, "bash", "-c", piped, PYTHON=stub, SEEDS="1 2 3", WORKERS=2, **HOPPER)
    terminal.wait_for(lambda: len(calls(tmp_path)) == 2)
    terminal.ctrl_c()
    until(lambda: terminal.status() is not None)
    assert (tmp_path / "status").read_text() == "130\n"
    assert [len(calls(tmp_path, event)) for event in ("start", "INT", "stopped")] == [2, 2, 2]
    assert until(lambda: not processes_in(tmp_path))


def test_stopped_runs_resume_from_their_checkpoints(hold, tmp_path):
    grid = HELD_RUNS | dict(SEEDS="1 2", WORKERS=2)
    terminal = Terminal(tmp_path, **grid)
    terminal.wait_for(lambda: len(checkpoints(tmp_path)) == 2)
    terminal.ctrl_c()
    assert until(lambda: terminal.status()) == 130
    assert "\r\x1b[K0 done, 2 running, 0 failed, 0 to go" in terminal.output
    assert "0 of 2 runs are finished." in terminal.output and "the same command continues" in terminal.output
    assert "failed:" not in terminal.output
    assert until(lambda: not processes_in(tmp_path))
    logs, stops = sorted(tmp_path.glob("runs/*.log")), checkpoints(tmp_path)
    assert len(logs) == 2 and all(128 <= step < 3840 for step in stops)

    hold.unlink()
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 0, process.stderr
    for log, stop in zip(logs, stops, strict=True):
        assert re.findall(r"stopped at step (\d+)", log.read_text()) == [str(stop)]
        assert re.findall(r" (\d+)/3840 \[00:00<", log.read_text()) == ["0", str(stop)]  # each start's progress bar
        assert len(list(tmp_path.glob(f"runs/{log.stem}/wandb/offline-run-*"))) == 2
    losses = [point["global_step"] for point in history(tmp_path / "runs" / log.stem) if "losses/kl" in point]
    assert losses == list(range(128, 3841, 128))  # each iteration once
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")}
    process = benchmark(cwd=tmp_path, **grid)
    assert (process.returncode, process.stdout) == (0, "2 of 2 runs are finished.\n")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")}


def test_a_second_ctrl_c_kills(hold, tmp_path):
    # An iteration takes 40 seconds here, so only a kill can end it in time.
    grid = HELD_RUNS | dict(SEEDS="1 2", WORKERS=2, STEPS=2048, EXTRA="--no-compile", WANDB_MODE="disabled")
    terminal = Terminal(tmp_path, **grid)
    terminal.wait_for(lambda: sum("0/2048 [" in log.read_text() for log in tmp_path.glob("runs/*.log")) == 2)
    terminal.ctrl_c()
    terminal.wait_for(lambda: "stopping at checkpoints" in terminal.output)
    time.sleep(2)
    assert terminal.status() is None
    terminal.ctrl_c()
    assert until(lambda: terminal.status(), seconds=10) == 130
    assert until(lambda: not processes_in(tmp_path), seconds=10)


# ------------------------------------------------------------------------------------------ runs that others have taken


def test_runs_in_slurms_queue_are_not_started(stub, tmp_path, monkeypatch):
    """Queued runs outside the grid do not count."""
    grid = dict(PYTHON=stub, SEEDS="1 2", WORKERS=1, **HOPPER)
    lines = benchmark(cwd=tmp_path, DRY_RUN=1, **grid).stdout.splitlines()
    lines += [line.replace("__ppo__", "__sac__") for line in lines] * 3
    (tmp_path / "runs/slurm").mkdir(parents=True)
    (tmp_path / "runs/slurm/mdpo-1").write_text("\n".join(lines) + "\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\nfor i in 1 2 3 4 5; do echo mdpo-1 $i; done\necho other N/A\n")
    (tmp_path / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    process = benchmark(cwd=tmp_path, **grid)
    assert process.returncode == 1 and "1 of 2 runs are finished" in process.stdout
    assert "0 done, 1 running, 0 failed, 0 to go" in process.stdout
    assert process.stderr == f"not started: {NAME.format(2)}: in SLURM's queue, array mdpo-1\n"
    assert [re.search(r"--seed (\d)", call[3])[1] for call in calls(tmp_path)] == ["1"]


def test_a_killed_call_starts_no_more_runs_and_what_it_left_running_is_not_started_again(hold, stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS="1 2", WORKERS=1, **HOPPER)
    first = launch(tmp_path, **grid)
    until(lambda: calls(tmp_path))
    first.kill()
    first.wait()
    process = benchmark(cwd=tmp_path, SLURM=1, DRY_RUN=1, **grid)
    taken = f"not started: {NAME.format(1)}: another process trains it\n"
    assert process.stderr == taken and "--array=0-0" in process.stdout
    hold.unlink()
    until(lambda: len(calls(tmp_path, "end")) == 1 and not processes_in(tmp_path))
    assert len(calls(tmp_path)) == 1
    assert benchmark(cwd=tmp_path, **grid).returncode == 0 and len(calls(tmp_path)) == 2


def test_a_run_that_another_process_trains_is_reported_and_neither_done_nor_failed(hold, tmp_path):
    """With the real script and its lock: taken before benchmark.sh looks, and after it has started the script."""
    grid = HELD_RUNS | dict(SEEDS="1 2", WANDB_MODE="disabled")
    slug = "num-steps-128_checkpoint-interval-128_no-compile"
    folders = [tmp_path / f"runs/held-Held-v0__ppo__loaded-gae__3840__{seed}__{slug}" for seed in (1, 2)]
    for folder in folders:
        folder.mkdir(parents=True)
    with FileLock(folders[0] / "lock"):
        process = launch(tmp_path, **grid)
        until(lambda: (tmp_path / f"{folders[1]}.log").exists())
        with FileLock(folders[1] / "lock"):
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert output.endswith("0 done, 0 running, 0 failed, 0 to go\n0 of 2 runs are finished.\n")
    for folder in folders:
        assert f"not started: {folder.name}: another process trains it\n" in output
    assert not (tmp_path / f"{folders[0]}.log").exists()


def test_two_calls_at_once_share_the_runs(stub, tmp_path):
    grid = dict(PYTHON=stub, SEEDS="1 2 3 4", ENVS="Hopper-v4", ALGOS="ppo trpo", WORKERS=2, START=0.2, NAP=1)
    both = [launch(tmp_path, **grid) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert {process.returncode for process in both} <= {0, 1} and "failed:" not in "".join(outputs)
    names = [re.search(r"--run-name (\S+)", call[3])[1] for call in calls(tmp_path)]
    assert len(names) == len(set(names)) == len(list(tmp_path.glob("runs/*/finished"))) == 8
