"""Turn runs into the paper's table and learning curves.

    python report.py                                    # what lies in runs/ -> results/
    python report.py --runs runs cluster/runs           # runs of several machines
    python report.py --wandb ENTITY/PROJECT             # runs on W&B's server
    python report.py --steps 200000 --out results/200k  # tables of the runs that are 200 000 steps long
    python report.py --from-results                     # tables and figures again, without the runs
    python report.py --keep                             # runs/ added to what results/ has of runs that are gone

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
import textwrap
import warnings
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
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
PAPER_HEADER = {"on-policy": "paper, 10M steps, n = 5", "off-policy": "paper, n = 5"}  # it names no off-policy length
TASKS = tuple(PAPER["on-policy", "minimal"])
COLUMNS = "algo preset variant env_id seed steps final_return episodes sps commit versions status reason started run"
CURVE_COLUMNS = "run algo preset variant env_id seed step return episodes"
BINS = 50


@dataclass
class Args:
    runs: tuple[Path, ...] = (Path("runs"),)  # folders that hold runs
    wandb: str = ""  # ENTITY/PROJECT: read the runs of this W&B project instead
    out: Path = Path("results")  # folder to write to
    steps: int | None = None  # length of the runs in the tables; default: each task's most common in its table
    from_results: bool = False  # read runs.csv and curves.csv.gz in --out instead of runs
    keep: bool = False  # add the runs to those in --out's runs.csv and curves.csv.gz, whose folders may be gone
    cache: bool = True  # believe what an earlier call read of runs that have not changed since


def refuse(sentence: str) -> NoReturn:
    """Input that cannot work: a plain sentence, and exit status 2."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def write(path: Path, content: bytes) -> None:
    """Under another name, and renamed when whole: a crash leaves no half of a file."""
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    half.write_bytes(content)
    half.replace(path)


# ---------------------------------------------------------------------------------------------------- reading runs


def read_segment(file: Path) -> tuple[str, dict, list[tuple], bool]:
    """Start time, config, (step, return, speed) of every point in one of W&B's files, and whether W&B could read it.

    The file of a killed process is readable up to its torn end. `wandb leet inspect` starts Python in order to start
    wandb-core: calling that directly saves a second a run."""
    core = [str(Path(wandb.__file__).parent / "bin/wandb-core"), "leet", "inspect", "--no-observability", "--json"]
    plain = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    environment = os.environ | dict(GOGC="400", GOMAXPROCS="1", WANDB_ERROR_REPORTING="false")
    for command in ([*core, "--run-file", str(file), str(file.parents[1])], plain):
        started, config, points = "", {}, []
        with suppress(OSError), TemporaryFile() as output:  # through a pipe, each record would wake its reader
            process = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.DEVNULL)
            output.seek(0)
            for line in output:
                kind = line[:40]
                if b'"type":"history"' in kind:
                    item = json.loads(line.decode())["history"]["item"]
                    points.append((item["_step"], item.get("charts/episodic_return"), item.get("charts/SPS")))
                elif b'"type":"run"' in kind:
                    run = json.loads(line)["run"]
                    started, config = run["start_time"], run.get("config", {}).get("update", {})
            if process.returncode == 0:
                return started, config, points, True
    return started, config, points, False


def is_ours(config: dict) -> bool:
    return config.get("exp_name") in FAMILY and {"preset", "env_id", "seed", "total_timesteps"} <= set(config)


def summarize(points: list[tuple], config: dict) -> dict:
    """The score, the curve in bins, and where the log has a hole: what is kept of a run's points."""
    episodes = [(step, float(total)) for step, total, _ in points if total is not None]  # W&B has "NaN" for NaN
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
        sps=round(float(np.median([float(x) for *_, x in points if x is not None])), 1) if logged[1:] else None,
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
        return run | dict(unreadable=True)  # this may pass: it is not for the cache
    with suppress(OSError):  # a folder that cannot be written to is read without a cache
        kept.parent.mkdir(exist_ok=True)
        write(kept, json.dumps(run).encode())
    return run


