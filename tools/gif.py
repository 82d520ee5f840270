"""Make results/agents.gif: agents of results/agents side by side, seen by the camera that follows the robot.

    python tools/gif.py HalfCheetah-v4__mdpo_onpolicy__loaded-gae Walker2d-v4__... Hopper-v4__...

Headless Linux needs EGL (Debian: apt install libegl1).
"""

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SIZE, FRAMES, SKIP = 200, 60, 40  # pixels, frames of the GIF, frames left out before them
RATE = 20  # frames per second; robots move in real time


def play(name: str) -> list[np.ndarray]:
    """Frames of one agent, RATE per second of simulated time."""
    script = import_module(name.split("__")[1])
    args = script.parse_args(["--evaluate", "--runs-dir", str(ROOT / "results/agents"), "--run-name", name])
    env = gym.make(args.env_id, render_mode="rgb_array", camera_name="track", width=SIZE, height=SIZE)
    low, high = env.action_space.low, env.action_space.high
    policy, moments = script.Policy(env.observation_space.shape[0], len(low), True), script.RunningMoments()
    script.load_checkpoint(args, dict(policy=policy, obs_moments=moments))
    mean_action = policy.numpy_mean()
    obs, _ = env.reset(seed=0)
    frames, time = [], 0.0
    while len(frames) < SKIP + FRAMES:
        action = mean_action(script.normalize(obs, moments, args.norm_obs)).clip(low, high)
        obs, _, terminated, truncated, _ = env.step(action)
        time += env.unwrapped.dt
        while time * RATE > len(frames):
            frames.append(env.render())
        if terminated or truncated:
            obs, _ = env.reset()
    return frames[SKIP:]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    warnings.filterwarnings("ignore", message=".*out of date.*")
    films = [play(name) for name in sys.argv[1:]]
    frames = [np.concatenate(images, axis=1) for images in zip(*films, strict=True)]
    frames = [np.asarray(Image.fromarray(x).quantize(48).convert("RGB")) for x in frames]  # a third of the size
    imageio.imwrite(ROOT / "results/agents.gif", frames, duration=1000 / RATE, loop=0)
    print(f"results/agents.gif: {(ROOT / 'results/agents.gif').stat().st_size / 1e6:.2f} MB")
