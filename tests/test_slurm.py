"""benchmark.sh with a real SLURM: munged, slurmctld and slurmd on this machine, in their own folder."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import history
from test_benchmark import HELD, HELD_RUNS, STUB, benchmark, checkpoints, until

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
# Also how long a requeued job waits; the default is two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
MaxArraySize=20
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} CPUs=4 RealMemory=20000 State=UNKNOWN
PartitionName=low Nodes=n1 Default=YES PriorityTier=1
PartitionName=high Nodes=n1 PriorityTier=2
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(scope="module")
def cluster():
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        reason = f"not installed: {' '.join(missing)}" if missing else "slurmd needs root"
        assert not os.environ.get("REQUIRE_SLURM"), reason
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket needs a short path
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, ports=free_ports(2), folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    files = dict(key="key", socket="socket", pid="pid", log="log", seed="seed")
    files = [f"--{option}{'' if option == 'socket' else '-file'}={folder}/munge.{end}" for option, end in files.items()]
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    daemons = []
    try:
        for command in (
            ["munged", "--foreground", "--force", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
        ):
            with open(folder / f"{command[0]}.out", "wb") as output:
                daemons.append(subprocess.Popen(command, stdout=output, stderr=output))
            if command[0] == "munged":
                until((folder / "munge.socket").exists, 20)
        until(lambda: "idle" in subprocess.run(["sinfo"], capture_output=True, text=True).stdout, 30)
        yield folder
        subprocess.run(["scancel", "--me"], check=True, timeout=30)
        until(lambda: not queue(), 60)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        del os.environ["SLURM_CONF"]
        shutil.rmtree(folder)


def queue() -> list[str]:
    return run("squeue", "--noheader", "--array", "--format=%P %T %K").splitlines()


def jobs(array: str) -> list[dict[str, str]]:
    """What the controller knows about the tasks of an array."""
    lines = run("scontrol", "show", "job", "--oneliner").splitlines()
    known = [dict(pair.split("=", 1) for pair in line.split() if "=" in pair) for line in lines]
    return [job for job in known if job.get("ArrayJobId") == array]


def submit(**variables) -> str:
    process = benchmark(SLURM=1, **variables)
    assert process.returncode == 0, process.stderr
    return re.fullmatch(r"Submitted \d+ runs as job array (\d+)\. .* 0 of \d+ runs are finished\.\n", process.stdout)[1]


def test_arrays_resume_from_their_checkpoints_after_preemption_and_the_time_limit(cluster, tmp_path, monkeypatch):
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    low = HELD_RUNS | dict(WORKERS=2, SEEDS="1 2 3", PARTITION="low", TIME="1:00:00", cwd=tmp_path)
    high = dict(ALGOS="sac", ENVS="held:Held-v0", STEPS=2500, SEEDS=1, PARTITION="high", TIME=30, cwd=tmp_path)
    high["EXTRA"] = "--learning-starts 64 --batch-size 64 --hidden-size 8 --no-compile"
    monkeypatch.setenv("SBATCH_JOB_NAME", "another")  # must not override the variables
    monkeypatch.setenv("SBATCH_PARTITION", "high")
    preempted, limited, failing = submit(**low), submit(**high), submit(**(high | dict(ENVS="held:Broken-v0")))

    # Queued runs are not started again, neither on the cluster nor on this machine.
    for slurm in (0, 1):
        process = benchmark(SLURM=slurm, **low)
        assert process.returncode == 1 and process.stderr.count(": in SLURM's queue, array mdpo-") == 3
        assert process.stdout == "0 of 3 runs are finished.\n"
    process = benchmark(SLURM=1, **(high | dict(SEEDS=" ".join(map(str, range(2, 23))))))
    assert process.returncode == 2 and "21 runs exceed this cluster's MaxArraySize, 20" in process.stderr

    (log,) = tmp_path.glob("runs/held-Held-v0__sac__*.log")
    until(lambda: len(checkpoints(tmp_path)) == 2 and "0/2500 [" in log.read_text())
    assert [line for line in queue() if line.startswith("low RUNNING")] == ["low RUNNING 0", "low RUNNING 1"]
    # The warning comes two minutes before the limit, so now it is due. SLURM looks every half a minute.
    run("scontrol", "update", f"JobId={limited}_0", "TimeLimit=2")
    run("sbatch", "--partition=high", "--ntasks=3", "--output=/dev/null", "--wrap=sleep 2")
    until(lambda: "1" in [job["Restarts"] for job in jobs(preempted)])
    until(lambda: [job["Restarts"] for job in jobs(limited)] == ["1"])
    run("scontrol", "update", f"JobId={limited}_0", "TimeLimit=30")
    (tmp_path / "hold").unlink()
    until(lambda: not queue(), 120)

    assert [(job["JobState"], job["Restarts"], job["ExitCode"]) for job in jobs(failing)] == [("FAILED", "0", "2:0")]
    for array, algo, steps in ((preempted, "ppo", 3840), (limited, "sac", 2500)):
        for job in jobs(array):
            assert job["JobState"] == "COMPLETED"
            seed = int(job["ArrayTaskId"]) + 1
            (finished,) = tmp_path.glob(f"runs/held-Held-v0__{algo}__*__{steps}__{seed}__*/finished")
            assert finished.read_text() == f"{steps}\n"
            log = (tmp_path / "runs" / f"{finished.parent.name}.log").read_text()
            stops = re.findall(r"stopped at step (\d+)", log)
            # Each start continues where the one before it stopped, and has its own W&B segment. A run that finished
            # just before it was preempted starts once more, at its end; one preempted before W&B starts has no segment.
            starts = re.findall(rf" (\d+)/{steps} \[00:00<\?", log)
            assert starts[: len(stops) + 1] == ["0", *stops] and {*starts[len(stops) + 1 :]} <= {str(steps)}
            segments = list(finished.parent.glob("wandb/offline-run-*"))
            assert len(starts) <= len(segments) <= int(job["Restarts"]) + 1
            if stops:
                assert int(stops[-1]) < history(finished.parent)[-1]["global_step"] <= steps
    for grid in (low, high):
        process = benchmark(SLURM=1, **grid)
        assert (process.returncode, process.stderr) == (0, "")


def test_sbatch_gets_what_the_variables_ask_for(tmp_path, monkeypatch):
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    grid = dict(SLURM=1, DRY_RUN=1, ALGOS="ppo sac", ENVS="Hopper-v4", SEEDS="1 2", PYTHON="stub", cwd=tmp_path)
    output = benchmark(WORKERS=3, PARTITION="long", TIME="12:00:00", MEM="8G", GPUS="a100:1", **grid).stdout
    for option in ("array=0-3%3", "partition=long", "time=12:00:00", "mem=8G", "gres=gpu:a100:1", "cpus-per-task=1",
                   "requeue", "signal=B:USR1@120", "open-mode=append"):  # fmt: skip
        assert f" --{option} " in output
    assert f"OMP_NUM_THREADS=1 {tmp_path}/stub " in output  # a node may have another PATH
    plain = benchmark(**grid).stdout
    assert "--array=0-3 " in plain and "--partition" not in plain and "--time=" not in plain and "--gres" not in plain
    assert [path.name for path in tmp_path.iterdir()] == ["stub"]