def guarded(read, run) -> dict:
    """What `read` makes of a run. An error that nobody expected is this run's, and does not end the report."""
    try:
        return read(run)
    except wandb.Error:
        raise  # W&B's server does not answer
    except Exception as error:
        return dict(run=run.name, started="", config={}, commits=[], finished=None, error=repr(error))


def read_folders(folders: tuple[Path, ...], use_cache: bool) -> list[dict]:
    if missing := [folder for folder in folders if not folder.is_dir()]:
        refuse(f"there is no folder {missing[0]}. --runs names the folders that hold runs.")
    # What else lies there, logs or such, is not a run.
    runs = [p for f in folders for p in sorted(f.iterdir()) if (p / "wandb").is_dir() or (p / "args.json").is_file()]
    if not runs:
        refuse(f"no runs in {', '.join(map(str, folders))}: ./benchmark.sh, or any of the six scripts, makes some.")
    read = partial(guarded, partial(read_run, use_cache=use_cache))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(progress(pool.map(read, runs), total=len(runs)))


def read_online_run(run) -> dict:
    """W&B itself has joined the segments of a resumed one."""
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
    return record


def read_online(path: str) -> list[dict]:
    """The runs of a W&B project."""
    try:
        found = wandb.Api().runs(path, lazy=False)
        runs = [guarded(read_online_run, run) for run in progress(found, total=len(found))]
    except (wandb.Error, ValueError) as error:  # no such project, no account, no network
        refuse(f"W&B has no answer for {path}: {str(error).strip().splitlines()[0]}")
    return runs or refuse(f"W&B project {path} has no runs.")


def progress(items, total: int):
    return tqdm(items, total=total, unit=" runs", mininterval=0.5 if sys.stderr.isatty() else 60)


@contextmanager
def quiet():
    """Nothing is printed, not even by MuJoCo's C code, which writes to file descriptor 2 and knows no sys.stderr."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


@cache
def defaults(algo: str, preset: str, env_id: str) -> dict:
    """What a script would do with this task and preset if no other flag were given: it is asked."""
    try:
        script = importlib.import_module(algo)
    except ModuleNotFoundError:
        refuse(f"report.py asks the scripts for their defaults, and {algo}.py is not beside it.")
    try:
        with quiet():
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
    if "error" in run:
        return "broken", run["error"]
    if not is_ours(run["config"]):
        return "broken", "not a log of one of the six scripts"
    if run["finished"] != run["config"]["total_timesteps"]:
        return "unfinished", f"its log ends at step {run['last']}"
    if not run["last"]:
        return "broken", "W&B cannot read its log" if "unreadable" in run else "it has no log (--wandb-mode disabled?)"
    if not np.isfinite([mean for _, mean, _ in run["curve"]]).all():
        return "broken", "a return is not finite"
    if run["hole"] is not None:
        return "broken", f"points are missing after step {run['hole']}"
    return ("finished", "") if run["episodes"] else ("broken", "no episode ended")


def rows_and_curves(runs: list[dict]) -> tuple[list[dict], dict[str, list]]:
    """A row of runs.csv for each run, and each run's curve under its name (NAME#2 for a second of that name)."""
    rows, curves, names = [], {}, Counter()
    for run in runs:
        config = run["config"]
        try:
            (status, reason), flags = judge(run), variant(config) if is_ours(config) else None
        except Exception as error:  # such as a flag that its script did not have then
            status, reason, flags = "broken", repr(error), None
        names[run["run"]] += 1
        name = run["run"] + (f"#{names[run['run']]}" if names[run["run"]] > 1 else "")
        versions = " ".join(f"{k}={v}" for k, v in sorted((config.get("versions") or {}).items()))
        row = dict(algo=config.get("exp_name"), steps=config.get("total_timesteps"), commit=" ".join(run["commits"]))
        row |= {key: config.get(key) for key in ("preset", "env_id", "seed")}
        row |= {key: run.get(key) for key in ("final_return", "episodes", "sps")}
        row |= dict(versions=versions, status=status, reason=reason, started=run["started"][:19], run=name)
        row["variant"] = flags
        rows.append({key: row[key] for key in COLUMNS.split()})
        curves[name] = run.get("curve", [])
    return in_order(rows), curves


