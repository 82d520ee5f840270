"""Turn runs into tables and learning curves, beside the paper's figures.

    python report.py                                     # runs/ -> results/
    python report.py runs cluster/runs                   # runs of several machines
    python report.py --wandb ENTITY/PROJECT              # runs of a W&B project
    python report.py --wandb ENTITY/PROJECT --publish    # a live W&B report in that project; reads no runs

It writes results/table.md, runs.csv (one row per run), curves.csv.gz (each run's returns in 50 bins of steps) and
figures. Runs are added to those in results/, whose folders may be gone. A finished run in results/ is not read again.

A score is the mean return of a run's last 100 training episodes. Tables average finished runs made with today's
defaults of their script. Other runs are variants, named after the flags that differ, with a table of their own. A flag
added since then counts as equal, a removed one as different.
"""

import csv
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

try:
    import numpy as np
    import pandas as pd
    import tyro
    import wandb
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from scipy.stats import bootstrap, sem, trim_mean
    from tqdm import tqdm
    from tqdm.contrib.concurrent import thread_map
except ModuleNotFoundError as error:
    sys.exit(print(f"error: {error.name} is missing: pip install -c constraints.txt '.[report]'", file=sys.stderr) or 2)

FAMILIES = {"on-policy": ("mdpo_onpolicy", "trpo", "ppo"), "off-policy": ("mdpo_offpolicy", "mdpo_tsallis", "sac")}
FAMILY = {algo: family for family, algos in FAMILIES.items() for algo in algos}
GROUPS = ("on-policy loaded-gae", "on-policy loaded", "on-policy minimal", "off-policy loaded", "off-policy minimal")
# The paper's mean ± 95 % interval on v2 tasks, Tsallis at its best q, and CleanRL's on v4 tasks, SAC with 256 units.
published = pd.read_csv(Path(__file__).parent / "tools/published.csv").set_index(["source", "group", "task", "algo"])
PUBLISHED = (published.score + " (" + published.runs + ")").to_dict()
PAPER = published.score["paper"].to_dict()
TASKS = tuple(dict.fromkeys(task for _, task, _ in PAPER))
SEEDS = 5  # the paper's
# Flags that do not affect training, or have a column of their own.
BOOKKEEPING = """exp_name env_id seed total_timesteps preset cuda compile run_name runs_dir checkpoint_interval resume
    evaluate eval_episodes capture_video wandb_mode wandb_project wandb_entity wandb_group _wandb"""
COLUMNS = """algo preset variant env_id steps seed final_return episodes sps status reason compile commit versions
    started run id flags"""
CELL = ["algo", "preset", "env_id", "steps", "variant"]
CURVE = {"step": int, "return": float, "episodes": int}
PACKAGES = ("gymnasium", "mujoco", "numpy", "torch", "wandb")
KEYS = ("charts/episodic_return", "charts/SPS")
BINS = 50
# Okabe and Ito's colors, which the color-blind can tell apart, and line styles for black and white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
LOOK = {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9}
rcParams.update(LOOK | {"text.parse_math": False})  # a $ in the name of a task is a $


