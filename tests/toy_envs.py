"""Small tasks that no package has. `toy_envs:Toy-v0` makes one in any process that finds this file."""

from typing import ClassVar

import gymnasium as gym
import numpy as np


class Toy(gym.Env):
    """A random walk that remembers its transitions. Its episodes are terminated and truncated in turn."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(-0.5, 0.5, (2,))
    made: ClassVar = []  # every instance

    def __init__(self):
        self.transitions, self.episode = [], 0
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        self.state = self.np_random.normal(3, 2, 3).astype(np.float32)
        return self.state, {}

    def step(self, action):
        before, self.time = self.state, self.time + 1
        self.state = (before + self.np_random.normal(0, 1, 3) + action.sum()).astype(np.float32)
        reward = float(self.state[0] - action @ action)
        over = self.time == 5 + self.episode % 4
        ends = over and self.episode % 2 == 1, over and self.episode % 2 == 0
        self.transitions.append((before, action.copy(), self.state, reward, *ends))
        return self.state, reward, *ends, {}


class Broken(Toy):
    """A Toy that returns something not finite at its 300th step."""

    def __init__(self, obs: float = 0.0, reward: float = 0.0):
        super().__init__()
        self.fault = np.float32([obs, 0, 0]), reward

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if len(self.transitions) == 300:
            obs, reward = obs + self.fault[0], reward + self.fault[1]
        return obs, reward, *rest


class Clockwork(gym.Env):
    """Without chance: every episode starts in the same state and has 8 steps."""

    observation_space, action_space = Toy.observation_space, Toy.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.state = 0, np.ones(3, np.float32)
        return self.state, {}

    def step(self, action):
        self.time, self.state = self.time + 1, (0.9 * self.state + action.sum()).astype(np.float32)
        return self.state, float(self.state[0] - action @ action), self.time == 8, False, {}


class Drawn(Toy):
    """A Toy to look at."""

    metadata: ClassVar = dict(render_modes=["rgb_array"], render_fps=10)

    def __init__(self, render_mode: str | None = None):
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> np.ndarray:
        return np.full((32, 32, 3), 20 * self.time, np.uint8)


class DictObs(Toy):
    observation_space = gym.spaces.Dict(position=Toy.observation_space)


class Unbounded(Toy):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


gym.register("Toy-v0", Toy, disable_env_checker=True)
gym.register("NanObservation-v0", Broken, disable_env_checker=True, kwargs=dict(obs=np.nan))
gym.register("InfiniteReward-v0", Broken, disable_env_checker=True, kwargs=dict(reward=np.inf))
gym.register("Clockwork-v0", Clockwork, disable_env_checker=True)
gym.register("Drawn-v0", Drawn, disable_env_checker=True)
gym.register("DictObs-v0", DictObs, disable_env_checker=True)
gym.register("Unbounded-v0", Unbounded, disable_env_checker=True)
