"""tools/discounted.py: returns of a task that remembers its rewards, played with sampled actions."""

import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT
from toy_envs import Toy

sys.path.append(str(ROOT / "tools"))
import discounted

import ppo


@pytest.fixture
def run(in_process, tmp_path):
    in_process(ppo, "--env-id", "toy_envs:Toy-v0", *SHORT[2:4], "--total-timesteps", 256, "--run-name", "r")
    return tmp_path / "runs/r"


def change(folder, **parts):
    path = folder / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    for name, values in parts.items():
        checkpoint[name] |= values
    torch.save(checkpoint, path)
    return checkpoint


def test_return_length_and_discounted_return_are_those_of_the_rewards(run):
    change(run, args=dict(gamma=0.5))
    played = discounted.play(run, episodes=3)
    episodes, rewards = [], []
    for *_, reward, terminated, truncated in Toy.made[-1].transitions:
        rewards.append(reward)
        if terminated or truncated:
            backward = 0.0
            for reward in reversed(rewards):
                backward = reward + 0.5 * backward
            episodes.append((sum(rewards), len(rewards), backward))
            rewards = []
    np.testing.assert_allclose(np.transpose(list(played.values())), episodes)
    assert list(played) == ["return", "length", "discounted return"] and len(episodes) == 3


@pytest.mark.parametrize("log_std", [-20.0, -1.0])
def test_actions_are_samples_of_the_policy_on_normalized_observations(run, log_std):
    weights = dict(log_std=torch.full((2,), log_std))
    checkpoint = change(run, policy=weights, obs_moments=dict(mean=torch.full((3,), 3.0, dtype=torch.float64)))
    discounted.play(run, episodes=200)
    policy = ppo.Policy(3, 2, orthogonal_init=False)
    policy.load_state_dict(checkpoint["policy"])
    obs, actions = (torch.as_tensor(np.array(x)) for x in list(zip(*Toy.made[-1].transitions, strict=True))[:2])
    moments = checkpoint["obs_moments"]
    inputs = ((obs - moments["mean"]) / (moments["var"] + 1e-8).sqrt()).clamp(-10, 10).float()
    means = policy.mean(inputs).detach()
    if log_std == -20:
        torch.testing.assert_close(actions, means.clamp(-0.5, 0.5), atol=1e-5, rtol=0)
    else:
        expected = torch.normal(means, np.exp(log_std), generator=torch.Generator().manual_seed(1)).clamp(-0.5, 0.5)
        torch.testing.assert_close(actions.std(), expected.std(), rtol=0.1, atol=0)
        torch.testing.assert_close(actions.mean(), expected.mean(), rtol=0, atol=0.05)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"no checkpoint in {tmp_path}"):
        discounted.main([tmp_path])
