"""Turn runs into the paper's table and learning curves.

    python report.py                                    # what lies in runs/ -> results/
    python report.py --runs runs cluster/runs           # runs of several machines
    python report.py --wandb ENTITY/PROJECT             # runs on W&B's server
    python report.py --steps 200000 --out results/200k  # tables of the runs that are 200 000 steps long
    python report.py --from-results                     # tables and figures again, without the runs

It writes results/runs.csv (a row a run), results/table.md (ours beside the paper's), results/curves.csv.gz (a run's
returns in 50 bins of steps) and a figure for each family and preset. Offline runs are read by `wandb leet inspect`,
and what was read is kept in runs/.report-cache until a run changes. A run's score is the mean return of its last 100
episodes. Only finished runs are averaged, and only those alike in algorithm, preset, task, length and every other flag
that decides the result; all others are listed. What is missing is said, not filled in.
"""

import csv
import gzip
import importlib
import io
import json
import os
import subprocess
import sys
import warnings
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import tyro
import wandb
from tqdm import tqdm

FAMILIES = {"on-policy": ("mdpo_onpolicy", "trpo", "ppo"), "off-policy": ("mdpo_offpolicy", "mdpo_tsallis", "sac")}
FAMILY = {algo: family for family, algos in FAMILIES.items() for algo in algos}
# The paper's scores and half-widths of their intervals, in the order of FAMILIES; for Tsallis at its best q, the third
# number. It has no table for on-policy "loaded". Tasks are Gym's v2.
PAPER = {
    ("on-policy", "loaded-gae"): {
        "Hopper": ((2361, 518), (1979, 672), (2051, 241)),
        "Walker2d": ((4834, 607), (4473, 558), (1490, 292)),
        "HalfCheetah": ((4172, 1156), (3751, 910), (2041, 1319)),
        "Ant": ((5211, 43), (4682, 278), (59, 133)),
        "Humanoid": ((3234, 566), (4414, 132), (529, 47)),
        "HumanoidStandup": ((155261, 3898), (149847, 2632), (97223, 4479)),
    },
    ("on-policy", "minimal"): {
        "Hopper": ((1964, 217), (2382, 445), (1281, 353)),
        "Walker2d": ((2948, 298), (2454, 171), (424, 92)),
        "HalfCheetah": ((2873, 835), (1726, 690), (617, 135)),
        "Ant": ((1162, 738), (1716, 338), (-40, 33)),
        "Humanoid": ((635, 46), (449, 9), (448, 56)),
        "HumanoidStandup": ((127901, 6217), (100408, 12564), (96068, 11721)),
    },
    ("off-policy", "loaded"): {
        "Hopper": ((2428, 395), (2428, 395, 1.0), (1870, 404)),
        "Walker2d": ((3591, 366), (4028, 287, 2.0), (3738, 312)),
        "HalfCheetah": ((11823, 154), (11823, 154, 1.0), (11928, 342)),
        "Ant": ((4434, 749), (5486, 737, 2.0), (4989, 579)),
        "Humanoid": ((5323, 348), (5611, 260, 1.2), (5191, 312)),
        "HumanoidStandup": ((143955, 4499), (165882, 16604, 1.4), (154765, 11721)),
    },
    ("off-policy", "minimal"): {
        "Hopper": ((1385, 648), (1385, 648, 1.0), (1501, 414)),
        "Walker2d": ((873, 180), (1151, 218, 1.8), (635, 137)),
        "HalfCheetah": ((8098, 428), (8477, 450, 1.4), (9298, 371)),
        "Ant": ((1051, 284), (2348, 338, 2.0), (378, 33)),
        "Humanoid": ((2258, 372), (4426, 229, 1.6), (3598, 172)),
        "HumanoidStandup": ((131702, 7203), (138157, 8983, 1.2), (142774, 4864)),
    },
}
PAPER_STEPS = {"on-policy": "10M", "off-policy": "1M"}
TASKS = tuple(PAPER["on-policy", "minimal"])
COLUMNS = "algo preset variant env_id seed steps final_return episodes sps commit versions status reason started run"
CURVE_COLUMNS = "run algo preset variant env_id seed step return episodes"
BINS = 50


