"""report.py: what it reads of runs, what it keeps, its tables and figures, and the live report on W&B."""

import csv
import gzip
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import wandb
from conftest import ROOT, SHORT, history

import mdpo_tsallis
import ppo
import report

TOTAL = 5120  # steps of the real run


def row(algo="ppo", env_id="Hopper-v4", seed=1, score=100.0, **other) -> dict:
    """A row of a finished run with its curve. `varied` are flags that differ from the defaults."""
    preset = other.pop("preset", "loaded-gae" if algo in report.FAMILIES["on-policy"] else "minimal")
    flags = report.defaults(algo, preset, env_id) | other.pop("varied", {})
    made = dict(algo=algo, preset=preset, variant="", env_id=env_id, steps=1_000_000, seed=seed, final_return=score)
    made |= dict(episodes=1000, sps=900.5, status="finished", reason="", compile=True, commit="c0ffee1234")
    made |= dict(versions="torch=2.13.0", started="2026-01-01T00:00:00", flags=" ".join(map("=".join, flags.items())))
    made |= other
    made["curve"] = pd.DataFrame({"step": [10_000, 990_000], "return": [0.0, score], "episodes": 5})
    name = "__".join(str(made[key]) for key in ("env_id", "algo", "preset", "steps", "seed", "started", "flags"))
    return dict(run=name, id=f"id of {other.get('run', name)}") | made


def tables(*rows: dict) -> str:
    return report.tables(report.select(list(rows)))


def line(text: str, *begin: str) -> list[str]:
    """The rest of the only line of a Markdown table that begins with these cells."""
    lines = [re.split(r" (?<!\\)\| ", one[2:-2]) for one in text.splitlines() if one[:2] == "| "]
    (found,) = [cells[len(begin) :] for cells in lines if cells[: len(begin)] == list(begin)]
    return found


def runs_csv(out="results") -> list[dict]:
    with open(Path(out) / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


def curves_csv(out="results") -> list[tuple]:
    with gzip.open(Path(out) / "curves.csv.gz", "rt", newline="") as file:
        return [(p["run"], int(p["step"]), float(p["return"]), int(p["episodes"])) for p in csv.DictReader(file)]


def exit_status(*flags) -> int:
    with pytest.raises(SystemExit) as end:
        report.main([str(flag) for flag in flags])
    return end.value.code


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory) -> Path:
    """A folder with a run that was killed, and the same run resumed to its end. Do not change it."""
    folder = tmp_path_factory.mktemp("real")
    flags = (*SHORT, "--total-timesteps", str(TOTAL), "--checkpoint-interval", "512", "--runs-dir", str(folder / "tmp"))
    command = [sys.executable, str(ROOT / "mdpo_onpolicy.py"), *flags]
    settings = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process, checkpoint, seen = subprocess.Popen(command, **settings), folder / "tmp/r/checkpoint.pt", set()
    deadline = time.time() + 60
    while len(seen) < 3:
        assert process.poll() is None and time.time() < deadline
        seen |= {checkpoint.stat().st_mtime_ns} if checkpoint.exists() else set()
        time.sleep(0.02)
    process.kill()
    process.wait()
    time.sleep(0.5)  # W&B's process ends
    shutil.copytree(folder / "tmp/r", folder / "killed", symlinks=True)
    assert subprocess.run([*command, "--resume"], **settings).returncode == 0
    shutil.move(folder / "tmp/r", folder / "resumed")
    return folder


@pytest.fixture(scope="module")
def inspect_once():
    """report.inspect, which takes a second, with a memory for files of the same name and size."""
    inspect, seen = report.inspect, {}

    def remember(path: Path, keys):
        key = path.name, tuple(keys), *(file.stat().st_size for file in path.glob("*.wandb"))
        if key not in seen:
            seen[key] = inspect(path, keys)
        return seen[key]

    return remember