@dataclass
class Args:
    runs_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()  # folders that hold runs; default: runs
    wandb: str = ""  # ENTITY/PROJECT: read the runs of this W&B project instead
    publish: bool = False  # make or update a live report in the --wandb project, and do nothing else
    out: Path = Path("results")  # folder to add to


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, description=__doc__)
    if (args.wandb or args.publish) and not re.fullmatch("[^/]+/[^/]+", args.wandb):
        fail(f"--wandb takes ENTITY/PROJECT, not {args.wandb!r}" + ", and --publish needs it" * args.publish)
    if args.wandb and args.runs_dirs:
        fail("give folders or --wandb, not both")
    if args.publish:
        try:
            print(publish(*args.wandb.split("/"), args.out / "table.md"))
        except Exception as error:  # no login, no project, no network, no wandb-workspaces: these raise many kinds
            fail(f"W&B cannot publish in {args.wandb}: {printable(error)}")
        return 0
    old = read_results(args.out)
    known = {(row["id"], row["steps"]) for row in old if row["status"] == "finished" and len(row["curve"])}
    rows = old + read_runs(args, known)
    if not rows:
        fail(f"there are no runs, and none in {args.out}. ./benchmark.sh, or any of the six scripts, makes some")
    runs = select(rows)
    used = runs[runs.left_out == ""]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_results(args.out, runs)
        write(args.out / "table.md", tables(runs).encode())
        for path in (*args.out.glob("curves_*.png"), *args.out.glob("variants_*.png")):
            path.unlink()
        for name, figure in figures(used).items():
            figure.savefig(args.out / name, dpi=150)
    except OSError as error:
        fail(f"cannot write to {args.out}: {error.strerror or error}")
    print(f"{args.out / 'table.md'}: {len(used)} of {len(runs)} runs are in the tables")
    return 0


def fail(message: str) -> NoReturn:
    sys.exit(print(f"error: {message}", file=sys.stderr) or 2)


def wandb_api() -> wandb.Api:
    if not wandb.login(prompt=False, verify=False):
        raise ValueError("no login. `wandb login` makes one")
    return wandb.Api()


def printable(text: object) -> str:
    """The first line, without control characters: text of a stranger's run may go to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text).partition("\n")[0])


def write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)  # atomic: a crash leaves the old file or the new one


def read_runs(args: Args, known: set) -> list[dict]:
    """Read runs in parallel, except for known ones. A run that cannot be read is named and skipped."""

    def read(run) -> dict | None:
        try:
            return read_online(run, known) if args.wandb else read_folder(run, known)
        except Exception as error:  # a damaged or foreign run fails in many ways
            tqdm.write(f"skipped {run.name!r}: {printable(error)}", file=sys.stderr)

    if args.wandb:
        try:
            runs = list(wandb_api().runs(args.wandb, lazy=False))
        except Exception as error:  # no login, no project, no network: W&B raises many kinds
            fail(f"W&B does not list the runs of {args.wandb}: {printable(error)}")
    else:
        if missing := [folder for folder in args.runs_dirs if not folder.is_dir()]:
            fail(f"there is no folder {missing[0]}")
        found = [path for folder in args.runs_dirs or [Path("runs")] for path in sorted(folder.glob("*/"))]
        runs = [path for path in found if (path / "wandb").is_dir() or (path / "args.json").is_file()]
    rows = thread_map(read, runs, max_workers=os.cpu_count(), unit=" runs", disable=not sys.stderr.isatty())
    return [row for row in rows if row]


def read_folder(folder: Path, known: set) -> dict | None:
    """A local run."""
    paths = [path.parent for path in folder.glob("wandb/*run-*/run-*.wandb")]
    finished = int((folder / "finished").read_text()) if (folder / "finished").exists() else None
    if paths and all((path.name.split("-")[-1], finished) in known for path in paths):
        return None
    runs, points = read_log(paths)
    if not runs:
        raise ValueError("W&B cannot read its log" if paths else "it has no log (--wandb-mode disabled?)")
    last, commits = runs[-1], filter(None, (run.get("git", {}).get("commit") for run in runs))
    record = dict(id=last["run_id"], run=folder.name, started=last["start_time"], versions=last["versions"])
    return summarize(last["config"]["update"], points, finished, record | dict(commit=" ".join(dict.fromkeys(commits))))


def read_log(paths: list[Path], keys: Sequence[str] = KEYS) -> tuple[list[dict], list[tuple]]:
    """Records and points of a run's W&B folders. Each later one replaces earlier points from its first step on."""
    segments = sorted((inspect(path, keys) for path in paths), key=lambda segment: segment[0].get("start_time", ""))
    points = []
    for _, new in segments:
        points = [point for point in points if not new or point[0] < new[0][0]] + new
    return [run for run, _ in segments if run], points