@dataclass
class Args:
    runs: tuple[Path, ...] = (Path("runs"),)  # folders that hold runs
    wandb: str = ""  # ENTITY/PROJECT: read the runs of this W&B project instead
    out: Path = Path("results")  # folder to write to
    steps: int | None = None  # length of the runs in the tables; default: each family and preset's most common
    from_results: bool = False  # read runs.csv and curves.csv.gz in --out instead of runs
    cache: bool = True  # believe what an earlier call read of runs that have not changed since


def refuse(sentence: str) -> NoReturn:
    """Input that cannot work: a plain sentence, and exit status 2."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


# ---------------------------------------------------------------------------------------------------- reading runs


def read_segment(file: Path) -> tuple[str, dict, list[tuple], bool]:
    """Start time, config, (step, return, speed) of every point in one of W&B's files, and whether W&B could read it.

    The file of a killed process is readable up to its torn end. `wandb leet inspect` starts Python in order to start
    wandb-core: calling that directly saves a second a run."""
    core = [str(Path(wandb.__file__).parent / "bin/wandb-core"), "leet", "inspect", "--no-observability", "--json"]
    plain = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=1 << 16)
    environment = os.environ | dict(GOGC="400", WANDB_ERROR_REPORTING="false")  # less garbage collection, no telemetry
    for command in ([*core, "--run-file", str(file), str(file.parents[1])], plain):
        started, config, points = "", {}, []
        with suppress(OSError), subprocess.Popen(command, env=environment, **pipe) as process:
            for line in process.stdout:
                kind = line[:40]
                if b'"type":"history"' in kind:
                    item = json.loads(line)["history"]["item"]
                    points.append((item["_step"], item.get("charts/episodic_return"), item.get("charts/SPS")))
                elif b'"type":"run"' in kind:
                    run = json.loads(line)["run"]
                    started, config = run["start_time"], run.get("config", {}).get("update", {})
            if process.wait() == 0:
                return started, config, points, True
    return started, config, points, False


def is_ours(config: dict) -> bool:
    return config.get("exp_name") in FAMILY and {"preset", "env_id", "seed", "total_timesteps"} <= set(config)


def summarize(points: list[tuple], config: dict) -> dict:
    """The score, the curve in bins, and where the log has a hole: what is kept of a run's points."""
    episodes = [(step, total) for step, total, _ in points if total is not None]
    steps, bins = config["total_timesteps"], {}
    for step, total in episodes:
        bins.setdefault((step * BINS - 1) // steps, []).append(total)  # ends in the bin, its last step included
    # Losses and speed are logged at equal distances, so that a longer one, or an early end, is a hole in the log.
    logged = [0] + [step for step, _, speed in points if speed is not None]
    gap = np.quantile(np.diff(logged), 0.9) if logged[1:] else 0
    holes = [a for a, b in pairwise(logged) if b - a > 1.5 * gap]
    holes += [logged[-1]] if logged[-1] + gap <= steps else []
    return dict(
        episodes=len(episodes),
        final_return=round(float(np.mean([total for _, total in episodes[-100:]])), 2) if episodes else None,
        sps=round(float(np.median([speed for *_, speed in points if speed is not None])), 1) if logged[1:] else None,
        last=points[-1][0] if points else 0,
        hole=holes[0] if holes else None,
        curve=[(round((i + 0.5) * steps / BINS), round(float(np.mean(x)), 2), len(x)) for i, x in sorted(bins.items())],
    )


def read_run(folder: Path, use_cache: bool) -> dict:
    """An offline run. A later segment supersedes what earlier ones logged from its own first step on."""
    # An online run leaves run-* beside its uploads, an offline one offline-run-*; both are the same kind of file.
    files = sorted(folder.glob("wandb/*run-*/run-*.wandb"))
    kept = folder.parent / ".report-cache" / f"{folder.name}.json"
    key = [zlib.crc32(Path(__file__).read_bytes())]  # another report.py may keep something else
    for file in filter(Path.exists, (*files, folder / "finished", folder / "args.json")):
        key.append([str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns])
    with suppress(OSError, ValueError, KeyError):
        run = json.loads(kept.read_text())
        if use_cache and run["key"] == key:
            return run
    run = dict(key=key, run=folder.name, started="", config={}, commits=[], finished=None)
    points, segments = [], sorted(map(read_segment, files), key=lambda segment: segment[0])
    for started, config, new, _ in segments:
        run["started"] = started or run["started"]
        run["config"] = config or run["config"]
        if (commit := config.get("git_commit")) and commit not in run["commits"]:
            run["commits"].append(commit)
        points = [p for p in points if not new or p[0] < new[0][0]] + new
    with suppress(OSError, ValueError):
        run["config"] = run["config"] or json.loads((folder / "args.json").read_text())
        run["finished"] = int((folder / "finished").read_text())
    if is_ours(run["config"]):
        run |= summarize(points, run["config"])
    if not all(readable for *_, readable in segments):
        return run  # this may pass: it is not for the cache
    with suppress(OSError):  # a folder that cannot be written to is read without a cache
        kept.parent.mkdir(exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}.tmp")  # renamed when whole: a crash leaves no half of a cache
        half.write_text(json.dumps(run))
        half.replace(kept)
    return run


def read_folders(folders: tuple[Path, ...], use_cache: bool) -> list[dict]:
    if missing := [folder for folder in folders if not folder.is_dir()]:
        refuse(f"there is no folder {missing[0]}. --runs names the folders that hold runs.")
    # What else lies there, logs or such, is not a run.
    runs = [p for f in folders for p in sorted(f.iterdir()) if (p / "wandb").is_dir() or (p / "args.json").is_file()]
    if not runs:
        refuse(f"no runs in {', '.join(map(str, folders))}: ./benchmark.sh, or any of the six scripts, makes some.")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(progress(pool.map(partial(read_run, use_cache=use_cache), runs), total=len(runs)))


def read_online(path: str) -> list[dict]:
    """The runs of a W&B project. W&B itself has joined the segments of resumed ones."""
    runs = []
    try:
        found = wandb.Api().runs(path, lazy=False)
        for run in progress(found, total=len(found)):
            config = {key: value for key, value in run.config.items() if key[0] != "_"}
            # A scan gives the points that have all of its keys: one for episodes, one for what is logged in between.
            episodes = run.scan_history(keys=["global_step", "charts/episodic_return"])
            points = [(row["global_step"], row["charts/episodic_return"], None) for row in episodes]
            speeds = run.scan_history(keys=["global_step", "charts/SPS"])
            points += [(row["global_step"], None, row["charts/SPS"]) for row in speeds]
            record = dict(run=run.name, started=run.created_at, config=config, finished=None)
            record["commits"] = [config["git_commit"]] if config.get("git_commit") else []
            if is_ours(config):
                record |= summarize(sorted(points, key=lambda point: point[0]), config)
                record["finished"] = config["total_timesteps"] if run.state == "finished" else None
            runs.append(record)
    except (wandb.Error, ValueError) as error:  # no such project, no account, no network
        refuse(f"W&B has no answer for {path}: {str(error).strip().splitlines()[0]}")
    return runs or refuse(f"W&B project {path} has no runs.")


def progress(items, total: int):
    return tqdm(items, total=total, unit=" runs", mininterval=0.5 if sys.stderr.isatty() else 60)


@cache
def defaults(algo: str, preset: str, env_id: str) -> dict:
    """What a script would do with this task and preset if no other flag were given: it is asked."""
    try:
        script = importlib.import_module(algo)
    except ModuleNotFoundError:
        refuse(f"report.py asks the scripts for their defaults, and {algo}.py is not beside it.")
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            flags = asdict(script.parse_args(["--env-id", env_id, "--preset", preset]))
    except SystemExit:
        flags = asdict(script.Args(**script.PRESETS.get(preset, {})))
        print(f"{algo}.py does not take {env_id} here: its runs are compared with the bare preset.", file=sys.stderr)
    unimportant = (*script.CHANGEABLE.split(), "seed", "env_id", "preset", "exp_name")
    return {name: value for name, value in flags.items() if name not in unimportant}


def variant(config: dict) -> str:
    """The flags by which a run differs from its script's defaults for the task and preset."""
    usual = defaults(config["exp_name"], config["preset"], config["env_id"])
    if "entropy_q" in usual:  # follows --tsallis-q
        usual = usual | dict(entropy_q=config["tsallis_q"])
    unusual = {name: config[name] for name in usual if name in config and config[name] != usual[name]}
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in unusual.items())