def in_order(rows: list[dict]) -> list[dict]:
    key = ("algo", "preset", "variant", "env_id")
    return sorted(rows, key=lambda r: (*(r[k] or "" for k in key), r["steps"] or 0, r["seed"] or 0, r["run"]))


def add_kept(rows: list[dict], curves: dict, kept: list[dict], kept_curves: dict) -> tuple[list[dict], dict]:
    """The runs read now and those kept from an earlier report. Of two with the same name and flags the one read now
    counts: it is the same run, gone on or made again. With the same name and other flags it is another run. What
    has not finished, or cannot be read any more, takes no finished run's place."""

    def identity(row: dict) -> tuple[str, str]:
        return row["run"].split("#")[0], row["variant"] or ""

    read, finished = set(map(identity, rows)), {identity(row) for row in rows if row["status"] == "finished"}
    for row in kept:
        if identity(row) in (finished if row["status"] == "finished" else read):
            continue
        name, n = row["run"], 2
        while name in curves:
            name, n = f"{identity(row)[0]}#{n}", n + 1
        rows, curves = [*rows, row | dict(run=name)], curves | {name: kept_curves[row["run"]]}
    return in_order(rows), curves


def as_csv(columns: str, rows: list[dict]) -> bytes:
    writer = csv.DictWriter(file := io.StringIO(), columns.split(), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def write_results(out: Path, rows: list[dict], curves: dict[str, list]) -> None:
    write(out / "runs.csv", as_csv(COLUMNS, rows))
    points = [r | dict(zip(("step", "return", "episodes"), p, strict=True)) for r in rows for p in curves[r["run"]]]
    write(out / "curves.csv.gz", gzip.compress(as_csv(CURVE_COLUMNS, points), mtime=0))


def read_results(out: Path, flag: str) -> tuple[list[dict], dict[str, list]]:
    types = dict(seed=int, steps=int, episodes=int, final_return=float, sps=float)
    try:
        with open(out / "runs.csv", newline="") as file:
            rows = [{k: types[k](v) if v and k in types else v for k, v in row.items()} for row in csv.DictReader(file)]
        curves = {row["run"]: [] for row in rows}
        with gzip.open(out / "curves.csv.gz", "rt", newline="") as file:
            for p in csv.DictReader(file):
                curves[p["run"]].append((int(p["step"]), float(p["return"]), int(p["episodes"])))
        if lost := [row["run"] for row in rows if row["status"] == "finished" and not curves[row["run"]]]:
            refuse(f"{out / 'curves.csv.gz'} has no curve of {lost[0]}: call report.py without {flag}.")
    except (OSError, EOFError, KeyError, ValueError) as error:
        refuse(f"{flag} needs runs.csv and curves.csv.gz in {out}, as this script writes them ({error!r}).")
    return rows, curves


# ------------------------------------------------------------------------------------- what is averaged, and with what


def select(rows: list[dict], steps: int | None) -> tuple[dict, dict, list[tuple[dict, str]]]:
    """Cells of runs that may be averaged, {(family, preset): {(algo, env_id, variant): {seed: row}}}, their length,
    {(family, preset, env_id): steps}, and every other run with the reason why it is left out."""
    groups, cells, lengths, left_out = {}, {}, {}, []
    for row in rows:
        if row["status"] == "finished":
            groups.setdefault((FAMILY[row["algo"]], row["preset"], row["env_id"]), []).append(row)
        else:
            left_out.append((row, f"{row['status']}: {row['reason']}"))
    for task, members in sorted(groups.items(), key=lambda item: (list(FAMILIES).index(item[0][0]), item[0])):
        counts = Counter(row["steps"] for row in members)
        lengths[task] = length = steps or max(counts, key=lambda n: (counts[n], n))
        for row in sorted(members, key=lambda row: (row["started"], row["run"]), reverse=True):
            if row["steps"] != length:
                left_out.append((row, f"{short(row['steps'])} steps, not {short(length)}"))
                continue
            cell = cells.setdefault(task[:2], {}).setdefault((row["algo"], row["env_id"], row["variant"]), {})
            if (newer := cell.setdefault(row["seed"], row)) is not row:
                left_out.append((row, f"another run of the same seed as {newer['run']}"))
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
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k" if steps >= 1000 else str(steps)


def number(x: float, like: float | None = None) -> str:
    """With one decimal if it, or the number that it belongs to, is below 100."""
    return f"{x:.{int(abs(x if like is None else like) < 100)}f}"


def mean_text(cell: dict) -> str:
    if not cell:
        return "—"
    mean, n = scores(cell).mean(), len(cell)
    half = f" ± {number(half_width(scores(cell)), mean)}" if n > 1 else ""
    return f"{number(mean)}{half} (n = {n})"


def iqm_text(strata: list[np.ndarray], text=number) -> str:
    middle = iqm(np.concatenate(strata))
    if min(map(len, strata)) == 1:
        return text(middle, middle)
    low, high = bootstrap(strata)
    return f"{text(middle, middle)} [{text(low, middle)}, {text(high, middle)}]"


def markdown(header: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)] + [""]