@pytest.fixture
def copied(real_runs, inspect_once, tmp_path, monkeypatch):
    """Copy a real run to runs/NAME in tmp_path, and work there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "inspect", inspect_once)
    return lambda which, name: shutil.copytree(real_runs / which, tmp_path / "runs" / name, symlinks=True)


def binned(points: list[dict], total: int) -> list[tuple]:
    """A curve by its definition: the mean return of the episodes that end in each fiftieth of a run."""
    episodes = [(p["global_step"], p["charts/episodic_return"]) for p in points if "charts/episodic_return" in p]
    curve = []
    for i in range(50):
        inside = [x for step, x in episodes if i * total / 50 < step <= (i + 1) * total / 50]
        curve += [(int((i + 0.5) * total / 50), round(np.mean(inside), 2), len(inside))] if inside else []
    return curve


def test_a_killed_and_resumed_run_gives_the_curve_of_its_history(copied):
    copied("killed", "r")
    assert report.main([]) == 0
    (unfinished,) = runs_csv()
    assert unfinished["status"] == "unfinished" and "ends at step" in unfinished["reason"]
    assert line(Path("results/table.md").read_text(), "r")[0].startswith("unfinished: its log ends at step")

    shutil.rmtree("runs/r")
    run = copied("resumed", "r")
    last = max(run.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime)
    shutil.copytree(last, last.with_name(f"offline-run-20000101_000000-{last.name.split('-')[-1]}"))  # changes nothing
    assert report.main([]) == 0
    (made,), points = runs_csv(), history(run)
    returns = [p["charts/episodic_return"] for p in points if "charts/episodic_return" in p]
    assert (made["status"], int(made["steps"]), int(made["episodes"])) == ("finished", TOTAL, len(returns))
    assert float(made["final_return"]) == pytest.approx(np.mean(returns[-100:]), abs=0.006)
    assert [point[1:] for point in curves_csv()] == binned(points, TOTAL)
    assert (made["algo"], made["variant"], made["compile"]) == ("mdpo_onpolicy", "num_steps=256", "False")
    assert "gamma=0.99" in made["flags"] and not {"seed", "run_name", "wandb_mode"} & set(
        re.split("[ =]", made["flags"])
    )
    # Commit and versions are W&B's records.
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert head in made["commit"]
    assert made["versions"] == " ".join(f"{name}={importlib.metadata.version(name)}" for name in report.PACKAGES)
    assert not any(word in Path("results/runs.csv").read_text() for word in (str(run.parent), os.uname().nodename))


def fake_log(monkeypatch, folder: Path, *segments: tuple[str, list[tuple]], **config) -> None:
    """A run in runs/NAME whose segments, (commit, points), `inspect` returns in no particular order."""
    usual = dict(exp_name="ppo", preset="loaded-gae", env_id="Hopper-v4", seed=1, total_timesteps=400)
    found = {}
    for i, (commit, points) in enumerate(segments):
        path = folder / f"wandb/offline-run-{9 - i}-id{folder.name}"
        path.mkdir(parents=True)
        (path / "run-x.wandb").touch()
        record = dict(start_time=f"2026-01-0{i + 1}T00:00:00Z", run_id=f"id{folder.name}", versions="torch=1")
        found[path.name] = record | dict(git=dict(commit=commit), config=dict(update=usual | config)), points
    inspect = report.inspect
    monkeypatch.setattr(report, "inspect", lambda path, keys: found.get(path.name) or inspect(path, keys))


def test_a_later_segment_replaces_points_from_its_first_step_on(tmp_path, monkeypatch):
    """The first logged up to step 300, the second resumed with the points from 150 on."""
    first = [(step, -step, 10.0 if step % 100 == 0 else None) for step in range(50, 301, 50)]
    second = [(step, step, 20.0 if step % 100 == 0 else None) for step in range(150, 401, 50)]
    fake_log(monkeypatch, tmp_path / "r", ("a", first), ("b", second), ("b", []))
    (tmp_path / "r/finished").write_text("400\n")
    run = report.read_folder(tmp_path / "r", set())
    assert run["curve"]["return"].tolist() == [-50, -100, 150, 200, 250, 300, 350, 400]
    assert (run["status"], run["episodes"], run["commit"]) == ("finished", 8, "a b")


@pytest.mark.parametrize(
    ("logged", "hole"),
    [(range(100, 1001, 100), None), ((100, 200, 300, 500, 600, 700, 800, 900, 1000), 300), (range(100, 901, 100), 900)],
)
def test_a_hole_in_the_log_breaks_a_run(logged, hole):
    """A run of 1000 steps, or of 1050 of which the last 50 are no whole iteration, logs every 100."""
    for total in (1000, 1050):
        told = ("broken", f"points are missing after step {hole}") if hole else ("finished", "")
        assert report.judge(total, total, [], [0, *logged], pd.Series([1.0])) == told


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_return_that_is_not_finite_breaks_a_run(value):
    """W&B has strings for such values. The score is not that of the other episodes."""
    config = dict(exp_name="ppo", preset="loaded-gae", env_id="Hopper-v4", seed=1, total_timesteps=300)
    points = [(100, 1.0, 5.0), (200, value, 5.0), (300, 3.0, "NaN")]
    made = report.summarize(config, points, 300, dict(id="x", run="r", started="", commit="", versions=""))
    assert (made["status"], made["reason"]) == ("broken", "a return is not finite")
    assert not np.isfinite(made["final_return"]) and "Hopper-v4 | ppo" not in tables(made, row(seed=2, env_id="Ant-v4"))


def test_a_damaged_run_is_named_and_the_rest_is_reported(copied, monkeypatch, capsys):
    good, torn, garbage = (copied("killed", name) for name in ("good", "torn", "garbage"))
    (log,) = torn.glob("wandb/offline-run-*/*.wandb")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    (torn / "finished").write_text(f"{TOTAL}\n")
    (log,) = garbage.glob("wandb/offline-run-*/*.wandb")
    log.write_bytes(b"garbage")
    (good.parent / "no\x1b[31mlog").mkdir()
    (good.parent / "no\x1b[31mlog/args.json").write_text("{")
    (good.parent / "a folder of logs").mkdir()
    fake_log(monkeypatch, good.parent / "foreign", ("", []), exp_name="dqn")
    fake_log(monkeypatch, good.parent / "odd", ("", []), seed=["?"])
    read = report.read_folder  # torn is a copy of good: give it an id of its own
    patched = lambda folder, known: read(folder, known) | (dict(id="torn") if folder.name == "torn" else {})  # noqa: E731
    monkeypatch.setattr(report, "read_folder", patched)
    assert report.main([]) == 0
    told = {made["run"]: (made["status"], made["reason"].split(" step")[0]) for made in runs_csv()}
    assert told == {"good": ("unfinished", "its log ends at"), "torn": ("broken", "points are missing after")}
    error = capsys.readouterr().err
    assert "skipped 'garbage': W&B cannot read its log\n" in error and "Traceback" not in error
    assert r"skipped 'no\x1b[31mlog': it has no log (--wandb-mode disabled?)" in error and error.count("skipped") == 4
    assert "skipped 'foreign': it is not a run of one of the six scripts" in error and "skipped 'odd': " in error


def test_a_finished_run_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_log(monkeypatch, tmp_path / "runs/r", ("a", [(100, 1.0, 5.0), (200, 2.0, 5.0)]), total_timesteps=200)
    inspect, calls = report.inspect, []
    finished, rows, curves = Path("runs/r/finished"), Path("results/runs.csv"), Path("results/curves.csv.gz")
    monkeypatch.setattr(report, "inspect", lambda path, keys: calls.append(path) or inspect(path, keys))
    for change, expected in (
        (lambda: None, (1, "unfinished")),
        (lambda: finished.write_text("200\n"), (2, "finished")),
        (lambda: None, (2, "finished")),
        (lambda: curves.write_bytes(gzip.compress(b"id,steps,step,return,episodes\n")), (3, "finished")),
        (finished.unlink, (4, "finished")),  # an unfinished run does not replace a finished one
        (rows.unlink, (5, "unfinished")),
    ):
        change()
        assert report.main([]) == 0
        assert (len(calls), runs_csv()[0]["status"]) == expected


class OnlineRun(SimpleNamespace):
    """As much of wandb.apis.public.Run as report.py uses."""

    def scan_history(self, keys: list[str], page_size: int = 1000, min_step: int = 0, max_step=None, use_cache=True):
        return iter([{key: point[key] for key in keys} for point in self.points if set(keys) <= set(point)])

    def file(self, name: str):
        assert name == "requirements.txt"
        requirements = "".join(f"{package}=={importlib.metadata.version(package)}\n" for package in report.PACKAGES)
        return SimpleNamespace(download=lambda root: io.StringIO(requirements))


def test_online_runs_give_what_offline_ones_do(copied, monkeypatch, capsys):
    run = copied("resumed", "r")
    assert report.main(["--out", "offline"]) == 0
    (offline,) = runs_csv("offline")
    segment = max(run.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime)
    record, _ = report.inspect(segment, report.KEYS)
    shared = dict(name="r", created_at=record["start_time"], config=record["config"]["update"], points=history(run))
    shared |= dict(id=offline["id"], commit=offline["commit"])
    runs = [OnlineRun(state="finished", **shared), OnlineRun(state="crashed", **shared | dict(id="other"))]
    runs += [OnlineRun(state="finished", **shared | dict(id="odd", name="odd", points=None))]
    asked, api = [], SimpleNamespace(runs=lambda path, lazy: asked.append(path) or runs)
    monkeypatch.setattr(report, "wandb_api", lambda: api)
    assert report.main(["--wandb", "someone/mdpo", "--out", "online"]) == 0 and asked == ["someone/mdpo"]
    online, crashed = runs_csv("online")
    assert online == offline and offline["status"] == "finished" and crashed["status"] == "unfinished"
    assert curves_csv("online")[: len(curves_csv("offline"))] == curves_csv("offline") != []
    assert "skipped 'odd': " in capsys.readouterr().err


def save(rows: list[dict], out="results") -> None:
    Path(out).mkdir(exist_ok=True)
    report.write_results(Path(out), pd.DataFrame(rows, dtype=object))


def test_rows_of_runs_that_are_gone_stay(copied):
    copied("resumed", "r")
    assert report.main([]) == 0
    (read,) = runs_csv()
    shutil.rmtree("results")
    same = dict(algo="mdpo_onpolicy", env_id="InvertedPendulum-v4", id=read["id"])
    stale = row(**same, steps=TOTAL, run="r", status="unfinished", reason="its log ends at step 1")
    longer = row(**same, steps=2 * TOTAL, run="r")  # the length is part of a run's identity
    gone = row(run="gone", id="01234567", score=7.25)
    save([gone])
    assert len(report.read_results(Path("results"))[0]["curve"]) == 2  # though its id looks like a number
    save([gone, stale, longer])
    for _ in range(2):
        assert report.main([]) == 0
        made = {(r["id"], r["steps"]): r for r in runs_csv()}
        assert len(made) == len(runs_csv()) == 3 and made[read["id"], str(TOTAL)] == read
        assert made["01234567", "1000000"]["final_return"] == "7.25"
        assert [p for p in curves_csv() if p[0] == "gone"] == [("gone", 10_000, 0.0, 5), ("gone", 990_000, 7.25, 5)]
    shutil.rmtree("runs")
    before = {path.name: path.read_bytes() for path in Path("results").iterdir()}
    assert report.main([]) == 0
    assert {path.name: path.read_bytes() for path in Path("results").iterdir()} == before


def test_results_that_cannot_be_read_are_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in (("curves.csv.gz", b"no gzip"), ("runs.csv", b"\xff\xfe\x00"), ("curves.csv.gz", None)):
        save([row()])
        Path("results", name).write_bytes(content) if content else Path("results", name).unlink()
        before = {path.name: path.read_bytes() for path in Path("results").iterdir()}
        assert exit_status() == 2 and "Restore both, or delete both" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in Path("results").iterdir()} == before


def test_a_bad_row_is_named_and_in_no_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bad = [row(run="nan", score="nan"), row(run="seedless", seed="x"), row(run="preset") | dict(preset="huge")]
    save([row(score=100.0), *bad, row(run="endless", score=float("inf"))])
    with open("results/runs.csv", "a") as file:
        file.write("one,two,three\n" + "x," * 30 + "\n")
    assert report.main([]) == 0
    error, text = capsys.readouterr().err, Path("results/table.md").read_text()
    assert line(text, "Hopper-v4", "ppo")[0] == "100 (n = 1, 1M)" and error.count("skipped a row of results") == 2
    for name in ("nan", "seedless", "preset", "endless"):
        assert f"left out '{name}'" in error and "damaged" in line(text, name)[0]
    assert [r["seed"] for r in runs_csv() if r["run"] == "seedless"] == ["x"]  # kept for somebody to repair


def test_a_failed_write_leaves_the_old_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save([row()])
    before = Path("results/runs.csv").read_bytes()

    def full(path, content):
        path.open("wb").write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert exit_status() == 2 and "cannot write to results: No space left" in capsys.readouterr().err
    assert Path("results/runs.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("algo", "flags", "expected"),
    [
        ("mdpo_onpolicy", "--seed 3 --total-timesteps 4096 --run-name x --no-cuda --compile --wandb-group g", ""),
        ("mdpo_onpolicy", "--preset minimal --checkpoint-interval 7", ""),
        ("mdpo_onpolicy", "--preset minimal --anneal-lr --sgd-steps 10", "anneal_lr=True sgd_steps=10"),
        ("ppo", "--no-anneal-lr", "anneal_lr=False"),
        ("ppo", "--objective kl-fixed", "objective=kl-fixed"),
        ("mdpo_offpolicy", "--env-id Ant-v5 --bregman-stepsize 0.5", ""),
        ("mdpo_offpolicy", "--env-id Swimmer-v4 --bregman-stepsize 0.4", "bregman_stepsize=0.4"),
        ("mdpo_tsallis", "--tsallis-q 1.5", "tsallis_q=1.5"),  # and entropy_q, which follows it
        ("mdpo_tsallis", "--tsallis-q 2 --entropy-q 1", "entropy_q=1 tsallis_q=2"),
        ("mdpo_tsallis", "--env-id Walker2d-v4 --log-q joint", "log_q=joint"),
    ],
)
def test_a_variant_is_what_the_script_would_not_do_by_itself(algo, flags, expected):
    config = vars(importlib.import_module(algo).parse_args(flags.split())) | dict(_wandb={})
    config |= {name: int(x) for name, x in config.items() if isinstance(x, float) and x == int(x)}  # as W&B does
    made = dict(algo=algo, flags=" ".join(map("=".join, report.flags(config).items())))
    assert report.variant(made | {key: config[key] for key in ("preset", "env_id")}) == expected


def test_when_a_default_changes_old_rows_become_variants(monkeypatch):
    old = row(score=7.0)
    assert line(tables(old), "Hopper-v4", "ppo")[0] == "7.0 (n = 1, 1M)"
    report.defaults.cache_clear()
    parse = ppo.parse_args
    changed = dict(minibatch_size=256, brand_new="yes")
    monkeypatch.setattr(ppo, "parse_args", lambda argv: SimpleNamespace(**vars(parse(argv)) | changed))
    new, removed = row(score=9.0), row(seed=2, score=8.0, varied=dict(gone="1"))
    text = tables(old, new, removed)
    report.defaults.cache_clear()
    assert line(text, "Hopper-v4", "ppo")[0] == "9.0 (n = 1, 1M)"
    assert line(text, "Hopper-v4", "loaded-gae", "ppo", "minibatch_size=64")[0] == "7.0 (n = 1, 1M)"
    assert line(text, "Hopper-v4", "loaded-gae", "ppo", "gone=1")[0] == "8.0 (n = 1, 1M)"


def test_the_task_of_a_run_is_only_printed(tmp_path, monkeypatch):
    """Gymnasium imports the module before a colon in an id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("evil.py").write_text("open('touched', 'w')")
    monkeypatch.setattr(gymnasium, "make", None)
    monkeypatch.setattr(gymnasium, "spec", None)
    report.defaults.cache_clear()
    passed, parse = [], ppo.parse_args
    monkeypatch.setattr(ppo, "parse_args", lambda argv: passed.append(argv) or parse(argv))
    save([row(env_id=env_id) for env_id in ("evil:Hopper-v4", "--help", "a|b\x1b[31m$x_<b>-v4", "Ant-v4")])
    assert report.main([]) == 0 and not Path("touched").exists()
    assert {argv[1] for argv in passed} == {"Other-v0", "Ant-v4"}
    assert line(Path("results/table.md").read_text(), r"a\|b?\[31m$x_\<b>-v4", "ppo")[0] == "100 (n = 1, 1M)"


