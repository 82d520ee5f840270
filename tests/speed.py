"""Speed of the on-policy scripts beside the bare environment and the peers: `python tests/speed.py [TASK ...]`.

One thread, one after the other, in turns: every contender runs once per round, and a figure is the median of its
rounds, so that a slow minute of the machine falls on all of them. Steps per second of whole training, after a warm-up
that also pays for compiling. Only the ratios mean anything on another machine.
"""

import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import gymnasium as gym
import numpy as np
import torch

import mdpo_onpolicy
import ppo
import trpo

ROUNDS = 3
WARM_UP, MEASURED = 2, 8  # iterations of 2048 steps


def bare_environment(env_id: str, steps: int) -> float:
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


def our_script(script, env_id: str, *flags: str) -> float:
    """A whole run with W&B offline, timed between the progress bar's updates: the first iterations warm up."""
    times = []

    class Clock(script.tqdm):
        def update(self, n: int = 1) -> None:
            times.append(time.perf_counter())
            super().update(n)

    original, script.tqdm = script.tqdm, Clock
    steps = (WARM_UP + MEASURED) * 2048
    name = f"speed-{time.time_ns()}"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        script.main(["--env-id", env_id, "--total-timesteps", str(steps), "--run-name", name, "--no-cuda", *flags])
    script.tqdm = original
    return MEASURED * 2048 / (times[-1] - times[WARM_UP - 1])


def peer(algorithm, env_id: str) -> float:
    """stable-baselines3 with its defaults: one environment, 2048 steps, two layers of 64."""
    model = algorithm("MlpPolicy", env_id, device="cpu")
    model.learn(2048)
    start = time.perf_counter()
    model.learn(4 * 2048, reset_num_timesteps=False)
    return 4 * 2048 / (time.perf_counter() - start)


def main() -> None:
    from sb3_contrib import TRPO
    from stable_baselines3 import PPO

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["WANDB_SILENT"] = "true"
    for env_id in sys.argv[1:] or ["HalfCheetah-v4", "Hopper-v4"]:
        contenders = {
            "bare environment": lambda env_id=env_id: bare_environment(env_id, 20_000),
            "stable-baselines3 PPO": lambda env_id=env_id: peer(PPO, env_id),
            "sb3-contrib TRPO": lambda env_id=env_id: peer(TRPO, env_id),
        }
        for script in (mdpo_onpolicy, trpo, ppo):
            for flags in ((), ("--compile",)):
                name = " ".join((script.__name__, *flags))
                contenders[name] = lambda script=script, flags=flags, env_id=env_id: our_script(script, env_id, *flags)
        speeds = {name: [] for name in contenders}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for _ in range(ROUNDS):
                for name, run in contenders.items():
                    speeds[name].append(run())
        median = {name: statistics.median(values) for name, values in speeds.items()}
        references = ("bare environment", "stable-baselines3 PPO", "sb3-contrib TRPO")
        print(f"\n{env_id}: steps/s, median of {ROUNDS} rounds (slowest to fastest round), and the ratio to\n")
        print("| | steps/s | rounds | " + " | ".join(references) + " |\n|---|---|---|---|---|---|")
        for name, value in median.items():
            ratios = " | ".join(f"{value / median[reference]:.2f}" for reference in references)
            print(
                f"| {name} | {value:.0f} | {min(speeds[name]):.0f} to {max(speeds[name]):.0f} | {ratios} |", flush=True
            )


if __name__ == "__main__":
    main()