def inspect(segment: Path, keys: Sequence[str]) -> tuple[dict, list[tuple]]:
    """The run record of one of W&B's folders and its points (step, value of each key), up to a torn end."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(segment)]
    quiet = dict(env=os.environ | dict(WANDB_ERROR_REPORTING="false"), stdin=subprocess.DEVNULL)
    requirements, run, points = segment / "files/requirements.txt", {}, []
    for line in subprocess.run(command, capture_output=True, **quiet).stdout.splitlines():
        if b'"type":"history"' in line[:60]:
            item = json.loads(line)["history"]["item"]
            points.append((item["_step"], *map(item.get, keys)))
        elif b'"type":"run"' in line[:60]:
            run = json.loads(line)["run"]
            run["versions"] = versions(requirements.read_text() if requirements.exists() else "")
    return run, points


def read_online(run, known: set) -> dict | None:
    """A run on W&B's server, which has merged the segments of a resumed one."""
    finished = run.config.get("total_timesteps") if run.state == "finished" else None
    if (run.id, finished) in known:
        return None
    scans = [run.scan_history(keys=["global_step", key]) for key in KEYS]  # a point is found if it has all the keys
    points = [(point["global_step"], *map(point.get, KEYS)) for scan in scans for point in scan]
    points.sort(key=lambda point: point[0])
    requirements = ""
    with tempfile.TemporaryDirectory() as folder, suppress(Exception):  # it may not be uploaded
        requirements = run.file("requirements.txt").download(root=folder).read()
    record = dict(id=run.id, run=run.name, started=run.created_at, commit=run.commit or "")
    return summarize(run.config, points, finished, record | dict(versions=versions(requirements)))


def versions(requirements: str) -> str:
    found = dict(line.split("==", 1) for line in requirements.splitlines() if "==" in line)
    return " ".join(f"{name}={found[name]}" for name in PACKAGES if name in found)


