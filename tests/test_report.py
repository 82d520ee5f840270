"""report.py: what it reads of real runs, what it averages and what it only lists, its numbers, tables and figures."""

import csv
import gzip
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import wandb
from conftest import ROOT, SHORT, contents, finish, history, start

import mdpo_onpolicy as mdpo
import mdpo_tsallis
import ppo
import report

PNG = b"\x89PNG\r\n\x1a\n"


def row(algo="ppo", env_id="Hopper-v4", seed=1, score=100.0, **other) -> dict:
    """A row of runs.csv, of a finished run unless it is told otherwise."""
    preset = "loaded-gae" if algo in report.FAMILIES["on-policy"] else "minimal"
    usual = dict(algo=algo, preset=preset, variant="", env_id=env_id, seed=seed, steps=1_000_000, final_return=score)
    usual |= dict(episodes=1000, sps=1000.0, commit="c0ffee", versions="torch=2.13.0", status="finished", reason="")
    made = usual | dict(started="2026-01-01T00:00:00") | other
    name = "__".join(str(made[key]) for key in ("env_id", "algo", "variant", "steps", "seed", "started"))
    return made | dict(run=other.get("run", name))


def make(out: Path, rows: list[dict], *flags) -> str:
    """table.md of these rows, and everything else in `out`, by way of --from-results."""
    out.mkdir(parents=True, exist_ok=True)
    curves = {r["run"]: [(5000 + 10_000 * i, r["final_return"] * i / 99, 10) for i in range(100)] for r in rows}
    report.write_results(out, rows, curves)
    assert report.main(["--from-results", "--out", str(out), *map(str, flags)]) == 0
    return (out / "table.md").read_text()


def line(table: str, *begin: str) -> list[str]:
    """The cells of the one line of a table that begins with these."""
    lines = [[cell.strip() for cell in text.strip("|").split("|")] for text in table.splitlines() if text[:1] == "|"]
    found = [cells for cells in lines if cells[: len(begin)] == list(begin)]
    assert found, (begin, table)
    return found[0]


def rows_of(out: Path) -> list[dict]:
    with open(out / "runs.csv", newline="") as file:
        return list(csv.DictReader(file))


def curve_of(out: Path) -> list[tuple]:
    with gzip.open(out / "curves.csv.gz", "rt", newline="") as file:
        return [(int(p["step"]), float(p["return"]), int(p["episodes"])) for p in csv.DictReader(file)]


# ---------------------------------------------------------------------------------------------------- real runs


def binned(points: list[dict], total: int) -> list[tuple]:
    """A curve by its definition: the mean return of the episodes that end in each fiftieth of a run."""
    episodes = [(p["global_step"], p["charts/episodic_return"]) for p in points if "charts/episodic_return" in p]
    curve = []
    for i in range(50):
        inside = [x for step, x in episodes if i * total / 50 < step <= (i + 1) * total / 50]
        if inside:
            curve.append((round((i + 0.5) * total / 50), round(np.mean(inside), 2), len(inside)))
    return curve