def judge(run: dict) -> tuple[str, str]:
    """finished, unfinished or broken, and why."""
    if not is_ours(run["config"]):
        return "broken", "not a log of one of the six scripts"
    if run["finished"] != run["config"]["total_timesteps"]:
        return "unfinished", f"its log ends at step {run['last']}"
    if run["hole"] is not None:
        return "broken", f"points are missing after step {run['hole']}"
    return ("finished", "") if run["episodes"] else ("broken", "no episode ended")


def rows_and_curves(runs: list[dict]) -> tuple[list[dict], dict[str, list]]:
    """A row of runs.csv for each run, and each run's curve under its name (NAME#2 for a second of that name)."""
    rows, curves, names = [], {}, Counter()
    for run in runs:
        config, (status, reason) = run["config"], judge(run)
        names[run["run"]] += 1
        name = run["run"] + (f"#{names[run['run']]}" if names[run["run"]] > 1 else "")
        versions = " ".join(f"{k}={v}" for k, v in sorted((config.get("versions") or {}).items()))
        row = dict(algo=config.get("exp_name"), steps=config.get("total_timesteps"), commit=" ".join(run["commits"]))
        row |= {key: config.get(key) for key in ("preset", "env_id", "seed")}
        row |= {key: run.get(key) for key in ("final_return", "episodes", "sps")}
        row |= dict(versions=versions, status=status, reason=reason, started=run["started"][:19], run=name)
        row["variant"] = variant(config) if is_ours(config) else None
        rows.append({key: row[key] for key in COLUMNS.split()})
        curves[name] = run.get("curve", [])
    key = ("algo", "preset", "variant", "env_id")
    rows.sort(key=lambda r: (*(r[k] or "" for k in key), r["steps"] or 0, r["seed"] or 0, r["run"]))
    return rows, curves


