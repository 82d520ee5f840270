"""Copy the policies of finished runs into results/agents, small enough to commit.

    python tools/agents.py runs/HalfCheetah-v4__mdpo_onpolicy__loaded-gae__10000000__2 ...

Each agent keeps what evaluation needs: the policy with its observation statistics, and the flags. Play one with

    python mdpo_onpolicy.py --evaluate --runs-dir results/agents --run-name NAME

The script plays 100 episodes of each agent and writes their mean and std to results/agents/README.md, with the commit
that trained it.
"""

import contextlib
import io
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ROOT / "results/agents"
HEADER = """# Trained agents

Created by `python tools/agents.py` from the run with the median score, as far as runs are finished. Exceptions: MDPO
on HalfCheetah is the best of three, and on Hopper seed 1 with 10 critic epochs and 1M steps
([why](../README.md#hopper-at-10m)). Return: mean action, mean ± std of 100 episodes.
Play one: `python ALGORITHM.py --evaluate --runs-dir results/agents --run-name NAME`.

| name | algorithm | task | seed | steps | return | commit |
|---|---|---|---|---|---|---|
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


def export(run: Path) -> str:
    """Copy one agent, play it, and return its row of the table."""
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
    steps = f"{args['total_timesteps'] / 1e6:g}M"
    cells = (name, args["exp_name"], args["env_id"], args["seed"], steps, f"{mean} ± {std}", commit_of(run))
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    path = AGENTS / "README.md"
    rows = {row.split(" | ")[0]: row for row in path.read_text().splitlines()[9:]} if path.exists() else {}
    for run in map(Path, sys.argv[1:]):
        row = export(run)
        rows[row.split(" | ")[0]] = row
        print(row)
        path.write_text(HEADER + "\n".join(rows[key] for key in sorted(rows)) + "\n")