def test_a_resumed_runs_curve_is_that_of_its_checkpointed_history(tmp_path, monkeypatch):
    total, run = 10_240, tmp_path / "runs/r"
    flags = (*SHORT, "--checkpoint-interval", 512, "--total-timesteps", total)
    process, deadline = start("mdpo_onpolicy", *flags, cwd=tmp_path), time.time() + 60
    while len(list(run.glob("wandb/offline-run-*/*.wandb"))) == 0 or not (run / "checkpoint.pt").exists():
        assert process.poll() is None and time.time() < deadline, (tmp_path / "stderr").read_text()
        time.sleep(0.02)
    born = (run / "checkpoint.pt").stat().st_mtime_ns
    while (run / "checkpoint.pt").stat().st_mtime_ns == born:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.02)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    monkeypatch.chdir(tmp_path)
    assert report.main([]) == 0
    (unfinished,) = rows_of(tmp_path / "results")
    assert unfinished["status"] == "unfinished" and "ends at step" in unfinished["reason"]
    assert "unfinished" in line((tmp_path / "results/table.md").read_text(), "r")[1]

    resumed = finish("mdpo_onpolicy", "--resume", *flags, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    _, second = sorted(run.glob("wandb/offline-run-*"))
    shutil.copytree(
        second, second.with_name("offline-run-99991231_235959-r")
    )  # one that repeats it must change nothing
    assert report.main([]) == 0
    (row,) = rows_of(tmp_path / "results")
    points = history(run)
    returns = [p["charts/episodic_return"] for p in points if "charts/episodic_return" in p]
    assert (row["status"], int(row["episodes"]), int(row["steps"])) == ("finished", len(returns), total)
    assert float(row["final_return"]) == pytest.approx(np.mean(returns[-100:]), abs=0.006)
    assert curve_of(tmp_path / "results") == binned(points, total)
    assert row["variant"] == "num_steps=256" and row["algo"] == "mdpo_onpolicy" and "torch=" in row["versions"]
    assert not any(word in (tmp_path / "results/runs.csv").read_text() for word in (str(tmp_path), os.uname().nodename))


def segment(points: list[tuple]) -> tuple:
    config = dict(exp_name="ppo", preset="loaded-gae", env_id="Hopper-v4", seed=1, total_timesteps=400)
    return "2026-01-01T00:00:00Z", config, points, True


def test_a_later_segment_supersedes_from_its_first_step_on(tmp_path, monkeypatch):
    """The first logged to step 300, was killed, and went on from a checkpoint at 200 with the points from 150 on."""
    first = [(step, -step, 10.0 if step % 100 == 0 else None) for step in range(50, 301, 50)]
    second = [(step, step, 20.0 if step % 100 == 0 else None) for step in range(150, 401, 50)]
    segments = {"b": segment(first), "a": ("2026-01-01T00:00:01Z", *segment(second)[1:])}  # names do not decide
    for name in segments:
        (tmp_path / f"r/wandb/offline-run-{name}").mkdir(parents=True)
        (tmp_path / f"r/wandb/offline-run-{name}/run-{name}.wandb").touch()
    (tmp_path / "r/finished").write_text("400\n")
    monkeypatch.setattr(report, "read_segment", lambda file: segments[file.stem[-1]])
    run = report.read_run(tmp_path / "r", use_cache=False)
    assert [value for _, value, _ in run["curve"]] == [-50, -100, 150, 200, 250, 300, 350, 400]
    assert (run["final_return"], run["episodes"], run["hole"]) == (
        np.mean([-50, -100, 150, 200, 250, 300, 350, 400]),
        8,
        None,
    )


@pytest.mark.parametrize(
    ("steps", "hole"),
    [(range(100, 1001, 100), None), ((100, 200, 300, 500, 600, 700, 800, 900, 1000), 300), (range(100, 901, 100), 900)],
)
def test_a_hole_in_the_log_is_found(steps, hole):
    """A run of 1000 steps, or of 1050 of which the last 50 are not a whole iteration, logs every 100."""
    for total in (1000, 1050):
        run = report.summarize([(step, 1.0, 10.0) for step in steps], dict(total_timesteps=total))
        assert run["hole"] == hole
        config = dict(exp_name="ppo", preset="loaded-gae", env_id="Hopper-v4", seed=1, total_timesteps=total)
        told = ("broken", f"points are missing after step {hole}") if hole else ("finished", "")
        assert report.judge(run | dict(config=config, finished=total)) == told


def test_the_end_of_a_torn_file_is_lost_and_the_rest_is_read(copied_run, tmp_path, capsys):
    """The file of a run that says it has finished is cut in the middle: what is left shows a hole, and is listed."""
    (file,) = copied_run("mdpo_onpolicy").glob("wandb/offline-run-*/*.wandb")
    whole = report.read_segment(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    started, config, points, readable = report.read_segment(file)
    assert readable and (started, config) == whole[:2] and 0 < len(points) < len(whole[2])
    assert points == whole[2][: len(points)]
    assert report.main([]) == 0
    assert [(r["status"], r["algo"]) for r in rows_of(tmp_path / "results")] == [("broken", "mdpo_onpolicy")]
    file.write_bytes(b"nothing of the kind")
    assert report.main([]) == 0
    (row,) = rows_of(tmp_path / "results")
    assert [row[key] for key in ("status", "reason", "algo", "final_return")] == [
        "broken", "W&B cannot read its log", "mdpo_onpolicy", ""
    ]  # args.json tells what it was  # fmt: skip
    assert "0 averaged, 1 listed" in capsys.readouterr().out


def test_the_plain_command_stands_in_for_wandb_core(finished_run, monkeypatch, tmp_path):
    (file,) = finished_run("mdpo_onpolicy").glob("runs/r/wandb/offline-run-*/*.wandb")
    direct = report.read_segment(file)
    popen, calls = report.subprocess.Popen, []

    def without_core(command, **settings):
        calls.append(command)
        if "wandb-core" in command[0]:
            raise FileNotFoundError(command[0])
        return popen(command, **settings)

    monkeypatch.setattr(report.subprocess, "Popen", without_core)
    assert report.read_segment(file) == direct and direct[2] and direct[3]
    assert [command[0] == sys.executable for command in calls] == [False, True]


def test_a_second_call_reads_only_what_changed(copied_run, tmp_path, monkeypatch):
    run, read, calls = copied_run("mdpo_onpolicy"), report.read_segment, []
    monkeypatch.setattr(report, "read_segment", lambda file: calls.append(file) or read(file))
    results = []
    for change in (None, None, lambda: (run / "finished").unlink(), lambda: os.utime(calls[0]), None):
        if change:
            change()
        assert report.main([]) == 0
        results.append((len(calls), rows_of(tmp_path / "results")[0]["status"]))
    assert results == [(1, "finished"), (1, "finished"), (2, "unfinished"), (3, "unfinished"), (3, "unfinished")]
    assert report.main(["--no-cache"]) == 0 and len(calls) == 4
    (kept,) = (tmp_path / "runs/.report-cache").iterdir()
    kept.write_text(kept.read_text()[:100])  # half of it
    assert report.main([]) == 0 and len(calls) == 5
    kept.write_text(json.dumps(json.loads(kept.read_text()) | dict(key=["of another report.py"])))
    assert report.main([]) == 0 and len(calls) == 6


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_return_that_is_not_finite_breaks_a_run(value, copied_run, tmp_path, monkeypatch):
    """`leet inspect` prints such as a string."""
    copied_run("mdpo_onpolicy")
    read = report.read_segment

    def spoilt(file):
        started, config, points, readable = read(file)
        last = max(i for i, point in enumerate(points) if point[1] is not None)
        points[last] = (points[last][0], value, points[last][2])
        return started, config, [(step, total, speed and "NaN") for step, total, speed in points], readable

    monkeypatch.setattr(report, "read_segment", spoilt)
    for flags in ((), (), ("--from-results",)):  # read, from the cache, from the results
        assert report.main([*flags]) == 0
        (row,) = rows_of(tmp_path / "results")
        assert (row["status"], row["reason"]) == ("broken", "a return is not finite")


def test_an_error_in_reading_a_run_is_that_runs(copied_run, tmp_path, monkeypatch):
    run, read, variant = copied_run("mdpo_onpolicy"), report.read_segment, report.variant
    shutil.copytree(run, run.parent / "odd", symlinks=True)
    shutil.copytree(run, run.parent / "zz", symlinks=True)
    monkeypatch.setattr(report, "read_segment", lambda file: {}["_step"] if "odd" in file.parts else read(file))
    flags = iter([{}, dict(exp_name="mdpo_tsallis")])  # the last, zz, without a flag of its script's
    monkeypatch.setattr(report, "variant", lambda config: variant(config | next(flags)))
    assert report.main([]) == 0
    told = {row["run"]: (row["status"], row["reason"]) for row in rows_of(tmp_path / "results")}
    assert told == dict(odd=("broken", "KeyError('_step')"), r=("finished", ""), zz=("broken", "KeyError('tsallis_q')"))
    assert line((tmp_path / "results/table.md").read_text(), "odd")[1] == "broken: KeyError('_step')"


def test_a_run_without_a_log_says_so(copied_run, tmp_path):
    shutil.rmtree(copied_run("mdpo_onpolicy") / "wandb")
    assert report.main([]) == 0
    (row,) = rows_of(tmp_path / "results")
    assert (row["status"], row["reason"]) == ("broken", "it has no log (--wandb-mode disabled?)")


def test_what_cannot_be_read_now_is_not_kept(copied_run, tmp_path, monkeypatch):
    copied_run("mdpo_onpolicy")
    with monkeypatch.context() as patch:
        patch.setattr(report, "read_segment", lambda file: ("", {}, [], False))
        assert report.main([]) == 0
    assert rows_of(tmp_path / "results")[0]["status"] == "broken"
    assert report.main([]) == 0
    assert rows_of(tmp_path / "results")[0]["status"] == "finished"


def test_from_results_gives_the_same_bytes(copied_run, tmp_path):
    run = copied_run("mdpo_onpolicy")
    shutil.copytree(run, run.parent / "unfinished", ignore=shutil.ignore_patterns("finished"))
    (run.parent / "empty").mkdir()
    (run.parent / "empty/args.json").write_text("{}")
    assert report.main([]) == 0
    before = contents(tmp_path / "results")
    assert set(before) == {
        "runs.csv", "table.md", "curves.csv.gz", "curves_on-policy_loaded-gae.png"
    } and [r["status"] for r in rows_of(tmp_path / "results")] == ["broken", "finished", "unfinished"]  # fmt: skip
    assert report.main(["--from-results"]) == 0
    assert contents(tmp_path / "results") == before
    assert report.main(["--no-cache"]) == 0
    assert contents(tmp_path / "results") == before


def test_keep_adds_runs_to_those_of_an_earlier_report(copied_run, tmp_path):
    run = copied_run("mdpo_onpolicy")
    assert report.main([]) == 0
    (read,) = rows_of(tmp_path / "results")
    gone = row("ppo", run="gone")
    stale = row("mdpo_onpolicy", run="r", variant=read["variant"], score=-1.0)  # the run that is read, earlier
    other = row("mdpo_onpolicy", run="r", variant="anneal_lr=True", score=7.0)  # of its name, with other flags
    broken = row(algo="", run="odd", preset="", variant="", status="broken", reason="why", seed="", score="", steps="")
    out = tmp_path / "results"
    out.mkdir(exist_ok=True)
    kept = [gone, stale, other | dict(run="r#2"), broken]
    report.write_results(out, kept, {r["run"]: [] if r is broken else [(1, r["final_return"], 3)] for r in kept})
    for _ in range(2):  # once more changes nothing
        assert report.main(["--keep"]) == 0
        found = {r["run"]: r for r in rows_of(out)}
        assert set(found) == {"r", "r#2", "gone", "odd"} and found["r"] == read
        assert found["r#2"]["variant"] == "anneal_lr=True" and float(found["r#2"]["final_return"]) == 7
        assert report.read_results(out, "")[1].items() >= {"gone": [(1, 100.0, 3)], "r#2": [(1, 7.0, 3)]}.items()
    shutil.rmtree(run / "wandb")
    assert report.main(["--keep"]) == 0  # a run that cannot be read any more is listed, and its earlier result stays
    same = [r for r in rows_of(out) if r["variant"] == read["variant"] and r["run"].startswith("r")]
    assert sorted(r["status"] for r in same) == ["broken", "finished"]
    assert {r["final_return"] for r in same if r["status"] == "finished"} == {read["final_return"]}
    shutil.copytree(run, run.parent / "new")
    shutil.rmtree(run)
    assert report.main(["--keep"]) == 0  # and so does that of a run whose folder is gone
    assert read["final_return"] in {r["final_return"] for r in rows_of(out) if r["status"] == "finished"}


# ----------------------------------------------------------------------------------------------------- variants


def test_a_variant_is_what_the_script_would_not_do_by_itself():
    def named(script, *flags):
        flags = ("--env-id", "Hopper-v4", *flags)
        return report.variant(vars(script.parse_args([*flags])) | dict(git_commit="1", versions={}))

    assert named(mdpo, "--seed", "3", "--total-timesteps", "4096", "--run-name", "x", "--no-cuda", "--compile") == ""
    assert named(mdpo, "--preset", "minimal", "--wandb-group", "g", "--checkpoint-interval", "7") == ""
    assert named(mdpo, "--anneal-lr") == "anneal_lr=True"
    assert named(ppo, "--no-anneal-lr") == "anneal_lr=False"
    assert named(mdpo, "--preset", "minimal", "--anneal-lr", "--sgd-steps", "10") == "anneal_lr=True sgd_steps=10"
    assert named(mdpo_tsallis, "--preset", "minimal") == ""
    assert named(mdpo_tsallis, "--tsallis-q", "1.5") == "tsallis_q=1.5"  # and entropy_q, which follows it
    assert named(mdpo_tsallis, "--tsallis-q", "2", "--entropy-q", "1") == "tsallis_q=2 entropy_q=1"
    assert named(mdpo_tsallis, "--env-id", "Walker2d-v4", "--log-q", "per-dimension") == "log_q=per-dimension"


def test_a_task_that_is_not_installed_is_compared_with_the_preset(capsys):
    config = dict(exp_name="mdpo_tsallis", preset="minimal", env_id="NotHere-v0", tsallis_q=1.5, entropy_q=1.5)
    config |= dict(hidden_size=64, batch_size=64, tau=0.01)
    assert report.variant(config) == "tau=0.01 tsallis_q=1.5"
    assert "does not take NotHere-v0" in capsys.readouterr().err


def test_asking_for_defaults_is_silent_down_to_the_file_descriptor(capfd, monkeypatch):
    def noisy(argv):
        os.write(2, b"C-level warning")
        raise SystemExit(2)

    monkeypatch.setattr(ppo, "parse_args", noisy)
    assert report.defaults("ppo", "minimal", "Noisy-v0")
    os.write(2, b"heard again")
    error = capfd.readouterr().err
    assert "C-level" not in error and "does not take Noisy-v0" in error and error.endswith("heard again")


# ----------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 11])
def test_mean_interval_and_interquartile_mean_against_scipy(n):
    x = np.random.default_rng(n).normal(2000, 500, n)
    assert report.half_width(x) == pytest.approx(1.96 * scipy.stats.sem(x))
    assert report.iqm(x) == pytest.approx(scipy.stats.trim_mean(x, 0.25))
    assert report.iqm(np.stack([x, 2 * x])) == pytest.approx([report.iqm(x), 2 * report.iqm(x)])


def test_the_bootstrap_interval_against_scipy():
    x = np.random.default_rng(0).normal(2000, 500, 10)
    options = dict(method="percentile", n_resamples=20_000, rng=np.random.default_rng(1))
    theirs = scipy.stats.bootstrap((x,), lambda x, axis: scipy.stats.trim_mean(x, 0.25, axis=axis), **options)
    assert report.bootstrap([x]) == pytest.approx(theirs.confidence_interval, rel=0.01)
    assert (report.bootstrap([x]) == report.bootstrap([x])).all()


def test_the_bootstrap_is_stratified_by_task():
    """Tasks with no spread of their own have none together; drawn from one pot, they would."""
    assert report.bootstrap([np.full(4, 1.0), np.full(4, 2.0)]) == pytest.approx([1.5, 1.5])


# ------------------------------------------------------------------------------------------------------ the table


def test_known_numbers_give_known_cells_beside_the_papers(tmp_path):
    hopper, walker = [1000.0, 1100.0, 1200.0, 1300.0, 5000.0], [2000.0, 2100.0, 2200.0, 2300.0, 2400.0]
    rows = [row(seed=i + 1, score=x) for i, x in enumerate(hopper)]
    rows += [row(env_id="Walker2d-v4", seed=i + 1, score=x) for i, x in enumerate(walker)]
    rows += [row("trpo", seed=1, score=500.0), row("trpo", "Walker2d-v4", seed=1, score=600.0)]
    table = make(tmp_path, rows)
    half = 1.96 * scipy.stats.sem(hopper)
    assert line(table, "task")[1:3] == ["mdpo_onpolicy", "paper, 10M steps, n = 5"]
    assert line(table, "Hopper-v4, 1M steps")[1:] == [
        "—", "2361 ± 518", "500 (n = 1)", "1979 ± 672", f"1920 ± {half:.0f} (n = 5)", "2051 ± 241",
    ]  # fmt: skip
    low, high = report.bootstrap([np.array(hopper)])
    ours = line(table.split("Interquartile")[1], "Hopper-v4, 1M steps")[1:]
    assert ours == ["—", "500", f"1200 [{low:.0f}, {high:.0f}]"]
    together = line(table, "**2 tasks together**, 1 = the paper's mdpo_onpolicy (Hopper-v4, Walker2d-v4)")
    low, high = report.bootstrap([np.array(hopper) / 2361, np.array(walker) / 4834])
    expected = scipy.stats.trim_mean([*np.array(hopper) / 2361, *np.array(walker) / 4834], 0.25)
    assert together[1:] == ["—", f"{np.mean([500 / 2361, 600 / 4834]):.2f}", f"{expected:.2f} [{low:.2f}, {high:.2f}]"]
    assert "mdpo_onpolicy: no finished run;" in table and "trpo on Hopper-v4 has 1 of 5 seeds;" in table
    assert "no finished run on the paper's HalfCheetah, Ant, Humanoid, HumanoidStandup" in table
    assert "no table of: on-policy minimal (no finished run), off-policy loaded (no finished run), off-policy" in table
    assert "seeds 1, 2, 3, 4, 5" in table and "commit c0ffee with torch=2.13.0" in table


def test_every_commit_of_a_resumed_run_is_named_once(tmp_path):
    commits = ["beef c0ffee", "c0ffee", ""]
    table = make(tmp_path, [row(seed=seed, commit=commit) for seed, commit in enumerate(commits, start=1)])
    assert "Made at commit beef, c0ffee, unknown with" in table


def test_tsallis_stands_beside_the_papers_best_q_and_another_task_beside_a_dash(tmp_path):
    table = make(tmp_path, [row("mdpo_tsallis", "Walker2d-v4"), row("sac", "Swimmer-v4")])
    assert line(table, "Walker2d-v4, 1M steps")[3:5] == ["100 (n = 1)", "1151 ± 218, q = 1.8"]
    assert line(table, "Swimmer-v4, 1M steps")[5:] == ["100 (n = 1)", "—"]


def default_off_policy_grid() -> list[dict]:
    """As benchmark.sh makes it: 3M steps on Ant and Humanoid, 1M elsewhere."""
    steps = {task: 3_000_000 if task in ("Ant", "Humanoid") else 1_000_000 for task in report.TASKS}
    cells = [(algo, task, seed) for algo in report.FAMILIES["off-policy"] for task in steps for seed in range(1, 6)]
    return [row(algo, f"{task}-v4", seed, preset="loaded", steps=steps[task]) for algo, task, seed in cells]


def test_a_table_has_the_tasks_of_benchmark_shs_grid_at_their_lengths(tmp_path):
    rows = default_off_policy_grid()
    other = row("sac", "Ant-v4", seed=1, score=9e6, preset="loaded", steps=1_000_000)
    table = make(tmp_path, [*rows, other])
    assert line(table, "task") == ["task", *(x for a in report.FAMILIES["off-policy"] for x in (a, "paper, n = 5"))]
    for task in report.TASKS:
        length = "3M" if task in ("Ant", "Humanoid") else "1M"
        assert line(table, f"{task}-v4, {length} steps")[1::2] == ["100 ± 0 (n = 5)"] * 3
        assert line(table.split("Interquartile")[1], f"{task}-v4, {length} steps")[1:] == ["100 [100, 100]"] * 3
    assert "Nothing is missing." in table and "**6 tasks together**" in table
    assert line(table, other["run"])[1] == "1M steps, not 3M" and table.count("steps, not") == 1
    cells, lengths, _ = report.select(rows, None)
    curves = {r["run"]: [(5000, 0.0, 1)] for r in rows}
    (figure,) = report.figures(tmp_path, cells, lengths, curves).values()
    assert {axis.get_title() for axis in figure.axes} >= {"Ant-v4, 3M steps, n = 5", "Hopper-v4, 1M steps, n = 5"}
    variants = make(tmp_path, [*rows, rows[-1] | dict(variant="tau=0.1", run="x", env_id="Ant-v4", steps=3_000_000)])
    assert line(variants.split("## Variants")[1], "sac", "loaded", "Ant-v4", "tau=0.1")[4] == "3M"


def test_runs_of_other_lengths_are_not_called_missing(tmp_path):
    rows = default_off_policy_grid()
    table = make(tmp_path, rows, "--steps", 1_000_000)
    assert "Ant-v4: 15 finished runs of other lengths, see below; Humanoid-v4: 15 finished runs" in table
    assert "no finished run on" not in table and "Ant-v4, " not in table
    table = make(tmp_path, rows, "--steps", 7)
    assert "off-policy loaded (90 finished runs of other lengths, see below), off-policy minimal (no" in table
    rows = [row(seed=1), row(seed=2), row("trpo", steps=512), row(env_id="Ant-v4", steps=512)]
    table = make(tmp_path, [*rows, row("trpo", "Ant-v4", steps=512), row(env_id="Ant-v4", seed=2)])
    assert "ppo on Ant-v4 has 0 of 2 seeds" not in table and "trpo on Hopper-v4 has 0 of 2 seeds (1 finished" in table
    table = make(tmp_path, [*rows, row("trpo", "Ant-v4", steps=512)], "--steps", 1_000_000)
    assert "trpo: 2 finished runs of other lengths, see below; Ant-v4: 2 finished runs of other" in table


def test_the_row_of_all_tasks_has_only_defaults_and_who_has_all_of_them(tmp_path):
    rows = [row("mdpo_onpolicy", env, seed) for env in ("Hopper-v4", "Walker2d-v4", "Ant-v4") for seed in (1, 2)]
    rows += [row("trpo", env) for env in ("Hopper-v4", "Walker2d-v4")]
    rows += [row("trpo", "Ant-v4", variant="sgd_steps=9"), row("ppo", "Hopper-v4")]
    rows += [row("mdpo_onpolicy", "Swimmer-v4")]  # the paper has no score to divide by
    named = "1 = the paper's mdpo_onpolicy (Hopper-v4, Walker2d-v4, Ant-v4)"
    together = line(make(tmp_path, rows), f"**3 tasks together**, {named}")
    mean = scipy.stats.trim_mean([100 / x for x in (2361, 2361, 4834, 4834, 5211, 5211)], 0.25)
    assert together[1:] == [f"{mean:.2f} [{mean:.2f}, {mean:.2f}]", "—", "—"]
    rows = [row("mdpo_onpolicy", env) for env in ("Hopper-v4", "Walker2d-v4")]
    rows += [row(algo, env) for algo in ("ppo", "trpo") for env in ("Hopper-v4", "Ant-v4")]
    together = line(make(tmp_path, rows), f"**2 tasks together**, {named.replace('Walker2d-v4, ', '')}")
    assert together[1] == "—" != together[2] == together[3]  # of two such sets, the one that more have
    assert "together**" not in make(tmp_path, rows[:1])


def test_a_score_over_much_of_a_run_is_pointed_out(tmp_path):
    rows = [row(episodes=500), row(env_id="Ant-v4", episodes=499), row(env_id="HalfCheetah-v4", episodes=100)]
    assert "\nOn HalfCheetah-v4, Ant-v4 the last 100 episodes are more than a fifth of a run" in make(tmp_path, rows)
    assert "more than a fifth" not in make(tmp_path, rows[:1])


def test_numbers_are_rounded_alike(tmp_path):
    assert [report.short(n) for n in (512, 1000, 204_800, 3_000_000)] == ["512", "1k", "204.8k", "3M"]
    table = make(tmp_path, [row(score=-40.26), row("trpo", score=99.96), row("mdpo_onpolicy", score=12345.67)])
    assert line(table, "Hopper-v4, 1M steps")[1::2] == ["12346 (n = 1)", "100.0 (n = 1)", "-40.3 (n = 1)"]
    assert line(table.split("Interquartile")[1], "Hopper-v4, 1M steps")[1:] == ["12346", "100.0", "-40.3"]
    listed = [row(seed=i, score=x, status="unfinished") for i, x in enumerate((0.0, 1234.567, 12.34, None))]
    table = make(tmp_path, [row(seed=9), *listed[:3]])
    assert [line(table, r["run"])[2] for r in listed[:3]] == ["0.0", "1235", "12.3"]
    cells, lengths, left_out = report.select([row(seed=9), *listed], None)
    assert [line(report.report(cells, lengths, left_out), r["run"])[2] for r in listed] == ["0.0", "1235", "12.3", "—"]
    assert "with fewer than 4 seeds plain means" in table


def test_every_figure_of_the_paper_is_there():
    assert sum(len(tasks) * 3 for tasks in report.PAPER.values()) == 72
    best = {p: {t: s[1][2] for t, s in report.PAPER["off-policy", p].items()} for p in ("minimal", "loaded")}
    assert best == mdpo_tsallis.TSALLIS_Q
    for preset in ("minimal", "loaded"):  # at q = 1 Tsallis is the KL
        kl = [(t, s) for t, s in report.PAPER["off-policy", preset].items() if s[1][2] == 1]
        assert kl and all(s[0] == s[1][:2] for _, s in kl)


def test_what_differs_is_listed_and_not_averaged_in(tmp_path):
    others = [
        row(seed=3, score=9e6, status="unfinished", reason="its log ends at step 12"),
        row(seed=4, score=9e6, status="broken", reason="points are missing after step 7"),
        row(seed=5, score=9e6, steps=200_000),
        row(seed=1, score=9e6, started="2025-01-01T00:00:00"),
        row(seed=2, score=9e6, started="2027-01-01T00:00:00", status="unfinished", reason="its log ends at step 5"),
    ]
    table = make(tmp_path, [row(seed=1), row(seed=2, score=300.0), *others])
    assert line(table, "Hopper-v4, 1M steps")[5] == "200 ± 196 (n = 2)"
    reasons = [line(table, other["run"])[1] for other in others]
    assert reasons[0] == "unfinished: its log ends at step 12" and reasons[1].startswith("broken: points")
    assert reasons[2] == "200k steps, not 1M"
    assert reasons[3] == f"another run of the same seed as {row(seed=1)['run']}" and "unfinished" in reasons[4]
    forced = make(tmp_path, [row(), *others], "--steps", 200_000)
    assert line(forced, "Hopper-v4, 200k steps")[5] == "9000000 (n = 1)"


def test_variants_have_rows_of_their_own(tmp_path):
    rows = [row("mdpo_onpolicy", seed=i, score=100.0 * i) for i in (1, 2)]
    rows += [row("mdpo_onpolicy", seed=i, score=1000.0 * i, variant="anneal_lr=False") for i in (1, 2, 3)]
    rows += [row("mdpo_tsallis", seed=i, score=50.0, variant="tsallis_q=1.5") for i in (1, 2)]
    rows += [row("mdpo_tsallis", seed=1, score=70.0, variant="tsallis_q=1.2")]
    table = make(tmp_path, rows)
    assert line(table, "Hopper-v4, 1M steps")[1] == "150 ± 98 (n = 2)"
    assert (
        "50.0 ± 0.0 (n = 2), tsallis_q=1.5 | 1385 ± 648, q = 1" in table
    )  # no run of the default: the fullest variant
    named = table.split("## Variants")[1]
    assert line(named, "mdpo_onpolicy", "loaded-gae", "Hopper-v4", "(default)")[5] == "150 ± 98 (n = 2)"
    assert line(named, "mdpo_onpolicy", "loaded-gae", "Hopper-v4", "anneal_lr=False")[5].startswith(
        "2000 ± 1132 (n = 3)"
    )
    assert line(named, "mdpo_tsallis", "minimal", "Hopper-v4", "tsallis_q=1.2")[5] == "70.0 (n = 1)"
    assert (tmp_path / "variants_on-policy_loaded-gae.png").read_bytes().startswith(PNG)


# ----------------------------------------------------------------------------------------------------- the figures


def test_a_figure_has_a_panel_a_task_and_a_line_an_algorithm(tmp_path):
    rows = [row(algo, env, seed) for algo in ("ppo", "trpo") for env in ("Hopper-v4", "Ant-v4") for seed in (1, 2)]
    rows += [row(env_id="Walker2d-v4"), row("sac"), row("mdpo_tsallis", variant="tsallis_q=1.5")]
    make(tmp_path, rows)
    curves = {r["run"]: [(5000, 0.0, 1), (995_000, float(r["seed"]), 1)] for r in rows}
    drawn = report.figures(tmp_path, *report.select(rows, None)[:2], curves)
    assert set(drawn) == {"curves_on-policy_loaded-gae.png", "curves_off-policy_minimal.png"}
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in drawn)
    panels = drawn["curves_on-policy_loaded-gae.png"].axes
    assert [axis.get_title() for axis in panels] == [
        "Hopper-v4, 1M steps, n = 2", "Walker2d-v4, 1M steps, n = 1", "Ant-v4, 1M steps, n = 2"
    ]  # fmt: skip
    assert [[x.get_label() for x in axis.get_lines()] for axis in panels] == [["trpo", "ppo"], ["ppo"], ["trpo", "ppo"]]
    assert len({(x.get_color(), x.get_linestyle()) for axis in panels for x in axis.get_lines()}) == 2
    assert panels[0].get_lines()[0].get_ydata()[-1] == 1.5 and panels[0].get_lines()[0].get_xdata()[-1] == 0.995
    shade = panels[0].collections[0].get_paths()[0].vertices[:, 1]
    assert shade.max() == pytest.approx(1.5 + 1.96 * scipy.stats.sem([1, 2]))
    (panel,) = drawn["curves_off-policy_minimal.png"].axes
    assert "mdpo_tsallis: tsallis_q=1.5" in panel.get_title()


def test_a_title_tells_whose_seeds_are_how_many(tmp_path):
    rows = [row("trpo", seed=1), row("trpo", seed=2), row(), row(variant="a=1"), row(variant="a=1", seed=2)]
    make(tmp_path, rows)
    curves = {r["run"]: [(5000, 0.0, 1)] for r in rows}
    drawn = report.figures(tmp_path, *report.select(rows, None)[:2], curves)
    titles = [[axis.get_title().replace("\u00a0", " ") for axis in figure.axes] for figure in drawn.values()]
    assert titles == [
        ["Hopper-v4, 1M steps\ntrpo n = 2, ppo n = 1"],
        ["ppo\nHopper-v4, 1M steps\ndefault n = 1, a=1 n = 2"],
    ]


def test_ten_variants_look_different(tmp_path):
    rows = [row(variant=f"sgd_steps={i}") for i in range(10, 20)]
    curves = {r["run"]: [(5000, 0.0, 1)] for r in rows}
    drawn = report.figures(tmp_path, *report.select(rows, None)[:2], curves)
    (panel,) = drawn["variants_on-policy_loaded-gae.png"].axes
    assert len({(x.get_color(), x.get_linestyle()) for x in panel.get_lines()}) == 10
    assert len(set(report.LOOKS)) == len(report.LOOKS) == 35


def test_figures_of_an_earlier_call_do_not_stay(tmp_path):
    for name in ("curves_off-policy_old.png", "variants_off-policy_old.png", "mine.png", "curves_mine.svg"):
        (tmp_path / name).touch()
    make(tmp_path, [row()])
    found = {path.name for path in tmp_path.iterdir()} - {"runs.csv", "table.md", "curves.csv.gz"}
    assert found == {"mine.png", "curves_mine.svg", "curves_on-policy_loaded-gae.png"}


def test_a_band_interpolates_where_no_episode_ended():
    steps, mean, half = report.band([[(10, 0.0, 1), (30, 2.0, 1)], [(20, 3.0, 1), (30, 4.0, 1)]])
    assert steps.tolist() == [20, 30] and mean.tolist() == [2, 3]
    assert half == pytest.approx([1.96 * scipy.stats.sem([1, 3]), 1.96 * scipy.stats.sem([2, 4])])


# ---------------------------------------------------------------------------------------------- online, and refusals


class OnlineRun(SimpleNamespace):
    """As much of wandb.apis.public.Run as report.py uses."""

    def scan_history(self, keys: list[str], page_size: int = 1000, min_step: int = 0, max_step=None, use_cache=True):
        return iter([{key: point[key] for key in keys} for point in self.points if set(keys) <= set(point)])


def test_online_runs_give_what_offline_ones_do(copied_run, tmp_path, monkeypatch):
    run = copied_run("mdpo_onpolicy")
    assert report.main(["--out", "offline"]) == 0
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    started, config, *_ = report.read_segment(file)
    shared = dict(name="r", created_at=started, config=config | dict(_wandb={}), points=history(run))
    online = [OnlineRun(state="finished", **shared), OnlineRun(state="crashed", **shared)]
    foreign = dict(exp_name="ppo", env_id="Hopper-v4", seed=1, total_timesteps=512)  # somebody's, without a preset
    online.append(OnlineRun(state="finished", **shared | dict(name="other", config=foreign)))
    online.append(OnlineRun(state="finished", **shared | dict(name="odd", points=None)))
    asked = []
    api = SimpleNamespace(runs=lambda path, lazy: asked.append(path) or online)
    monkeypatch.setattr(wandb, "Api", lambda: api)
    assert report.main(["--wandb", "someone/mdpo", "--out", "online"]) == 0 and asked == ["someone/mdpo"]
    offline_row, (odd, online_row, crashed, foreign) = rows_of(Path("offline"))[0], rows_of(Path("online"))
    assert (odd["run"], odd["status"]) == ("odd", "broken") and "TypeError" in odd["reason"]
    assert online_row == offline_row and offline_row["status"] == "finished"
    assert (crashed["run"], crashed["status"]) == ("r#2", "unfinished") and foreign["status"] == "broken"
    assert curve_of(Path("online"))[: len(curve_of(Path("offline")))] == curve_of(Path("offline")) != []


class NoProject:
    def runs(self, path, lazy):
        raise ValueError("Could not find project nothing")


def no_account():
    raise wandb.errors.UsageError("No API key configured.")


@pytest.mark.parametrize(
    ("flags", "api", "sentence"),
    [
        (("--runs", "nowhere"), None, "there is no folder nowhere"),
        (("--runs", "."), None, "no runs in ."),
        (("--from-results",), None, "--from-results needs runs.csv and curves.csv.gz in results"),
        (("--keep",), None, "--keep needs runs.csv and curves.csv.gz in results"),
        (("--from-results", "--out", "half"), None, "half/curves.csv.gz has no curve of Hopper-v4__ppo"),
        (("--from-results", "--out", "file"), None, "needs runs.csv and curves.csv.gz in file"),
        (("--wandb", "a/nothing"), NoProject, "Could not find project nothing"),
        (("--wandb", "a/b"), no_account, "No API key"),
        (("--wandb", "a/b"), lambda: SimpleNamespace(runs=lambda path, lazy: []), "project a/b has no runs"),
    ],
)
def test_a_refusal_is_a_sentence_and_status_2(flags, api, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "half").mkdir()
    report.write_results(tmp_path / "half", [row()], {row()["run"]: []})
    if api:
        monkeypatch.setattr(wandb, "Api", api)
    with pytest.raises(SystemExit) as end:
        report.main([*flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and sentence in error and "Traceback" not in error
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_written_is_refused_and_what_was_there_stays(copied_run, tmp_path, monkeypatch, capsys):
    copied_run("mdpo_onpolicy")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        report.main(["--out", "file"])
    assert end.value.code == 2 and "--out file cannot be written to: File exists." in capsys.readouterr().err
    assert report.main([]) == 0
    before = contents(tmp_path / "results")

    def torn(path, content):
        with open(path, "wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(SystemExit) as end:
        report.main([])
    assert end.value.code == 2 and "cannot be written to: No space left" in capsys.readouterr().err
    assert contents(tmp_path / "results").items() >= before.items()


def test_without_matplotlib_the_table_is_written_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as end:
        make(tmp_path, [row()])
    assert end.value.code == 2 and "pip install '.[report]'" in capsys.readouterr().err
    assert line((tmp_path / "table.md").read_text(), "Hopper-v4, 1M steps")[5] == "100 (n = 1)"
    assert not list(tmp_path.glob("*.png"))


def test_help_shows_examples_and_a_sentence_a_flag(capsys):
    with pytest.raises(SystemExit) as end:
        report.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "python report.py --wandb ENTITY/PROJECT" in text
    assert (ROOT / "report.py").exists() and "folder to write to" in text and "most common" in text