def test_known_scores_stand_beside_the_papers_and_cleanrls():
    hopper = [1000.0, 1100.0, 1200.0, 1300.0, 5000.0]
    text = tables(*(row(seed=i, score=x) for i, x in enumerate(hopper)), row("trpo", score=-40.26))
    bootstrap = dict(method="percentile", n_resamples=20_000, random_state=1)
    theirs = scipy.stats.bootstrap((hopper,), lambda x, axis: scipy.stats.trim_mean(x, 0.25, axis=axis), **bootstrap)
    ours, middle, paper, cleanrl = line(text, "Hopper-v4", "ppo")
    assert ours == f"1920 ± {1.96 * scipy.stats.sem(hopper):.0f} (n = 5, 1M)"
    assert (paper, cleanrl) == ("2051 ± 241 (n = 5, 10M)", "2383 ± 272 (n = 3, 1M)")
    value, low, high = map(float, re.findall(r"\d+", middle))
    assert value == 1200 and (low, high) == pytest.approx(theirs.confidence_interval, rel=0.02)
    assert line(text, "Hopper-v4", "trpo") == ["-40.3 (n = 1, 1M)", "-40.3", "1979 ± 672 (n = 5, 10M)", "—"]
    incomplete = "Incomplete (number of seeds where it is not 5):"
    assert f"{incomplete} Hopper-v4, 1M: mdpo_onpolicy 0, trpo 1; no runs on Walker2d, HalfCheetah, Ant," in text
    assert f"## On-policy, minimal\n\n{incomplete} no runs on Hopper, Walker2d" in text
    assert "Made at c0ffee1 with torch=2.13.0." in text


