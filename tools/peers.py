"""A peer's SAC with the settings of sac.py, for returns beside ours.

    python tools/peers.py --steps 1000000 --seeds 1 2 3

It is SBX if installed (`pip install sbx-rl`, the same algorithm in JAX, about three times faster), else
stable-baselines3. What still differs from sac.py: two target Q networks instead of V, and larger initial weights in
SBX. Each run prints one line: the mean return of the last 100 training episodes, and of 10 episodes of the mean action.
"""

import argparse
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
from stable_baselines3.common.evaluation import evaluate_policy

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="HalfCheetah-v4")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--size", type=int, default=64, help="units per layer, and transitions per batch")
    args = parser.parse_args()
    package = "sbx" if find_spec("sbx") else "stable_baselines3"
    SAC = __import__(package).SAC
    for seed in args.seeds:
        settings = dict(batch_size=args.size, ent_coef=0.2, learning_starts=10_000, seed=seed, stats_window_size=100)
        model = SAC("MlpPolicy", args.env_id, policy_kwargs=dict(net_arch=[args.size] * 2), **settings)
        model.learn(args.steps, log_interval=None)
        score = np.mean([episode["r"] for episode in model.ep_info_buffer])
        mean, _ = evaluate_policy(model, model.get_env())
        name = f"{package} {version(package.replace('sbx', 'sbx-rl'))} SAC, {args.size} units, {args.env_id}"
        print(f"{name}, seed {seed}, {args.steps} steps: training {score:.1f}, mean action {mean:.1f}", flush=True)
