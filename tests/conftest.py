"""What the tests share: the scripts as modules, runs in this process and in others, and W&B's offline files."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import wandb

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
    """The same, but W&B's process dies after three points."""

    def log(self, point: dict, step: int) -> None:
        if len(self.points) == 3:
            raise ConnectionResetError
        super().log(point, step)

    def finish(self, **_) -> None:
        raise ConnectionResetError


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


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Folder with the short run that a lone copy of a script made. Made once, do not change it."""
    made = {}

    def run(name: str) -> SimpleNamespace:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            shutil.copy(ROOT / f"{name}.py", folder)
            environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WANDB_SILENT")}
            process = subprocess.run(
                [sys.executable, f"{name}.py", *short(name)],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            made[name] = SimpleNamespace(folder=folder, run=folder / "runs/r", process=process)
        assert made[name].process.returncode == 0, made[name].process.stderr
        return made[name]

    return run


@pytest.fixture
def copied_run(finished_run, tmp_path, monkeypatch):
    """Copy a finished run to tmp_path, and work there."""
    monkeypatch.chdir(tmp_path)
    return lambda name: shutil.copytree(finished_run(name).run, tmp_path / "runs/r", symlinks=True)


def records(folder: Path) -> list[dict]:
    """Records of one of W&B's offline files, read with its own command."""
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
    """Every file below a folder with its bytes, to compare before and after."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(points: list[dict]) -> list[dict]:
    """Points without the speed, which depends on the clock, and with values that compare (a NaN does not)."""
    return [{key: str(float(value)) for key, value in p.items() if key != "charts/SPS"} for p in points]