def test_a_peer_stands_only_beside_what_it_is_comparable_with():
    text = tables(
        row("mdpo_tsallis", "Walker2d-v4"), row("sac", "Hopper-v4"), row("sac", "Swimmer-v4"), row("ppo", "Ant-v4"),
        row("sac", "Humanoid-v4", preset="loaded"), row("sac", "Humanoid-v5", preset="loaded"),
        row("sac", "HalfCheetah-v4", preset="loaded", steps=3_000_000),
    )  # fmt: skip
    assert line(text, "Walker2d-v4", "mdpo_tsallis")[2:] == ["1151 ± 218, q = 1.8 (n = 5, steps not given)", "—"]
    assert line(text, "Hopper-v4", "sac")[2:] == ["1501 ± 414 (n = 5, steps not given)", "—"]  # 64 units
    assert line(text, "Swimmer-v4", "sac")[2:] == ["—", "—"] and line(text, "Ant-v4", "ppo")[3] == "—"
    assert line(text, "Humanoid-v4", "sac")[3] == "4996 ± 686 (n = 3, 1M)"
    assert line(text, "Humanoid-v5", "sac")[3] == "—" and line(text, "HalfCheetah-v4", "sac")[3] == "—"


def test_every_figure_of_the_paper_is_there():
    assert len(report.PAPER) == 72 and report.PAPER["on-policy minimal", "Ant", "ppo"] == "-40 ± 33"
    assert report.PAPER["off-policy loaded", "HumanoidStandup", "sac"] == "154765 ± 11721"
    for preset, best in mdpo_tsallis.TSALLIS_Q.items():
        for task, q in best.items():
            kl, tsallis = (
                report.PAPER[f"off-policy {preset}", task, f"mdpo_{kind}"] for kind in ("offpolicy", "tsallis")
            )
            assert tsallis.endswith(f", q = {q:g}") and (q != 1 or tsallis.startswith(f"{kl},"))