def summarize(config: dict, points: list[tuple], finished: int | None, record: dict) -> dict:
    """A row of runs.csv, with its curve."""
    if f"{FAMILY.get(config.get('exp_name'))} {config.get('preset')}" not in GROUPS:
        raise ValueError("it is not a run of one of the six scripts")
    total, seed = int(config["total_timesteps"]), int(config["seed"])
    # float: W&B has strings for NaN and infinities
    episodes = pd.DataFrame([(s, float(x)) for s, x, _ in points if x is not None], columns=["step", "return"])
    speeds = {step: float(speed) for step, _, speed in points if speed is not None}
    status, reason = judge(total, finished, points, [0, *speeds], episodes["return"])
    episodes["step"] = ((episodes.step * BINS - 1) // total + 0.5) * total / BINS  # middles of the bins
    curve = episodes.groupby("step")["return"].agg(["mean", "size"]).round(2).reset_index()
    curve = curve.set_axis(list(CURVE), axis=1).astype(CURVE)
    row = dict(algo=config["exp_name"], preset=config["preset"], env_id=str(config["env_id"]), steps=total, seed=seed)
    row |= dict(final_return=np.round(episodes["return"].to_numpy()[-100:].mean(), 2) if len(episodes) else "")
    row |= dict(episodes=len(episodes), sps=np.round(np.median([*speeds.values()]), 1) if speeds else "")
    row |= dict(status=status, reason=reason, compile=bool(config.get("compile")), curve=curve)
    row["flags"] = " ".join(f"{name}={value}" for name, value in flags(config).items())
    return row | record | dict(started=record["started"][:19])


def judge(total: int, finished: int | None, points: list, logged: list[int], returns: pd.Series) -> tuple[str, str]:
    """The status of a run, and why. Speed is logged at equal intervals, so that a longer one is a hole in the log."""
    if finished != total:
        return "unfinished", f"its log ends at step {points[-1][0] if points else 0}"
    if not len(returns) or not logged[1:]:
        return "broken", "its log has no episodes"
    if not np.isfinite(returns).all():
        return "broken", "a return is not finite"
    interval = np.median(np.diff(logged))
    holes = np.array(logged)[np.append(np.diff(logged) > 1.5 * interval, total - logged[-1] >= interval)]
    return ("broken", f"points are missing after step {holes[0]}") if len(holes) else ("finished", "")


def flags(config: dict) -> dict[str, str]:
    """The flags that affect training, as words. W&B turns 1.0 into 1."""
    kept = {name: value for name, value in sorted(config.items()) if name not in BOOKKEEPING.split()}
    return {k: f"{v:.12g}" if type(v) in (int, float) else "_".join(str(v).split()) for k, v in kept.items()}


def read_results(out: Path) -> list[dict]:
    """The rows of earlier reports, with their curves. What cannot be read is not overwritten either."""
    rows, path, empty = [], out / "runs.csv", pd.DataFrame(columns=CURVE)
    if not path.exists():
        return []
    try:
        points = pd.read_csv(out / "curves.csv.gz", dtype=dict(id=str, steps=int) | CURVE)
        curves = dict(list(points.groupby(["id", "steps"])[list(CURVE)]))
        with open(path, newline="") as file:
            table = list(csv.DictReader(file, restkey="rest", restval=""))
    except Exception as error:  # damaged files fail in many ways
        fail(f"cannot read runs.csv and curves.csv.gz in {out} ({printable(error)}). Restore both, or delete both")
    for row in table:
        if "rest" in row or not row.get("run"):
            print(f"skipped a row of {path}: {','.join(map(str, row.values()))!r}", file=sys.stderr)
            continue
        row = {name: row.get(name, "") for name in COLUMNS.split()}
        row |= {name: int(row[name]) for name in ("steps", "seed") if row[name].isdecimal()}
        rows.append(row | dict(curve=curves.get((row["id"], row["steps"]), empty)))
    return rows


def write_results(out: Path, runs: pd.DataFrame) -> None:
    write(out / "runs.csv", runs[COLUMNS.split()].to_csv(index=False).encode())
    names = ["run", "algo", "preset", "variant", "env_id", "steps", "seed", "id"]
    curves = [row["curve"].assign(**row[names])[[*names, *CURVE]] for _, row in runs.iterrows()]
    write(out / "curves.csv.gz", gzip.compress(pd.concat(curves).to_csv(index=False).encode(), mtime=0))


def select(rows: list[dict]) -> pd.DataFrame:
    """Runs in the order of the tables, each with its variant and, in `left_out`, the reason why no table has it."""
    # A run replaces its old row, unless only the old one is finished. The length is part of a run's identity.
    rows = sorted(rows, key=lambda row: row["status"] == "finished")
    runs = pd.DataFrame(list({(row["id"] or row["run"], row["steps"]): row for row in rows}.values()), dtype=object)
    runs["group"], runs["task"] = runs.algo.map(FAMILY) + " " + runs.preset, runs.env_id.str.split("-v").str[0]
    runs["variant"] = [variant(row) if row["group"] in GROUPS else "" for _, row in runs.iterrows()]
    whole = runs.group.isin(GROUPS) & runs[["steps", "seed"]].map(lambda cell: isinstance(cell, int)).all(axis=1)
    whole &= np.isfinite(pd.to_numeric(runs.final_return, errors="coerce")) & (runs.curve.map(len) > 0)
    damaged = "its row or its curve is damaged"
    runs["left_out"] = np.select([runs.status != "finished", ~whole], [runs.status + ": " + runs.reason, damaged], "")
    for name in runs.run[runs.left_out == damaged]:
        print(f"left out {name!r}: {damaged}", file=sys.stderr)
    good, order = runs.left_out == "", ["group", "task", "env_id", "steps", "algo", "variant", "seed", "started"]
    rank = {name: i for i, name in enumerate((*GROUPS, *TASKS, *FAMILY))}  # other tasks come last
    used = runs[good].sort_values(order, key=lambda x: x.map(rank) if x.name in ("group", "task", "algo") else x)
    used.loc[used.duplicated([*CELL, "seed"], keep="last"), "left_out"] = "a newer run has the same flags and seed"
    return pd.concat([used, runs[~good].sort_values(["run", "started"])], ignore_index=True)


def variant(row: dict) -> str:
    """The flags by which a run differs from what its script would do today."""
    made = dict(word.split("=", 1) for word in row["flags"].split() if "=" in word)
    usual = defaults(row["algo"], row["preset"], row["env_id"])
    if made.get("entropy_q") == made.get("tsallis_q"):  # its default
        made.pop("entropy_q", None)
    return " ".join(f"{name}={value}" for name, value in made.items() if value != usual.get(name))


@cache
def defaults(algo: str, preset: str, env_id: str) -> dict[str, str]:
    """Flags of a script for a task and preset. An id may name a module to import: only the paper's are passed on."""
    known = [f"{task}-{version}" for task in TASKS for version in ("v4", "v5")]
    argv = ["--env-id", env_id if env_id in known else "Other-v0", "--preset", preset]
    return flags(vars(importlib.import_module(algo).parse_args(argv)))


INTRO = """# Results

A score is the mean return of a run's last 100 training episodes. Ours are mean ± 1.96 · std / √n over n seeds, with
n − 1 in std, and the length of the runs; one seed has no interval. Interquartile means have 95 % bootstrap intervals
(Agarwal et al., 2021); with fewer than 4 seeds they are plain means. All runs and their flags are in
[runs.csv](runs.csv).

The paper's tasks are v2. Off-policy it does not say how long it trained, and Tsallis is at its best q. CleanRL's
scores are at 1M steps, with ± as published."""


def tables(runs: pd.DataFrame) -> str:
    """table.md"""
    used, unused, text = runs[runs.left_out == ""], runs[runs.left_out != ""], [INTRO]
    for group in GROUPS:
        usual = used[(used.group == group) & (used.variant == "")]
        text += [f"## {group.replace(' ', ', ').capitalize()}"]
        text += [markdown(table(usual).drop(columns=["preset", "variant"]))] if len(usual) else []
        text += notes(group, usual)
    if len(varied := used.groupby(CELL[:-1]).filter(lambda cell: any(cell.variant))):
        text += ["## Variants", "Runs with other flags, beside the defaults."]
        text += [markdown(table(varied).drop(columns=["paper", "CleanRL"]))]
    if len(unused):
        listed = unused[["run", "left_out", "final_return"]].map(escape)
        text += ["## Not in the tables", markdown(listed.set_axis(["run", "why", "score so far"], axis=1))]
    return "\n\n".join(text) + "\n"


def table(runs: pd.DataFrame) -> pd.DataFrame:
    columns = ["task", "preset", "algorithm", "variant", "ours", "interquartile mean", "paper", "CleanRL"]
    lines = []
    for (algo, preset, env_id, steps, name), cell in runs.groupby(CELL, sort=False):
        mean, middle = statistics(cell.final_return.to_numpy(float))
        key = cell.group.iloc[0], cell.task.iloc[0], algo
        paper = PUBLISHED.get(("paper", *key), "—")
        peer = PUBLISHED.get(("CleanRL", *key), "—") if env_id.endswith("-v4") and steps == 1_000_000 else "—"
        ours = f"{mean} (n = {len(cell)}, {short(steps)})"
        lines.append([escape(env_id), preset, algo, escape(name) or "default", ours, middle, paper, peer])
    return pd.DataFrame(lines, columns=columns)


def notes(group: str, runs: pd.DataFrame) -> list[str]:
    """What is missing, and what the runs were made with."""
    gaps = []
    for (env_id, steps), cell in runs.groupby(["env_id", "steps"], sort=False):
        counts = {algo: (cell.algo == algo).sum() for algo in FAMILIES[group.split()[0]]}
        few = [f"{algo} {n}" for algo, n in counts.items() if n < SEEDS]
        gaps += [f"{env_id}, {short(steps)}: {', '.join(few)}"] if few else []
    absent = [task for task in TASKS if task not in set(runs.task)]
    gaps += [f"no runs on {', '.join(absent)}"] if absent else []
    commits = ", ".join(sorted({commit[:7] for cell in runs.commit for commit in cell.split()})) or "unknown commits"
    made = [f"Made at {commits} with {' or '.join(sorted(set(runs.versions)))}."] if len(runs) else []
    missing = f"Incomplete (number of seeds where it is not {SEEDS}): {'; '.join(gaps)}." if gaps else "Complete."
    return [escape(text) for text in [missing, *made]]


def statistics(x: np.ndarray) -> tuple[str, str]:
    """Mean with the half-width of its 95 % interval, and interquartile mean with its bootstrap interval."""
    mean, middle = x.mean(), trim_mean(x, 0.25)
    if len(x) == 1:
        return f"{mean:.{decimals(mean)}f}", f"{middle:.{decimals(middle)}f}"
    half, iqm = 1.96 * sem(x), partial(trim_mean, proportiontocut=0.25)
    low, high = bootstrap((x,), iqm, method="percentile", random_state=0).confidence_interval
    a, b = decimals(mean, half), decimals(middle, high - low)
    return f"{mean:.{a}f} ± {half:.{a}f}", f"{middle:.{b}f} [{low:.{b}f}, {high:.{b}f}]"


def decimals(value: float, spread: float = 0.0) -> int:
    """None from 100 on, one below, or as many as show the spread."""
    return max(int(abs(value) < 100), int(np.ceil(-np.log10(spread))) if spread > 1e-3 else 0)


def short(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k" if steps >= 1000 else str(steps)


def markdown(table: pd.DataFrame) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: object) -> str:
    return re.sub(r"([\\|`<\[*])", r"\\\1", printable(text))


def figures(runs: pd.DataFrame) -> dict[str, Figure]:
    """One figure per family and preset, and one per algorithm that has variants, by file name."""
    drawn = {}
    for group, found in runs.sort_values("steps", kind="stable", ascending=False).groupby("group", sort=False):
        name, usual = group.replace(" ", "_"), found[found.variant == ""]
        algorithms, tasks = usual.groupby(["env_id", "steps"]).algo.transform("nunique"), usual.groupby("env_id")
        most = algorithms == algorithms.groupby(usual.env_id).transform("max")
        usual = usual[most | (usual.steps == tasks.steps.transform("max"))]  # lengths with most algorithms, the longest
        if len(usual):
            panels = usual.groupby(["env_id", "steps"], sort=False)
            drawn[f"curves_{name}.png"] = draw(panels, "algo", list(FAMILIES[group.split()[0]]), group)
        varied = found.groupby(CELL[:-1]).filter(lambda cell: any(cell.variant))
        for algo, cells in varied.groupby("algo", sort=False):
            panels, labels = cells.groupby(["env_id", "steps"], sort=False), sorted(set(cells.variant))
            drawn[f"variants_{name}_{algo}.png"] = draw(panels, "variant", labels, f"{group}, {algo}")
    return drawn


def draw(panels, column: str, labels: list[str], heading: str) -> Figure:
    """Mean and standard error over seeds, or each seed as a thin line where there are fewer than 3."""
    columns = 4 if len(panels) == 4 or len(panels) > 6 else min(3, len(panels))
    rows, lines = -(-len(panels) // columns), {}
    width = max(7.5, 3 * columns)  # at least that of the heading
    legend_columns = max(1, int(width / (0.5 + 0.08 * max(map(len, labels)))))  # inches of a line, a gap and the text
    height = 2.4 * rows + 0.8 + 0.2 * len(labels) / legend_columns
    figure = Figure(figsize=(width, height), layout="constrained")
    for i, ((*names, steps), panel) in enumerate(panels):
        axis = figure.add_subplot(rows, columns, i + 1)
        cells = panel.groupby(column).curve
        for label, cell in cells:
            k, curves = labels.index(label), align(list(cell))
            color, style, x = COLORS[k % len(COLORS)], STYLES[k % len(STYLES)], curves.index / 1e6
            center, error = curves.mean(axis=1), curves.sem(axis=1)
            y, width = (curves, 0.8) if len(cell) < 3 else (center, 1.6)
            lines.setdefault(label, axis.plot(x, y, color=color, linestyle=style, linewidth=width)[0])
            if len(cell) >= 3:
                axis.fill_between(x, center - error, center + error, color=color, alpha=0.2, linewidth=0)
        seeds = "–".join(map(str, sorted({cells.size().min(), cells.size().max()})))
        axis.set_title(f"{', '.join(map(printable, names))}, {short(steps)} steps, n = {seeds}")
    shown = {label or "default": lines[label] for label in labels if label in lines}
    heading = f"{heading.capitalize()}: mean and standard error over n seeds, or each seed (n < 3)"
    options = dict(loc="outside upper center", ncols=legend_columns, frameon=False, fontsize=9)
    figure.legend(shown.values(), shown, title=heading, **options)
    figure.supxlabel("environment steps (millions)", fontsize=10)
    figure.supylabel("return", fontsize=10)
    return figure


def align(curves: list[pd.DataFrame]) -> pd.DataFrame:
    """One column per seed, from where all have begun. A bin in which no episode ended is interpolated."""
    table = pd.concat([curve.set_index("step")["return"] for curve in curves], axis=1).sort_index()
    return table.interpolate(method="index").dropna()


def publish(entity: str, project: str, table: Path) -> str:
    """Make or update the live report. Its panels are filters on tags and job type: later runs appear by themselves."""
    import wandb_workspaces.reports.v2 as wr

    title, old = "MDPO, TRPO, PPO and SAC", wandb_api().reports(f"{entity}/{project}")
    mean = dict(x="global_step", aggregate=True, groupby_aggfunc="mean", groupby_rangefunc="stderr", smoothing_factor=0)
    blocks = [wr.P("Mean and standard error over all runs of an algorithm, including variants and other lengths.")]
    for group in GROUPS:
        family, preset = group.split()
        keys = ["charts/episodic_return", "losses/kl" if family == "on-policy" else "losses/kl_to_old", "charts/SPS"]
        blocks.append(wr.H1(group.replace(" ", ", ").capitalize()))
        for env_id in (f"{task}-v4" for task in TASKS):
            filters = f"Tags in ['{env_id}'] and Tags in ['{preset}'] and JobType in {list(FAMILIES[family])}"
            runs = wr.Runset(name=f"{env_id}, {preset}", filters=filters, groupby=["JobType"])
            panels = [wr.LinePlot(title=f"{env_id}: {key}", y=[key], max_runs_to_show=100, **mean) for key in keys]
            for i, panel in enumerate(panels):
                panel.layout = wr.Layout(x=8 * i, y=0, w=8, h=8)
            blocks.append(wr.PanelGrid(runsets=[runs], panels=panels, hide_run_sets=True))
    blocks += [wr.MarkdownBlock(table.read_text())] if table.exists() else []
    report = wr.Report(entity=entity, project=project, title=title, blocks=blocks, width="fluid")
    report.id = next((report.id for report in old if report.display_name == title), "")
    report.save()
    return report.url


if __name__ == "__main__":
    sys.exit(main())