def write_csv(file, columns: str, rows: list[dict]) -> None:
    writer = csv.DictWriter(file, columns.split(), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def write_results(out: Path, rows: list[dict], curves: dict[str, list]) -> None:
    with open(out / "runs.csv", "w", newline="") as file:
        write_csv(file, COLUMNS, rows)
    points = [r | dict(zip(("step", "return", "episodes"), p, strict=True)) for r in rows for p in curves[r["run"]]]
    with gzip.GzipFile(out / "curves.csv.gz", "wb", mtime=0) as packed, io.TextIOWrapper(packed, newline="") as file:
        write_csv(file, CURVE_COLUMNS, points)


def read_results(out: Path) -> tuple[list[dict], dict[str, list]]:
    types = dict(seed=int, steps=int, episodes=int, final_return=float, sps=float)
    try:
        with open(out / "runs.csv", newline="") as file:
            rows = [{k: types[k](v) if v and k in types else v for k, v in row.items()} for row in csv.DictReader(file)]
        curves = {row["run"]: [] for row in rows}
        with gzip.open(out / "curves.csv.gz", "rt", newline="") as file:
            for p in csv.DictReader(file):
                curves[p["run"]].append((int(p["step"]), float(p["return"]), int(p["episodes"])))
    except (OSError, EOFError, KeyError, ValueError) as error:
        refuse(f"--from-results needs runs.csv and curves.csv.gz in {out}, as this script writes them ({error!r}).")
    return rows, curves


# ------------------------------------------------------------------------------------- what is averaged, and with what


def select(rows: list[dict], steps: int | None) -> tuple[dict, dict, list[tuple[dict, str]]]:
    """Cells of runs that may be averaged, {(family, preset): {(algo, env_id, variant): {seed: row}}}, the length of the
    runs in each family and preset, and every other run with the reason why it is left out."""
    groups, cells, lengths, left_out = {}, {}, {}, []
    for row in rows:
        if row["status"] == "finished":
            groups.setdefault((FAMILY[row["algo"]], row["preset"]), []).append(row)
        else:
            left_out.append((row, f"{row['status']}: {row['reason']}"))
    for group, members in sorted(groups.items(), key=lambda item: (list(FAMILIES).index(item[0][0]), item[0][1])):
        counts = Counter(row["steps"] for row in members)
        lengths[group] = length = steps or max(counts, key=lambda n: (counts[n], n))
        for row in sorted(members, key=lambda row: (row["started"], row["run"]), reverse=True):
            if row["steps"] != length:
                left_out.append((row, f"{short(row['steps'])} steps, and the table is of {short(length)}"))
                continue
            cell = cells.setdefault(group, {}).setdefault((row["algo"], row["env_id"], row["variant"]), {})
            if (newer := cell.setdefault(row["seed"], row)) is not row:
                left_out.append((row, f"an older run of the same seed as {newer['run']}"))
    return cells, lengths, sorted(left_out, key=lambda pair: rows.index(pair[0]))


def shown(cells: dict, algo: str, env_id: str) -> tuple[str, dict]:
    """The cell that stands for algorithm and task: the script's defaults, or without such runs the fullest variant."""
    variants = {v: cell for (a, e, v), cell in sorted(cells.items()) if (a, e) == (algo, env_id)}
    return max(variants.items(), key=lambda item: (item[0] == "", len(item[1])), default=("", {}))


def scores(cell: dict) -> np.ndarray:
    return np.array([row["final_return"] for _, row in sorted(cell.items())])


def half_width(x: np.ndarray) -> np.ndarray:
    """Of the paper's 95 % interval of the mean: 1.96 standard deviations / √n, over the first axis."""
    return 1.96 * np.std(x, axis=0, ddof=1) / len(x) ** 0.5


def iqm(x: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: a quarter of the values, rounded down, is cut from either end."""
    cut = x.shape[-1] // 4
    return np.sort(x)[..., cut : x.shape[-1] - cut].mean(-1)


def bootstrap(strata: list[np.ndarray], resamples: int = 10_000) -> np.ndarray:
    """95 % interval of the interquartile mean of all strata together (Agarwal et al., 2021): in each resample every
    stratum, the runs of one task, is drawn anew from itself. The same runs always give the same interval."""
    random = np.random.default_rng(0)
    drawn = [x[random.integers(len(x), size=(resamples, len(x)))] for x in strata]
    return np.percentile(iqm(np.concatenate(drawn, axis=1)), (2.5, 97.5))


def paper(group: tuple[str, str], algo: str, env_id: str) -> tuple:
    """The paper's score, half-width and perhaps q, or ()."""
    scores = PAPER.get(group, {}).get(env_id.split("-v")[0])
    return scores[FAMILIES[group[0]].index(algo)] if scores else ()


# ------------------------------------------------------------------------------------------------------- the table


def short(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k"


def mean_text(cell: dict) -> str:
    x = scores(cell)
    half = f" ± {half_width(x):.0f}" if len(x) > 1 else ""
    return f"{x.mean():.0f}{half} (n = {len(x)})" if len(x) else "—"


def iqm_text(strata: list[np.ndarray], digits: int = 0) -> str:
    middle = f"{iqm(np.concatenate(strata)):.{digits}f}"
    if min(map(len, strata)) == 1:
        return middle
    low, high = bootstrap(strata)
    return f"{middle} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown(header: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)] + [""]


def by_task(cells: dict) -> list[str]:
    """The tasks of a table, in the paper's order, then others."""
    order = {name: i for i, name in enumerate(TASKS)}
    return sorted({env for _, env, _ in cells}, key=lambda env: (order.get(env.split("-v")[0], len(order)), env))


def table(group: tuple[str, str], cells: dict, length: int) -> list[str]:
    family, preset = group
    algos, tasks = FAMILIES[family], by_task(cells)
    header, lines, iqm_lines, missing = ["task"], [], [], []
    for algo in algos:
        header += [f"{algo}, {short(length)} steps", f"paper, {PAPER_STEPS[family]} steps, n = 5"]
    fullest, present = max(map(len, cells.values())), [algo for algo in algos if any(algo in key for key in cells)]
    missing += [f"no run of {algo}" for algo in algos if algo not in present]
    for env_id in tasks:
        lines.append([env_id])
        iqm_lines.append([env_id])
        for algo in algos:
            name, cell = shown(cells, algo, env_id)
            mean, half, *q = paper(group, algo, env_id) or (None, None)
            theirs = "—" if mean is None else f"{mean} ± {half}" + (f", q = {q[0]:g}" if q else "")
            lines[-1] += [mean_text(cell) + (name and f", {name}"), theirs]
            iqm_lines[-1].append(iqm_text([scores(cell)]) + (name and f", {name}") if cell else "—")
            if algo in present and len(cell) < fullest:
                missing.append(f"{algo} on {env_id} has {len(cell)} of {fullest} seeds")
    # All tasks together, for the algorithms that have any runs, on the tasks for which all of these and the paper do.
    common = [env for env in tasks if paper(group, algos[0], env) and all(shown(cells, a, env)[1] for a in present)]
    if len(common) > 1:
        iqm_lines.append([f"**{len(common)} tasks together**, 1 = the paper's {algos[0]}"])
        for algo in algos:
            strata = [scores(shown(cells, algo, e)[1]) / paper(group, algos[0], e)[0] for e in common]
            iqm_lines[-1].append(iqm_text(strata, 2) if algo in present else "—")
        if len(common) < len(tasks):
            iqm_lines[-1][0] += f" ({', '.join(common)})"
    if absent := [task for task in TASKS if not any(env.split("-v")[0] == task for env in tasks)]:
        missing.append(f"no run on the paper's {', '.join(absent)}")
    runs = [row for cell in cells.values() for row in cell.values()]
    seeds = ", ".join(map(str, sorted({row["seed"] for row in runs})))
    made = {what: sorted({row[what] for row in runs}) for what in ("commit", "versions")}
    return [
        f"## {family.capitalize()}, {preset}", "",
        f"Final return, mean ± 1.96 · std / √n over n seeds. Ours: {short(length)} steps, seeds {seeds}.", "",
        *markdown(header, lines),
        "Interquartile mean [95 % stratified bootstrap interval] of the same runs:", "",
        *markdown(["task", *algos], iqm_lines),
        f"Missing: {'; '.join(missing)}." if missing else "Nothing is missing.", "",
        f"Made at commit {', '.join(c or 'unknown' for c in made['commit'])} with {' or '.join(made['versions'])}.", "",
    ]  # fmt: skip


def variants(cells: dict) -> dict[tuple[str, str], dict[str, dict]]:
    """{(algo, env_id): {variant: cell}} where there is a variant; the script's defaults first."""
    found = {}
    for (algo, env_id, name), cell in sorted(cells.items()):
        found.setdefault((algo, env_id), {})[name] = cell
    return {key: cells for key, cells in found.items() if any(cells)}


HOW_TO_READ = """
A run's score is the mean return of its last 100 training episodes. Intervals are over seeds, mean ± 1.96 · std / √n as
in the paper, which leaves open whether std divides by n or n - 1: ours divides by n - 1, the wider interval. With one
seed there is no interval. Five seeds are few for an interval of this kind: below each table stand interquartile means
with stratified bootstrap intervals (Agarwal et al., 2021), the last row over the runs of all tasks, each divided by the
paper's MDPO score of its task. The paper's figures are for the v2 tasks, 5 runs, on-policy at 10M steps; its off-policy
tables name no step count, and 1M is our reading. For Tsallis they are at its best q. On-policy runs make whole
iterations: 1M steps are 999 424. A label such as `anneal_lr=False` names the flags by which runs differ from their
script's defaults for the task and preset; "—" is no run, or no figure in the paper."""


def report(cells: dict, lengths: dict, left_out: list[tuple[dict, str]]) -> str:
    """table.md"""
    text = ["# Results", *HOW_TO_READ.split("\n"), ""]
    for group in cells:
        text += table(group, cells[group], lengths[group])
    if none := [" ".join(group) for group in PAPER if group not in cells]:
        text += [f"No finished runs at all for the paper's other tables: {', '.join(none)}.", ""]
    lines = [
        [algo, group[1], env_id, name or "(default)", short(lengths[group]), mean_text(cell), iqm_text([scores(cell)])]
        for group in cells
        for (algo, env_id), named in variants(cells[group]).items()
        for name, cell in named.items()
    ]
    if lines:
        text += ["## Variants", "", "Runs with flags of their own, beside those with the script's defaults.", ""]
        text += markdown(["algorithm", "preset", "task", "variant", "steps", "mean", "interquartile mean"], lines)
    lines = [[row["run"], why, str(row["final_return"] or "—")] for row, why in left_out]
    if lines:
        text += ["## Listed, not averaged in", "", *markdown(["run", "why", "last 100 episodes"], lines)]
    return "\n".join(text)


# ----------------------------------------------------------------------------------------------------- the figures

# Okabe and Ito's colours, told apart by the colour-blind, and line styles, told apart in black and white.
LOOKS = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#000000", (0, (5, 1, 1, 1, 1, 1))))


def band(curves: list[list[tuple]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean and half-width over seeds, where all have begun; a bin in which no episode ended is interpolated."""
    begin = max(curve[0][0] for curve in curves)
    steps = np.array(sorted({point[0] for curve in curves for point in curve if point[0] >= begin}))
    values = np.array([np.interp(steps, [p[0] for p in curve], [p[1] for p in curve]) for curve in curves])
    return steps, values.mean(0), half_width(values) if len(values) > 1 else np.zeros(len(steps))


def draw(path: Path, panels: dict[str, dict[str, list]], title: str):
    """A panel for each title, a line for each label with its seeds' curves."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(5.5, 3.4 * columns), 1 + 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (name, lines) in zip(axes, panels.items(), strict=False):
        for label, curves in lines.items():
            color, style = LOOKS[labels.index(label) % len(LOOKS)]
            steps, mean, half = band(curves)
            axis.plot(steps / 1e6, mean, color=color, linestyle=style, linewidth=1.6, label=label)
            axis.fill_between(steps / 1e6, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.remove()
    handles = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    entries = [handles[label] for label in labels]
    look = dict(ncols=3, frameon=False, handlelength=4, fontsize=9, title_fontsize=10)
    figure.legend(entries, labels, loc="outside upper center", title=title, **look)
    figure.supxlabel("environment steps (millions)", fontsize=10)
    figure.supylabel("return", fontsize=10)
    figure.savefig(path, dpi=150)
    return figure


def seeds_text(cells: list[dict]) -> str:
    counts = [len(cell) for cell in cells]
    return f"n = {counts[0]}" if len(set(counts)) == 1 else f"n = {', '.join(map(str, counts))}"


def figures(out: Path, cells: dict, curves: dict[str, list]) -> dict[str, object]:
    """The learning curves of each family and preset, and those of variants."""
    drawn = {}
    for group, of_group in cells.items():
        panels, unusual = {}, {}
        for env_id in by_task(of_group):
            lines = {algo: shown(of_group, algo, env_id) for algo in FAMILIES[group[0]]}
            lines = {algo: (name, cell) for algo, (name, cell) in lines.items() if cell}
            notes = "".join(f"\n{algo}: {name}" for algo, (name, _) in lines.items() if name)
            title = f"{env_id}, {seeds_text([cell for _, cell in lines.values()])}{notes}"
            panels[title] = {algo: [curves[r["run"]] for r in cell.values()] for algo, (_, cell) in lines.items()}
        for (algo, env_id), named in variants(of_group).items():
            if len(named) > 1:
                title = f"{algo}\n{env_id}, {seeds_text(list(named.values()))}"
                unusual[title] = {n or "default": [curves[r["run"]] for r in c.values()] for n, c in named.items()}
        title = f"{group[0].capitalize()}, {group[1]}: mean and 95 % interval over n seeds"
        for kind, found in dict(curves=panels, variants=unusual).items():
            if found:
                name = f"{kind}_{group[0]}_{group[1]}.png"
                drawn[name] = draw(out / name, found, title)
    return drawn


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, description=__doc__)
    if args.from_results:
        rows, curves = read_results(args.out)
    else:
        rows, curves = rows_and_curves(read_online(args.wandb) if args.wandb else read_folders(args.runs, args.cache))
    cells, lengths, left_out = select(rows, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    write_results(args.out, rows, curves)
    (args.out / "table.md").write_text(report(cells, lengths, left_out))
    averaged = len(rows) - len(left_out)
    print(f"{len(rows)} runs: {averaged} averaged, {len(left_out)} listed. See {args.out / 'table.md'}.")
    try:
        drawn = figures(args.out, cells, curves)
    except ModuleNotFoundError:
        refuse("the figures need matplotlib: pip install '.[report]'. The table and the data are written.")
    print(f"Figures: {', '.join(drawn) or 'none, for want of finished runs'}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