def test_runs_of_different_lengths_are_not_averaged():
    text = tables(row(seed=1), row(seed=1, score=900.0, steps=10_000_000), row(seed=2, score=900.0, steps=10_000_000))
    cells = [
        cells[2] for cells in (one[2:-2].split(" | ") for one in text.splitlines()) if cells[:2] == ["Hopper-v4", "ppo"]
    ]
    assert cells == ["100 (n = 1, 1M)", "900 ± 0 (n = 2, 10M)"]
    assert "Hopper-v4, 1M: mdpo_onpolicy 0, trpo 0, ppo 1; Hopper-v4, 10M: mdpo_onpolicy 0" in text
    assert [report.short(n) for n in (512, 1000, 204_800, 3_000_000)] == ["512", "1k", "204.8k", "3M"]


def test_unfinished_broken_and_repeated_runs_are_listed_and_not_averaged():
    others = [
        row(seed=3, score=9e6, run="a|b", status="unfinished", reason="its log ends at step 12"),
        row(seed=4, score=9e6, run="c", status="broken", reason="points are missing after step 7"),
        row(seed=1, score=9e6, run="d", started="2025-01-01T00:00:00"),
    ]
    text = tables(row(seed=1), row(seed=2, score=300.0), *others)
    assert line(text, "Hopper-v4", "ppo")[0] == "200 ± 196 (n = 2, 1M)"
    assert line(text, r"a\|b")[0] == "unfinished: its log ends at step 12"
    assert line(text, "c")[0].startswith("broken: points") and line(text, "d")[0].startswith("a newer run has the same")


