"""Copy the policies of finished runs into results/agents, small enough to commit.

    python report.py && python tools/agents.py runs/HalfCheetah-v4__mdpo_onpolicy__loaded-gae__10000000__2 ...

Each agent keeps what evaluation needs: the policy with its observation statistics, and the flags. Play one with

    python mdpo_onpolicy.py --evaluate --runs-dir results/agents --run-name NAME

The script plays 100 episodes of each new agent and writes results/agents/README.md: their mean and std, the commit that
trained the agent, and its training score with its rank among the seeds in results/runs.csv. Without arguments it only
updates the ranks.
"""

import contextlib
import io
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from report import CELL, read_results, select  # noqa: E402, after the path

AGENTS = ROOT / "results/agents"
HEADER = """# Trained agents

Each agent is the median of its seeds by score, the mean return of the last 100 episodes of training, with sampled
actions. Return: mean action, mean ± std of 100 episodes. MDPO on Hopper [runs fast and falls
early](../README.md#hopper-at-10m).
Play one: `python ALGORITHM.py --evaluate --runs-dir results/agents --run-name NAME`.

| name | algorithm | task | seed | steps | score | rank | return | commit |
|---|---|---|---|---|---|---|---|---|
"""


def commit_of(run: Path) -> str:
    """The commit that W&B recorded when the run began."""
    for folder in sorted((run / "wandb").glob("offline-run-*")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        if found := re.search(
            r'"commit": ?"([0-9a-f]{7})', subprocess.run(command, capture_output=True, text=True).stdout
        ):
            return found[1]
    return "unknown"


def export(run: Path) -> tuple[str, str, str]:
    """Copy one agent and play it. Returns its name, return and commit."""
    checkpoint = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    args = checkpoint["args"]
    name = f"{args['env_id']}__{args['exp_name']}__{args['preset']}"
    (AGENTS / name).mkdir(parents=True, exist_ok=True)
    kept = {key: checkpoint[key] for key in ("args", "policy", "obs_moments", "step") if key in checkpoint}
    if sum(weights.nbytes for weights in kept["policy"].values()) > 90_000:  # humanoids: keep the file below 100 KB
        kept["policy"] = {key: weights.half() for key, weights in kept["policy"].items()}
    torch.save(kept, AGENTS / name / "checkpoint.pt")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        flags = ["--evaluate", "--eval-episodes", "100", "--runs-dir", str(AGENTS), "--run-name", name]
        import_module(args["exp_name"]).main(flags)
    mean, std = re.search(r"mean (\S+) ± (\S+)", output.getvalue()).groups()
    return name, f"{mean} ± {std}", commit_of(run)


def row(name: str, returned: str, commit: str, runs: pd.DataFrame) -> str:
    """An agent's row of the table. Its score and rank are those of runs.csv."""
    args = torch.load(AGENTS / name / "checkpoint.pt", weights_only=True)["args"]
    finished = (runs.status == "finished") & (runs.steps == args["total_timesteps"])
    mine = runs[finished & (runs.run == args["run_name"]) & runs.commit.str.startswith(commit)].iloc[-1]
    others = runs[(runs[CELL] == mine[CELL]).all(axis=1) & ((runs.left_out == "") | (runs.id == mine.id))]
    scores, score = others.final_return.astype(float), float(mine.final_return)
    cells = (name, args["exp_name"], args["env_id"], args["seed"], f"{args['total_timesteps'] / 1e6:g}M")
    cells += (f"{score:.0f}", f"{(scores > score).sum() + 1} of {len(scores)}", returned, commit)
    return f"| {' | '.join(map(str, cells))} |"


def page(exported: list[tuple[str, str, str]]) -> str:
    """README.md with the agents that are there and those just exported."""
    text = (AGENTS / "README.md").read_text()
    listed = re.findall(r"^\| (\S+__\S+) .* \| (\S+ ± \S+) \| (\w+) \|$", text, flags=re.M)
    agents = {name: (name, *rest) for name, *rest in listed + exported}
    runs = select(read_results(ROOT / "results"))
    return HEADER + "".join(f"{row(*agents[name], runs)}\n" for name in sorted(agents))


if __name__ == "__main__":
    exported = [export(Path(run)) for run in sys.argv[1:]]
    (AGENTS / "README.md").write_text(page(exported))
    print(page([]))
