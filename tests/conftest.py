"""What the tests share: the scripts as modules, runs in this process and in others, and W&B's offline files."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_SILENT"] = "true"
TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(TESTS)]
ON_POLICY = ("mdpo_onpolicy", "trpo", "ppo")
# Two iterations of the smallest rollout that holds several episodes.
SHORT = ("--env-id", "InvertedPendulum-v4", "--num-steps", "256", "--total-timesteps", "512", "--run-name", "r")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:.*out of date")  # v4 tasks are what the literature reports


@pytest.fixture(scope="session", params=ON_POLICY)
def script(request):
    return importlib.import_module(request.param)


class Recorder:
    """Stands in for a W&B run, and keeps what is logged."""

    def __init__(self, **settings):
        self.config, self.points = settings["config"], []

    def log(self, point: dict, step: int) -> None:
        assert point["global_step"] == step
        self.points.append(point)

    def finish(self, **_) -> None:
        pass


class Dying(Recorder):
    """The same, but W&B's process dies after three points."""

    def log(self, point: dict, step: int) -> None:
        if len(self.points) == 3:
            raise ConnectionResetError
        super().log(point, step)

    def finish(self, **_) -> None:
        raise ConnectionResetError


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """main() in this process and in tmp_path, W&B replaced by a list unless record=False."""
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
    """A script as a process group of its own, its stderr in cwd/stderr."""
    with open(cwd / "stderr", "wb") as stderr:
        return subprocess.Popen(command(name, *flags), cwd=cwd, stderr=stderr, start_new_session=True)


def finish(name: str, *flags, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command(name, *flags), cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The folder in which a script, in a process of its own, made the SHORT run; made once, not to be changed."""
    folders = {}

    def folder(name: str) -> Path:
        if name not in folders:
            path = tmp_path_factory.mktemp(name)
            process = finish(name, *SHORT, cwd=path)
            assert process.returncode == 0, process.stderr
            folders[name] = path
        return folders[name]

    return folder


@pytest.fixture
def copied_run(finished_run, tmp_path, monkeypatch):
    """A copy of a finished run, in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda name: shutil.copytree(finished_run(name) / "runs", tmp_path / "runs", symlinks=True) / "r"


def records(folder: Path) -> list[dict]:
    """What one of W&B's offline files holds, as its public command tells it."""
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
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
    """Every file below a folder: equal before and after, if nothing was written."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(points: list[dict]) -> list[dict]:
    """Points without the one that a clock decides, and with values that compare (a NaN does not)."""
    return [{key: str(float(value)) for key, value in p.items() if key != "charts/SPS"} for p in points]