def test_variants_leave_the_main_tables_and_stand_beside_the_defaults():
    rows = [row("mdpo_onpolicy", seed=i, score=100.0 * i) for i in (1, 2)]
    rows += [row("mdpo_onpolicy", seed=i, score=1000.0 * i, varied=dict(anneal_lr="True")) for i in (1, 2, 3)]
    rows += [row("mdpo_tsallis", varied=dict(tsallis_q="1.5", entropy_q="1.5"))]
    text = tables(*rows)
    assert line(text, "Hopper-v4", "mdpo_onpolicy")[0] == "150 ± 98 (n = 2, 1M)"
    assert "| Hopper-v4 | mdpo_tsallis |" not in text
    assert line(text, "Hopper-v4", "loaded-gae", "mdpo_onpolicy", "default")[0] == "150 ± 98 (n = 2, 1M)"
    assert line(text, "Hopper-v4", "loaded-gae", "mdpo_onpolicy", "anneal_lr=True")[0] == "2000 ± 1132 (n = 3, 1M)"
    assert line(text, "Hopper-v4", "minimal", "mdpo_tsallis", "tsallis_q=1.5")[0] == "100 (n = 1, 1M)"


@pytest.mark.parametrize(
    ("scores", "mean", "middle"),
    [
        ([1000, 1000], "1000 ± 0", "1000 [1000, 1000]"),
        ([1000.0, 1000.2], "1000.1 ± 0.2", "1000.1 [1000.0, 1000.2]"),
        ([12.34, 12.34], "12.3 ± 0.0", "12.3 [12.3, 12.3]"),
        ([12345.6], "12346", "12346"),
    ],
)
def test_rounding_hides_no_spread(scores, mean, middle):
    assert report.statistics(np.array(scores, float)) == (mean, middle)


def test_a_figure_has_a_panel_per_task_and_a_line_per_algorithm():
    rows = [row(algo, env, s, s) for algo in ("ppo", "trpo") for env in ("Ant-v4", "Hopper-v4") for s in (1, 2, 4)]
    rows += [row(env_id="Walker2d-v4", seed=s) for s in (1, 2)] + [row(steps=300_000), row("sac")]
    drawn = report.figures(report.select(rows))
    assert set(drawn) == {"curves_on-policy_loaded-gae.png", "curves_off-policy_minimal.png"}
    figure = drawn["curves_on-policy_loaded-gae.png"]
    hopper, walker, ant = figure.axes
    assert [axis.get_title() for axis in figure.axes] == [
        "Hopper-v4, 1M steps, n = 3", "Walker2d-v4, 1M steps, n = 2", "Ant-v4, 1M steps, n = 3"
    ]  # fmt: skip
    assert len({x.get_color() for x in hopper.get_lines()}) == len(hopper.get_lines()) == len(ant.get_lines()) == 2
    assert hopper.get_lines()[0].get_xydata()[-1] == pytest.approx((0.99, 7 / 3))
    band = hopper.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(7 / 3 + scipy.stats.sem([1, 2, 4]))
    assert len(walker.get_lines()) == 2 and not walker.collections  # two seeds: each as a line
    assert {x.get_linewidth() for x in walker.get_lines()} < {0.8} | {x.get_linewidth() for x in hopper.get_lines()}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["trpo", "ppo"]


def test_each_algorithm_with_variants_has_a_figure_of_them_and_old_figures_are_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = [row("mdpo_onpolicy"), row("trpo"), row("trpo", varied=dict(gamma="0.9"))]
    save([row(), *(row(varied=dict(gamma=f"0.{n}")) for n in range(1, 10)), *others])
    for name in ("curves_off-policy_old.png", "variants_off-policy_old.png", "mine.png"):
        Path("results", name).touch()
    assert report.main([]) == 0
    pictures = {path.name: path.read_bytes()[:4] for path in Path("results").glob("*.png")}
    trpo, ppo = (f"variants_on-policy_loaded-gae_{algo}.png" for algo in ("trpo", "ppo"))
    assert set(pictures) == {"mine.png", "curves_on-policy_loaded-gae.png", trpo, ppo}
    assert pictures[ppo] == b"\x89PNG"
    drawn = report.figures(report.select(report.read_results(Path("results"))))
    for name, lines in ((trpo, 2), (ppo, 10)):
        (panel,) = drawn[name].axes
        assert len({(x.get_color(), x.get_linestyle()) for x in panel.get_lines()}) == lines


def test_a_task_has_a_panel_for_its_longest_runs_and_for_each_length_that_most_algorithms_have():
    tasks, lengths = ("Hopper-v4", "Walker2d-v4"), (1_000_000, 10_000_000)
    rows = [row(algo, env, steps=steps) for algo in ("ppo", "trpo") for env in tasks for steps in lengths]
    rows.remove(next(r for r in rows if (r["algo"], r["env_id"], r["steps"]) == ("trpo", "Walker2d-v4", 10_000_000)))
    figure = report.figures(report.select([*rows, row(steps=300_000)]))["curves_on-policy_loaded-gae.png"]
    titles = [f"{env}, {steps // 10**6}M steps, n = 1" for steps in reversed(lengths) for env in tasks]
    assert [axis.get_title() for axis in figure.axes] == titles


