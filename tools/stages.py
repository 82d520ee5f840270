"""How a run went: return, episode length, KL per iteration and entropy in each tenth of an on-policy run, from its log.

    python tools/stages.py runs/NAME ... >> results/stages.txt

The tables of results/README.md that show a run over time are made from its output.
"""

import json
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from report import read_log, short

KEYS = {
    "return": "charts/episodic_return", "length": "charts/episodic_length",
    "KL": "losses/kl", "entropy": "losses/entropy",
}  # fmt: skip


def stages(folder: Path) -> pd.DataFrame:
    """Means over the tenths of a run, one row each, labeled with the number of steps at its end."""
    _, points = read_log([path.parent for path in folder.glob("wandb/*run-*/run-*.wandb")], [*KEYS.values()])
    total = json.loads((folder / "args.json").read_text())["total_timesteps"]
    log = pd.DataFrame(points, columns=["step", *KEYS]).astype(float)
    tenth = ((log.step - 1) * 10 // total + 1) * total // 10
    return log.groupby(tenth)[[*KEYS]].mean().rename(index=lambda end: short(int(end)))


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        if not (folder / "args.json").is_file():
            sys.exit(f"no run in {folder}")
        print(f"{folder.name}\n{stages(folder).round(3).rename_axis('up to')}\n")
