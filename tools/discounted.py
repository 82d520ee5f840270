"""Compare what a run is scored by, the return, with what it maximizes, the discounted return. On-policy scripts only.

    python tools/discounted.py runs/NAME results/agents/NAME ...

Plays 100 episodes with sampled actions from each checkpoint and prints means with standard errors.
"""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def play(folder: Path, episodes: int) -> dict[str, np.ndarray]:
    """Return, length and discounted return of each episode."""
    checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    script = import_module(checkpoint["args"]["exp_name"])
    args = script.Args(**checkpoint["args"])
    env = script.make_env(args.env_id)
    low, high = env.action_space.low, env.action_space.high
    policy, moments = script.Policy(env.observation_space.shape[0], len(low), False), script.RunningMoments()
    policy.load_state_dict(checkpoint["policy"])
    moments.load_state_dict(checkpoint["obs_moments"])
    mean, std, rng = policy.numpy_mean(), policy.log_std.exp().detach().numpy(), np.random.default_rng(args.seed)
    rows = []
    for number in range(episodes):
        (obs, info), rewards = env.reset(seed=args.seed + number), []
        while "episode" not in info:
            action = mean(script.normalize(obs, moments, args.norm_obs)) + std * rng.standard_normal(len(low))
            obs, reward, _, _, info = env.step(action.astype(np.float32).clip(low, high))
            rewards.append(reward)
        rows.append((sum(rewards), len(rewards), np.dot(rewards, args.gamma ** np.arange(len(rewards)))))
    return dict(zip(("return", "length", "discounted return"), np.array(rows).T, strict=True))


def main(folders: list[Path]) -> None:
    if missing := [folder for folder in folders if not (folder / "checkpoint.pt").is_file()]:
        sys.exit(f"no checkpoint in {missing[0]}")
    for folder in folders:
        played = play(folder, episodes=100)
        parts = [f"{name} {x.mean():.1f} ± {x.std(ddof=1) / len(x) ** 0.5:.1f}" for name, x in played.items()]
        print(f"{folder.name}: {', '.join(parts)}, per step {played['return'].sum() / played['length'].sum():.2f}")


if __name__ == "__main__":
    main(list(map(Path, sys.argv[1:]))) if sys.argv[1:] else sys.exit(__doc__)