def test_a_panel_says_the_fewest_and_the_most_seeds():
    rows = [row(algo, seed=seed) for algo, n in (("mdpo_onpolicy", 1), ("trpo", 2), ("ppo", 4)) for seed in range(n)]
    (panel,) = report.figures(report.select(rows))["curves_on-policy_loaded-gae.png"].axes
    assert panel.get_title() == "Hopper-v4, 1M steps, n = 1–4"


def test_a_legend_with_long_names_fits_in_its_figure():
    varied = [dict(gamma=f"0.{n}", critic_minibatch_size="128", objective="kl-annealed") for n in range(1, 10)]
    rows = [row("mdpo_onpolicy"), *(row("mdpo_onpolicy", varied=flags) for flags in varied)]
    figure = report.figures(report.select(rows))["variants_on-policy_loaded-gae_mdpo_onpolicy.png"]
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.x1 and legend.y1 <= figure.bbox.y1


def test_a_curve_is_interpolated_where_no_episode_ended():
    curves = [pd.DataFrame({"step": s, "return": r}) for s, r in (([10, 30], [0.0, 2.0]), ([20, 30], [3.0, 4.0]))]
    aligned = report.align(curves)
    assert aligned.index.tolist() == [20, 30] and aligned.to_numpy().tolist() == [[1, 3], [2, 4]]


class StandIn(BaseHTTPRequestHandler):
    """As much of W&B's server as publishing needs. It has one project, me/mdpo, and keeps the reports."""

    views, asked = {}, []

    def do_POST(self):
        body, answer = self.rfile.read(int(self.headers.get("Content-Length", 0))), {}
        if self.path == "/graphql":  # other addresses get W&B's telemetry, as protobuf
            request = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
            self.asked.append(name)
            answer = getattr(self, name)(request.get("variables") or {})
        content = json.dumps(dict(data=answer)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_):
        pass

    def Viewer(self, _):
        return dict(viewer=dict(id="v", entity="me", username="me", email="", flags="{}", teams=dict(edges=[])))

    GetDefaultEntity = Viewer

    def GetProjects(self, _):
        project = dict(id="p", name="mdpo", entityName="me", createdAt="2026-01-01T00:00:00", isBenchmark=False)
        edges = [dict(node=project | dict(user=None), cursor="c")]
        return dict(models=dict(edges=edges, pageInfo=dict(endCursor="c", hasNextPage=False)))

    def ProjectViews(self, variables):
        edges = [dict(node=view, cursor="c") for view in self.views.values()]
        page = dict(edges=edges, pageInfo=dict(endCursor="c", hasNextPage=False))
        return dict(project=dict(allViews=page) if variables["project"] == "mdpo" else None)

    def upsertView(self, variables):
        view = {key: variables[key] for key in ("name", "displayName", "description", "spec")}
        view |= dict(id=variables["id"] or f"view{len(self.views)}", type="runs", updatedAt="2026-01-01T00:00:00")
        view |= dict(project=dict(id="p", name=variables["projectName"], entityName=variables["entityName"]))
        self.views[view["id"]] = view
        return dict(upsertView=dict(view=view, inserted=True))


def test_publishing_twice_makes_one_report_of_filters(tmp_path):
    """In another process, since W&B keeps the first server that it has met."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    StandIn.views["mine"] = dict(id="mine", name="mine", displayName="Another report", description="", spec="{}")
    (tmp_path / "runs/r").mkdir(parents=True)
    (tmp_path / "runs/r/args.json").touch()
    (tmp_path / "results").mkdir()
    (tmp_path / "results/table.md").write_text("| our | table |")
    calls = """
import report
for project in ("mdpo", "mdpo", "nothing"):
    try:
        print(report.main(["--wandb", f"me/{project}", "--publish"]))
    except SystemExit as end:
        print(end.code)
