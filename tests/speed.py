"""Speed of the scripts beside the bare environment and the peers: `python tests/speed.py [--off-policy] [TASK ...]`.

One thread, one after the other, in turns: every contender runs once a round, and a figure is the median of its rounds,
so that a slow minute of the machine falls on all of them. Steps per second of whole training with W&B offline, after a
warm-up that also pays for compiling. Only the ratios mean anything on another machine. SBX takes part if installed.
"""

import argparse
import contextlib
import importlib
import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_SILENT"] = "true"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # SBX on one thread too
sys.path.insert(0, str(Path(__file__).parents[1]))

import gymnasium as gym
import numpy as np
import torch


def bare_environment(env_id: str, steps: int = 20_000) -> float:
    """The environment in a bare loop, with actions drawn beforehand."""
    env = gym.make(env_id)
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, *env.action_space.shape)).astype(np.float32)
    start = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return steps / (time.perf_counter() - start)


def our_script(name: str, env_id: str, warm_up: int, steps: int, *flags: str) -> float:
    """A whole run, timed at the progress bar's updates from the warm-up's end on."""
    script, times = importlib.import_module(name), {}

    class Clock(script.tqdm):
        def update(self, n: int = 1) -> None:
            times[self.n + n] = time.perf_counter()
            super().update(n)

    original, script.tqdm = script.tqdm, Clock
    arguments = ["--env-id", env_id, "--total-timesteps", str(warm_up + steps), "--no-cuda", *flags]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        script.main([*arguments, "--run-name", f"speed-{time.time_ns()}"])
    script.tqdm = original
    return steps / (times[warm_up + steps] - times[warm_up])


def peer(algorithm, env_id: str, warm_up: int, steps: int, **settings) -> float:
    model = algorithm("MlpPolicy", env_id, **settings)
    model.learn(warm_up)
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return steps / (time.perf_counter() - start)


def on_policy(env_id: str) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Ours and stable-baselines3's with their defaults: one environment, 2048 steps, two layers of 64."""
    from sb3_contrib import TRPO
    from stable_baselines3 import PPO

    contenders = {
        "bare environment": partial(bare_environment, env_id),
        "stable-baselines3 PPO": partial(peer, PPO, env_id, 2048, 4 * 2048, device="cpu"),
        "sb3-contrib TRPO": partial(peer, TRPO, env_id, 2048, 4 * 2048, device="cpu"),
    }
    references = list(contenders)
    for name in ("mdpo_onpolicy", "trpo", "ppo"):
        for flags in ((), ("--compile",)):
            contenders[" ".join((name, *flags))] = partial(our_script, name, env_id, 2 * 2048, 8 * 2048, *flags)
    return contenders, references


def off_policy(env_id: str) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Both presets, beside SAC of the same size with the same fixed entropy coefficient."""
    from stable_baselines3 import SAC

    peers = {"stable-baselines3 SAC": partial(SAC, device="cpu")}
    with contextlib.suppress(ImportError):
        from sbx import SAC as SBX

        peers["SBX SAC"] = SBX
    contenders = {"bare environment": partial(bare_environment, env_id)}
    for preset, size, steps in (("minimal", 64, 2000), ("loaded", 256, 600)):
        settings = dict(batch_size=size, ent_coef=0.2, learning_starts=500, policy_kwargs=dict(net_arch=[size, size]))
        for name, algorithm in peers.items():
            contenders[f"{name}, {size}"] = partial(peer, algorithm, env_id, 700, steps, **settings)
        for name in ("mdpo_offpolicy", "mdpo_tsallis", "sac"):
            for flags in ((), ("--compile",)):
                run = partial(our_script, name, env_id, 700, steps, "--preset", preset, "--learning-starts", "500")
                contenders[f"{' '.join((name, *flags))}, {size}"] = partial(run, *flags)
    return contenders, [name for name in contenders if "SAC" in name]


def matrix_product_share(size: int, updates: int = 50) -> float:
    """The share of an eager update of mdpo_offpolicy that is spent in matrix products, by torch's profiler."""
    mdpo = importlib.import_module("mdpo_offpolicy")
    args = mdpo.Args(hidden_size=size, batch_size=size, bregman_stepsize=0.3)
    agent = mdpo.Agent(17, -np.ones(6, np.float32), np.ones(6, np.float32), args)
    batch, noise = torch.rand(size, 2 * 17 + 6 + 2), torch.randn(size, 6)
    mdpo.update(agent, batch, noise)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        for _ in range(updates):
            mdpo.update(agent, batch, noise)
        elapsed = time.perf_counter() - start
    products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    return sum(e.self_cpu_time_total for e in profile.key_averages() if e.key in products) / 1e6 / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=None, help="default: HalfCheetah-v4, on-policy Hopper-v4 too")
    parser.add_argument("--off-policy", action="store_true", help="the off-policy scripts, not the on-policy ones")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for env_id in options.tasks or ["HalfCheetah-v4", "Hopper-v4"][: 1 if options.off_policy else 2]:
        contenders, references = (off_policy if options.off_policy else on_policy)(env_id)
        speeds = {name: [] for name in contenders}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for _ in range(options.rounds):
                for name, run in contenders.items():
                    speeds[name].append(run())
        median = {name: statistics.median(values) for name, values in speeds.items()}
        print(f"\n{env_id}: steps/s, median of {options.rounds} rounds, the rounds' range, and the ratio to\n")
        print("| | steps/s | range | " + " | ".join(references) + " |\n|---|---|---|" + "---|" * len(references))
        for name, value in median.items():
            ratios = " | ".join(f"{value / median[reference]:.2f}" for reference in references)
            print(f"| {name} | {value:.0f} | {min(speeds[name]):.0f} to {max(speeds[name]):.0f} | {ratios} |")
    if options.off_policy:
        for size in (64, 256):
            print(f"\nmatrix products at {size} units: {matrix_product_share(size):.0%} of an eager update")


if __name__ == "__main__":
    main()