def by_task(cells: dict) -> list[str]:
    """The tasks of a table, in the paper's order, then others."""
    order = {name: i for i, name in enumerate(TASKS)}
    return sorted({env for _, env, _ in cells}, key=lambda env: (order.get(env.split("-v")[0], len(order)), env))


def elsewhere(others: list[dict], **which) -> str:
    """How many finished runs of other lengths than a table's there are."""
    n = sum(which.items() <= row.items() for row in others)
    return f"{n} finished run{'s' * (n > 1)} of other lengths, see below" if n else ""


def missing(algos: tuple[str, ...], cells: dict, others: list[dict]) -> list[str]:
    """What a full table would have: all algorithms, all tasks of the paper, and equally many seeds."""
    tasks, said, fullest = by_task(cells), [], max(map(len, cells.values()))
    present = [algo for algo in algos if any(algo in key for key in cells)]
    said += [f"{algo}: {elsewhere(others, algo=algo) or 'no finished run'}" for algo in algos if algo not in present]
    for env_id, algo in ((env_id, algo) for env_id in tasks for algo in present):
        if (seeds := len(shown(cells, algo, env_id)[1])) < fullest:
            more = elsewhere(others, algo=algo, env_id=env_id)
            said.append(f"{algo} on {env_id} has {seeds} of {fullest} seeds" + (more and f" ({more})"))
    elsewhere_only = sorted({row["env_id"] for row in others} - set(tasks))
    said += [f"{env_id}: {elsewhere(others, env_id=env_id)}" for env_id in elsewhere_only]
    found = {env_id.split("-v")[0] for env_id in (*tasks, *elsewhere_only)}
    if absent := [task for task in TASKS if task not in found]:
        said.append(f"no finished run on the paper's {', '.join(absent)}")
    return said


def together(group: tuple[str, str], cells: dict) -> list[str]:
    """The row of all tasks that the algorithm with the most tasks has, for the algorithms that have all of these. Only
    runs with the scripts' defaults count."""
    algos = FAMILIES[group[0]]
    tasks = [env_id for env_id in by_task(cells) if paper(group, algos[0], env_id)]
    has = {algo: {env_id for env_id in tasks if (algo, env_id, "") in cells} for algo in algos}
    common = max(has.values(), key=lambda some: (len(some), sum(some <= other for other in has.values())))
    if len(common) < 2:
        return []
    names = [env_id for env_id in tasks if env_id in common]
    line = [f"**{len(names)} tasks together**, 1 = the paper's {algos[0]} ({', '.join(names)})"]
    for algo in algos:
        strata = [scores(cells.get((algo, e, ""), {})) / paper(group, algos[0], e)[0] for e in names]
        line.append(iqm_text(strata, lambda x, _: f"{x:.2f}") if common <= has[algo] else "—")
    return line


