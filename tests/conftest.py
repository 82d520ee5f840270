"""What the tests share: the scripts as modules, runs in this process and in others, and W&B's offline files."""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import wandb
from wandb.util import get_core_path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_SILENT"] = "true"
TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(TESTS)]
ON_POLICY = ("mdpo_onpolicy", "trpo", "ppo")
OFF_POLICY = ("mdpo_offpolicy", "mdpo_tsallis", "sac")
ALL = ON_POLICY + OFF_POLICY
# Two iterations of the smallest rollout that holds several episodes.
SHORT = ("--env-id", "InvertedPendulum-v4", "--num-steps", "256", "--total-timesteps", "512", "--run-name", "r")
SMALL_NETWORKS = ("--hidden-size", "16", "--batch-size", "16", "--buffer-size", "500", "--learning-starts", "800")


def short(module: ModuleType | str) -> tuple[str, ...]:
    """Flags for 1024 steps of InvertedPendulum, enough for each family to log all of its metrics."""
    on_policy = getattr(module, "__name__", module) in ON_POLICY
    return (*SHORT[:2], *(SHORT[2:4] if on_policy else SMALL_NETWORKS), "--total-timesteps", "1024", "--run-name", "r")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:.*out of date")  # v4 tasks are what the literature reports


@pytest.fixture(scope="session", params=ALL)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="session", params=ON_POLICY)
def on_policy(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="session", params=OFF_POLICY)
def off_policy(request):
    return importlib.import_module(request.param)


class Recorder:
    """Stands in for a W&B run and keeps what is logged."""

    def __init__(self, **settings):
        self.config, self.points = settings["config"], []

    def log(self, point: dict, step: int) -> None:
        assert point["global_step"] == step
        self.points.append(point)

    def finish(self, **_) -> None:
        pass


class Dying(Recorder):
    """The same, but W&B's process dies after three points, or while the run finishes."""

    error = ConnectionResetError

    def log(self, point: dict, step: int) -> None:
        if len(self.points) == 3:
            raise ConnectionResetError
        super().log(point, step)

    def finish(self, **_) -> None:
        raise self.error


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """Run main() in this process and in tmp_path, with a list in place of W&B unless record=False."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(module, *flags, record: bool = True, recorder=Recorder) -> SimpleNamespace:
        runs = []
        with monkeypatch.context() as patch:
            if record:
                patch.setattr("wandb.init", lambda **settings: runs.append(recorder(**settings)) or runs[0])
            status = module.main([str(flag) for flag in flags])
            wandb.teardown()  # its service keeps the working directory of its first run
        return SimpleNamespace(status=status, **vars(runs[0] if runs else SimpleNamespace(points=[], config={})))

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(name: str, *flags) -> list[str]:
    return [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]


def start(name: str, *flags, cwd: Path) -> subprocess.Popen:
    """Start a script as a process group of its own, its stderr in cwd/stderr."""
    with open(cwd / "stderr", "wb") as stderr:
        return subprocess.Popen(command(name, *flags), cwd=cwd, stderr=stderr, start_new_session=True)


def finish(name: str, *flags, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a script in a process of its own until it ends."""
    settings = dict(cwd=cwd, env=os.environ | environment, stdin=subprocess.DEVNULL, timeout=120)
    return subprocess.run(command(name, *flags), capture_output=True, text=True, **settings)


def main_of(name: str, flags: list[str], cwd: Path) -> None:
    """A script's main() in a forked process, with its output in cwd."""
    os.setsid()
    os.chdir(cwd)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        with open(stream, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.exit(importlib.import_module(name).main(flags))


class Process(multiprocessing.get_context("forkserver").Process):
    """A script in a process forked from one that has imported everything, which saves seconds per process."""

    def signal(self, number: int, everywhere: bool = False) -> None:
        """Send a signal to the script, everywhere: and to W&B's process, which is in a session of its own."""
        children = Path(f"/proc/{self.pid}/task").glob("*/children") if everywhere else ()
        for pid in (self.pid, *(int(pid) for path in children for pid in path.read_text().split())):
            os.kill(pid, number)


@pytest.fixture(scope="session")
def forkserver():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, TESTS))))  # to find what it imports
        patch.delenv("WANDB_SILENT")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["conftest", "toy_envs", *ALL])
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def launch(forkserver, tmp_path):
    """Start a script in tmp_path as a process group of its own. What still runs at the end is killed."""
    processes = []

    def process(name: str, *flags) -> Process:
        processes.append(Process(target=main_of, args=(name, list(map(str, flags)), tmp_path)))
        processes[-1].start()
        return processes[-1]

    yield process
    for process in processes:
        if process.is_alive():
            process.signal(signal.SIGKILL, everywhere=True)
        process.join()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Folder with the short run that a lone copy of a script made. Made once, do not change it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WANDB_SILENT")}
    settings = dict(env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)

    def make(name: str, folder: Path) -> SimpleNamespace:
        shutil.copy(ROOT / f"{name}.py", folder)
        process = subprocess.run([sys.executable, f"{name}.py", *short(name)], cwd=folder, **settings)
        assert process.returncode == 0, process.stderr
        return SimpleNamespace(folder=folder, run=folder / "runs/r", process=process)

    with ThreadPoolExecutor(2) as pool:
        made = {name: pool.submit(make, name, tmp_path_factory.mktemp(name)) for name in ALL}
        yield lambda name: made[name].result()


@pytest.fixture
def copied_run(finished_run, tmp_path, monkeypatch):
    """Copy a finished run to tmp_path, and work there."""
    monkeypatch.chdir(tmp_path)
    return lambda name: shutil.copytree(finished_run(name).run, tmp_path / "runs/r", symlinks=True)


def records(folder: Path) -> list[dict]:
    """Records of one of W&B's offline files, read as `wandb leet inspect --json` does, but without its imports."""
    inspect = [get_core_path(), "leet", "inspect", "-json", "-run-file", *map(str, folder.glob("*.wandb"))]
    output = subprocess.run(inspect, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in output.splitlines()]


def history(run: Path) -> list[dict]:
    """The points of a run: a later segment supersedes what earlier ones logged from its first step on."""
    points = []
    for segment in sorted(run.glob("wandb/offline-run-*")):
        items = [record["history"]["item"] for record in records(segment) if record["type"] == "history"]
        points = [p for p in points if not items or p["_step"] < items[0]["_step"]] + items
    return [{key: value for key, value in point.items() if key[0] != "_"} for point in points]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, to compare before and after."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def by_step(points: list[dict]) -> list[dict]:
    """Points as W&B keeps them: those of one step are one."""
    steps = {}
    for point in points:
        steps.setdefault(point["global_step"], {}).update(point)
    return list(steps.values())


def timeless(points: list[dict]) -> list[dict]:
    """Points without the speed, which depends on the clock, and with values that compare (a NaN does not)."""
    return [{key: str(float(value)) for key, value in p.items() if key != "charts/SPS"} for p in points]