"""
    environment = os.environ | dict(WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}", WANDB_API_KEY="0" * 40)
    environment |= dict(HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    settings = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    process = subprocess.run([sys.executable, "-c", calls], **settings)
    server.shutdown()
    address = f"http://127.0.0.1:{server.server_port}/me/mdpo/reports/MDPO,-TRPO,-PPO-and-SAC--view1"
    assert process.stdout.split() == [address, "0", address, "0", "2"], process.stderr
    assert "Project nothing does not exist under entity me" in process.stderr and "Traceback" not in process.stderr
    assert set(StandIn.views) == {"mine", "view1"} and StandIn.asked.count("upsertView") == 2
    assert set(StandIn.asked) == {"Viewer", "GetDefaultEntity", "GetProjects", "ProjectViews", "upsertView"}  # no runs
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"table.md"}

    blocks = json.loads(StandIn.views["view1"]["spec"])["blocks"]
    grids = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    headings = [block["children"][0]["text"] for block in blocks if block["type"] == "heading"]
    assert headings == [
        "On-policy, loaded-gae", "On-policy, loaded", "On-policy, minimal", "Off-policy, loaded", "Off-policy, minimal",
    ] and len(grids) == 30  # fmt: skip
    assert [block["content"] for block in blocks if block["type"] == "markdown-block"] == ["| our | table |"]
    expected = [(g.split(), f"{task}-v4") for g in report.GROUPS for task in report.TASKS]
    for grid, ((family, preset), env_id) in zip(grids, expected, strict=True):
        (runset,) = grid["runSets"]
        filters = [(f["key"]["section"], f["key"]["name"], f["op"], f["value"]) for f in runset["filters"]["filters"]]
        assert filters == [
            ("run", "tags", "IN", [env_id]), ("run", "tags", "IN", [preset]),
            ("run", "jobType", "IN", list(report.FAMILIES[family])),
        ]  # fmt: skip
        assert [f.get("connector") for f in runset["filters"]["filters"]] == [None, "AND", "AND"]
        assert not any(f["disabled"] for f in runset["filters"]["filters"]) and "project" not in runset
        assert runset["grouping"] == [dict(section="run", name="jobType")]
        panels = [panel["config"] for panel in grid["panelBankSectionConfig"]["panels"]]
        kl = "losses/kl" if family == "on-policy" else "losses/kl_to_old"
        assert [panel["metrics"] for panel in panels] == [["charts/episodic_return"], [kl], ["charts/SPS"]]
        for panel in panels:
            assert (panel["xAxis"], panel["aggregate"], panel["groupAgg"], panel["groupArea"]) == (
                "global_step", True, "mean", "stderr"
            ) and panel["smoothingWeight"] == 0  # fmt: skip


def unreachable():
    raise wandb.errors.CommError("no network here\nat all")


@pytest.mark.parametrize(
    ("flags", "api", "sentence"),
    [
        ("nowhere", None, "there is no folder nowhere"),
        ("", None, "there are no runs, and none in results"),
        (".", None, "there are no runs, and none in results"),
        ("--wandb mdpo", None, "--wandb takes ENTITY/PROJECT, not 'mdpo'"),
        ("--publish", None, "--wandb takes ENTITY/PROJECT, not '', and --publish needs it"),
        ("runs --wandb a/b", None, "give folders or --wandb, not both"),
        ("--wandb a/b", None, "no login. `wandb login` makes one"),
        ("--wandb a/b --publish", None, "no login. `wandb login` makes one"),
        ("--wandb a/b", unreachable, "W&B does not list the runs of a/b: no network here\n"),
        ("--wnadb a/b", None, "Perhaps you meant"),
    ],
)
def test_a_refusal_is_a_sentence_and_status_2(flags, api, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if api:
        monkeypatch.setattr(report, "wandb_api", api)
    (tmp_path / "not-a-run").mkdir()
    assert exit_status(*flags.split()) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error and not (tmp_path / "results").exists()


def test_without_its_packages_it_says_what_to_install():
    code = "import sys; sys.modules['pandas'] = None; import report"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "") and process.stderr.startswith(
        "error: pandas is missing: pip"
    )


def test_help_shows_examples_and_a_sentence_per_flag(capsys):
    assert exit_status("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "python report.py --wandb ENTITY/PROJECT --publish" in text and "folder to add to" in text


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_tables_of_scores_say_what_runs_csv_and_published_csv_say(page):
    """Tables whose first cell is "`PRESET`, STEPS steps": mean ± half-width (n), "paper: " and "CleanRL: " columns."""
    runs, names = report.select(report.read_results(ROOT / "results")), dict(TRPO="trpo", PPO="ppo", SAC="sac")
    checked = 0
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), flags=re.M):
        (title, *columns), _, *lines = ([cell.strip() for cell in one[1:-1].split("|")] for one in table.splitlines())
        if not (about := re.fullmatch(r"`(\S+)`, (\S+) steps", title)):
            continue
        family = "on-policy" if about[1] == "loaded-gae" else "off-policy"
        names |= dict(MDPO=f"mdpo_{family.replace('-', '')}", Tsallis="mdpo_tsallis")
        cells = runs[(runs.left_out == "") & (runs.preset == about[1]) & (runs.steps.map(report.short) == about[2])]
        for task, *written in lines:
            for column, cell in zip(columns, written, strict=True):
                source, _, name = column.rpartition(": ")
                score, q = re.fullmatch(r"(.*?)(?:, q = (\S+))?", cell).groups()
                key = source, f"{family} {about[1]}", task.removesuffix("-v4"), names[name]
                mine = cells[(cells.env_id == task) & (cells.algo == names[name])]
                mine = mine[mine.variant == (f"tsallis_q={q}" if q and mine.variant.eq("").sum() == 0 else "")]
                found = f"{report.statistics(mine.final_return.to_numpy(float))[0]} ({len(mine)})" if len(mine) else "–"
                found = report.PUBLISHED.get(key, "–").split(" (")[0].split(",")[0] if source else found
                assert score.replace("−", "-") == found, f"{title}, {task}, {column}"
                checked += 1
    assert checked