def table(group: tuple[str, str], cells: dict, lengths: dict, others: list[dict]) -> list[str]:
    algos, header, lines, iqm_lines = FAMILIES[group[0]], ["task"], [], []
    for algo in algos:
        header += [algo, PAPER_HEADER[group[0]]]
    for env_id in by_task(cells):
        task = f"{env_id}, {short(lengths[*group, env_id])} steps"
        lines.append([task])
        iqm_lines.append([task])
        for algo in algos:
            name, cell = shown(cells, algo, env_id)
            mean, half, *q = paper(group, algo, env_id) or (None, None)
            theirs = "—" if mean is None else f"{mean} ± {half}" + (f", q = {q[0]:g}" if q else "")
            lines[-1] += [mean_text(cell) + (name and f", {name}"), theirs]
            iqm_lines[-1].append(iqm_text([scores(cell)]) + (name and f", {name}") if cell else "—")
    iqm_lines += filter(None, [together(group, cells)])
    runs = [row for cell in cells.values() for row in cell.values()]
    lag = [env_id for env_id in by_task(cells) if any(r["env_id"] == env_id and r["episodes"] < 500 for r in runs)]
    note = f"On {', '.join(lag)} the last 100 episodes are more than a fifth of a run: the score lags behind the curve."
    gaps = "; ".join(missing(algos, cells, others))
    made = {what: sorted({row[what] for row in runs}) for what in ("versions", "seed")}
    commits = sorted({commit for row in runs for commit in row["commit"].split() or ["unknown"]})  # resumed: several
    return [
        f"## {group[0].capitalize()}, {group[1]}", "",
        f"Final return, mean ± 1.96 · std / √n over n seeds. Ours: seeds {', '.join(map(str, made['seed']))}.", "",
        *markdown(header, lines),
        *([note, ""] if lag else []),
        "Interquartile mean [95 % stratified bootstrap interval] of the same runs:", "",
        *markdown(["task", *algos], iqm_lines),
        f"Missing: {gaps}." if gaps else "Nothing is missing.", "",
        f"Made at commit {', '.join(commits)} with {' or '.join(made['versions'])}.", "",
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
with stratified bootstrap intervals (Agarwal et al., 2021), with fewer than 4 seeds plain means; the last row is over
the runs of several tasks, each divided by the paper's MDPO score of its task, for the algorithms that have all of these
tasks. The paper's figures are for the v2 tasks, 5 runs, on-policy at 10M steps; its off-policy tables name no step
count. For Tsallis they are at its best q. Ours are for the length beside the task, on-policy in whole iterations: 1M
steps are 999 424. A label such as `anneal_lr=False` names the flags by which runs differ from their script's defaults
for the task and preset; "—" is no run, or no figure in the paper."""


def report(cells: dict, lengths: dict, left_out: list[tuple[dict, str]]) -> str:
    """table.md"""
    text, others = ["# Results", *HOW_TO_READ.split("\n"), ""], {group: [] for group in (*PAPER, *cells)}
    for row in (row for row, _ in left_out if row["status"] == "finished"):
        group = FAMILY[row["algo"]], row["preset"]
        if row["steps"] != lengths[*group, row["env_id"]]:
            others.setdefault(group, []).append(row)
    for group in cells:
        text += table(group, cells[group], lengths, others[group])
    none = [f"{' '.join(g)} ({elsewhere(others[g]) or 'no finished run'})" for g in others if g not in cells]
    if none:
        text += [f"There is no table of: {', '.join(none)}.", ""]
    lines = [
        [algo, g[1], env_id, name or "(default)", short(lengths[*g, env_id]), mean_text(cell), iqm_text([scores(cell)])]
        for g in cells
        for (algo, env_id), named in variants(cells[g]).items()
        for name, cell in named.items()
    ]
    if lines:
        text += ["## Variants", "", "Runs with flags of their own, beside those with the script's defaults.", ""]
        text += markdown(["algorithm", "preset", "task", "variant", "steps", "mean", "interquartile mean"], lines)
    known = {row["run"]: number(row["final_return"]) for row, _ in left_out if row["final_return"] not in (None, "")}
    lines = [[row["run"], why, known.get(row["run"], "—")] for row, why in left_out]
    if lines:
        text += ["## Listed, not averaged in", "", *markdown(["run", "why", "last 100 episodes"], lines)]
    return "\n".join(text)


# ----------------------------------------------------------------------------------------------------- the figures

# Okabe and Ito's colours, told apart by the colour-blind (not their yellow, too pale on white), and line styles, told
# apart in black and white. Seven and five, so that 35 lines differ, and each from the next in both.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
LOOKS = [(COLORS[i % len(COLORS)], STYLES[i % len(STYLES)]) for i in range(len(COLORS) * len(STYLES))]


def band(curves: list[list[tuple]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean and half-width over seeds, where all have begun; a bin in which no episode ended is interpolated."""
    begin = max(curve[0][0] for curve in curves)
    steps = np.array(sorted({point[0] for curve in curves for point in curve if point[0] >= begin}))
    values = np.array([np.interp(steps, [p[0] for p in curve], [p[1] for p in curve]) for curve in curves])
    return steps, values.mean(0), half_width(values) if len(values) > 1 else np.zeros(len(steps))


def draw(path: Path, panels: dict[str, dict[str, dict]], title: str, curves: dict[str, list]):
    """A panel for each title, a line for each label with its cell of runs."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.8 + 0.2 * -(-len(labels) // 3) + rows * (2.6 + 0.17 * max(name.count("\n") for name in panels))
    figure = Figure(figsize=(max(5.5, 3.4 * columns), height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (name, lines) in zip(axes, panels.items(), strict=False):
        for label, cell in lines.items():
            color, style = LOOKS[labels.index(label) % len(LOOKS)]
            steps, mean, half = band([curves[row["run"]] for row in cell.values()])
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


def panel_title(task: str, cells: dict[str, dict]) -> str:
    """The task, and how many seeds there are behind its lines."""
    counts = {label: len(cell) for label, cell in cells.items()}
    if len(set(counts.values())) == 1:
        return f"{task}, n = {min(counts.values())}"
    unequal = ", ".join(f"{label}\u00a0n\u00a0=\u00a0{n}" for label, n in counts.items())  # not to be broken there
    return f"{task}\n{textwrap.fill(unequal, 40)}"


def figures(out: Path, cells: dict, lengths: dict, curves: dict[str, list]) -> dict[str, object]:
    """The learning curves of each family and preset, and those of variants. Those of an earlier call are deleted."""
    for old in (*out.glob("curves_*.png"), *out.glob("variants_*.png")):
        old.unlink()
    drawn = {}
    for group, of_group in cells.items():
        panels, unusual = {}, {}
        tasks = {env_id: f"{env_id}, {short(lengths[*group, env_id])} steps" for env_id in by_task(of_group)}
        for env_id, task in tasks.items():
            found = {algo: shown(of_group, algo, env_id) for algo in FAMILIES[group[0]]}
            named = {algo: cell for algo, (_, cell) in found.items() if cell}
            notes = "".join(f"\n{algo}: {name}" for algo, (name, _) in found.items() if name)
            panels[panel_title(task, named) + notes] = named
        for (algo, env_id), named in variants(of_group).items():
            if len(named) > 1:
                named = {name or "default": cell for name, cell in named.items()}
                unusual[f"{algo}\n{panel_title(tasks[env_id], named)}"] = named
        title = f"{group[0].capitalize()}, {group[1]}: mean and 95 % interval over n seeds"
        for kind, found in dict(curves=panels, variants=unusual).items():
            if found:
                name = f"{kind}_{group[0]}_{group[1]}.png"
                drawn[name] = draw(out / name, found, title, curves)
    return drawn


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, description=__doc__)
    if args.from_results:
        rows, curves = read_results(args.out, "--from-results")
    else:
        kept = read_results(args.out, "--keep") if args.keep else ([], {})
        rows, curves = rows_and_curves(read_online(args.wandb) if args.wandb else read_folders(args.runs, args.cache))
        rows, curves = add_kept(rows, curves, *kept)
    cells, lengths, left_out = select(rows, args.steps)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_results(args.out, rows, curves)
        write(args.out / "table.md", report(cells, lengths, left_out).encode())
    except OSError as error:
        refuse(f"--out {args.out} cannot be written to: {error.strerror}.")
    averaged = len(rows) - len(left_out)
    print(f"{len(rows)} runs: {averaged} averaged, {len(left_out)} listed. See {args.out / 'table.md'}.")
    try:
        drawn = figures(args.out, cells, lengths, curves)
    except ModuleNotFoundError:
        refuse("the figures need matplotlib: pip install '.[report]'. The table and the data are written.")
    print(f"Figures: {', '.join(drawn) or 'none, for want of finished runs'}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
