"""A peer's SAC with the settings of sac.py, or its PPO with those of ppo.py, for returns beside ours.

    python tools/peers.py --steps 1000000 --seeds 1 2 3
    python tools/peers.py --algorithm ppo --env-id Humanoid-v4

SAC is SBX's if installed (`pip install sbx-rl`, the same algorithm in JAX, about three times faster), else
stable-baselines3's. What still differs from sac.py: two target Q networks instead of V, and larger initial weights in
SBX. PPO is stable-baselines3's. What still differs from ppo.py: advantages are normalized per minibatch, the gradients
of policy and critic are clipped together, and normalization statistics change at every step.

Each run prints one line: the mean return of the last 100 training episodes, and of 10 episodes of the mean action.
"""

import argparse
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize


def make_sac(package: str, env_id: str, size: int, **options):
    settings = dict(batch_size=size, ent_coef=0.2, learning_starts=10_000)
    return __import__(package).SAC("MlpPolicy", env_id, policy_kwargs=dict(net_arch=[size] * 2), **settings, **options)


def make_ppo(env_id: str, **options):
    env = VecNormalize(make_vec_env(env_id, seed=options["seed"]))
    return sb3.PPO("MlpPolicy", env, lambda left: 3e-4 * left, clip_range_vf=0.2, device="cpu", **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("sac", "ppo"), default="sac")
    parser.add_argument("--env-id", default="HalfCheetah-v4")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--size", type=int, default=64, help="SAC: units per layer, and transitions per batch")
    parser.add_argument("--verbose", action="store_true", help="print stable-baselines3's log during training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    package = "sbx" if args.algorithm == "sac" and find_spec("sbx") else "stable_baselines3"
    for seed in args.seeds:
        options = dict(seed=seed, stats_window_size=100, verbose=int(args.verbose))
        sac = args.algorithm == "sac"
        model = make_sac(package, args.env_id, args.size, **options) if sac else make_ppo(args.env_id, **options)
        model.learn(args.steps, log_interval=10 if args.verbose else None)
        score = np.mean([episode["r"] for episode in model.ep_info_buffer])
        model.get_env().training = False  # VecNormalize keeps its statistics
        mean, _ = evaluate_policy(model, model.get_env())
        name = f"{package} {version(package.replace('sbx', 'sbx-rl'))} {args.algorithm.upper()}"
        name += f"{f', {args.size} units' if sac else ''}, {args.env_id}"
        print(f"{name}, seed {seed}, {args.steps} steps: training {score:.1f}, mean action {mean:.1f}", flush=True)
