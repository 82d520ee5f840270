"""The numbers of the on-policy scripts against definitions, other libraries and cases worked out by hand."""

import copy
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ON_POLICY, timeless
from scipy.integrate import quad
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close
from toy_envs import Toy

import mdpo_onpolicy as mdpo
import ppo
import trpo

PENDULUM = ("--env-id", "InvertedPendulum-v4", "--num-steps", 128, "--critic-epochs", 2)


@pytest.fixture(params=ON_POLICY)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_policy(module):
    policy = module.Policy(3, 2, orthogonal_init=False).double()
    nn.init.normal_(policy.log_std, 0, 0.3)
    return policy


def make_batch(policy, rows=100, scale=1.0):
    """Samples of the policy, with advantages that depend on the action."""
    with torch.no_grad():
        obs = torch.randn(rows, 3, dtype=policy.log_std.dtype)
        pi = policy(obs)
        actions = pi.sample()
        advantages = scale * (torch.tanh(actions.sum(-1)) + 0.1 * obs[:, 0])
        batch = dict(obs=obs, actions=actions, means=pi.loc, std=pi.scale.clone(), advantages=advantages)
        return batch | dict(log_probs=joint(pi).log_prob(actions))


def joint(pi):
    return Independent(Normal(pi.loc, pi.scale), 1)


def old(batch):
    return Independent(Normal(batch["means"], batch["std"]), 1)


def perturb(policy, size=0.05):
    for parameter in policy.parameters():
        parameter.data += size * torch.randn_like(parameter)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def gradient_of(value, network):
    return flat(torch.autograd.grad(value, list(network.parameters())))


def vanilla_gradient(policy, batch):
    log_prob = joint(policy(batch["obs"])).log_prob(batch["actions"])
    return gradient_of((log_prob * batch["advantages"]).mean(), policy)


def gradient_left_by(function, network, *given):
    """The loss that a function returns and the gradient that it leaves in the parameters, without clipping."""
    network.zero_grad()
    with mock.patch("torch.nn.utils.clip_grad_norm_"):
        loss = function(network, *given)
    return loss, flat(p.grad for p in network.parameters())


def mdpo_gradient(policy, batch, inverse_t=1.0, q=1.0):
    return gradient_left_by(mdpo.policy_backward, policy, batch, torch.tensor(inverse_t), q)


def ppo_gradient(policy, batch, kl_coef=1.0, **flags):
    args, rows = ppo.Args(**dict(objective="kl-fixed") | flags), torch.arange(len(batch["obs"]))
    return gradient_left_by(ppo.policy_backward, policy, batch, rows, torch.tensor(kl_coef), args)


def checkpoint(name):
    return torch.load(Path("runs", name, "checkpoint.pt"), weights_only=True)


def iterations(points):
    return [point for point in points if "losses/kl" in point]


# ---------------------------------------------------------------------------------------------- shared numerics


def test_gaussian_kl_and_log_probabilities_are_torchs(script):
    mean_p, mean_q = torch.randn(2, 50, 4, dtype=torch.float64)
    std_p, std_q = torch.randn(2, 4, dtype=torch.float64).exp().unbind()
    p, q = Normal(mean_p, std_p), Normal(mean_q, std_q)
    assert_close(script.gaussian_kl(p, q), kl_divergence(Independent(p, 1), Independent(q, 1)))
    assert_close(script.gaussian_kl(q, p), kl_divergence(Independent(q, 1), Independent(p, 1)))
    policy = make_policy(script)
    obs, actions = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    full = MultivariateNormal(policy.mean(obs), torch.diag(torch.exp(2 * policy.log_std)))
    assert_close(policy(obs).log_prob(actions).sum(-1), full.log_prob(actions))


def random_rollout(steps=60, environments=4):
    rng = np.random.default_rng(0)
    rewards, values, last = rng.normal(size=(3, steps, environments))
    terminated, truncated = rng.random((2, steps, environments)) < 0.08
    terminated[7, 0] = truncated[7, 0] = truncated[-1, 1] = terminated[-1, 2] = True  # both at once, and at the edge
    done = terminated | truncated
    next_values = np.where(done, last, np.roll(values, -1, axis=0))
    next_values[-1] = last[-1]
    return rewards, values, next_values, terminated, done


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_gae_is_the_discounted_sum_of_its_definition(script, gae_lambda):
    rewards, values, next_values, terminated, done = rollout = random_rollout()
    expected = np.zeros_like(rewards)
    for t, i in np.ndindex(rewards.shape):
        for later in range(t, len(rewards)):
            target = rewards[later, i] if terminated[later, i] else rewards[later, i] + 0.9 * next_values[later, i]
            expected[t, i] += (0.9 * gae_lambda) ** (later - t) * (target - values[later, i])
            if done[later, i]:
                break
    np.testing.assert_allclose(script.gae(*rollout, 0.9, gae_lambda), expected, rtol=1e-12, atol=1e-12)


def test_gae_agrees_with_stable_baselines3(script):
    rewards, values, next_values, terminated, done = rollout = random_rollout()
    box = gym.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(len(rewards), box, box, "cpu", gae_lambda=0.95, gamma=0.99, n_envs=rewards.shape[1])
    buffer.rewards = rewards + 0.99 * next_values * (done & ~terminated)  # how sb3 bootstraps a truncated episode
    buffer.values, buffer.episode_starts = values, np.roll(done, 1, axis=0)
    buffer.compute_returns_and_advantage(torch.as_tensor(next_values[-1]), done[-1])
    np.testing.assert_allclose(script.gae(*rollout, 0.99, 0.95), buffer.advantages, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_running_moments_are_those_of_the_whole_stream(script, shape):
    stream = np.random.default_rng(0).normal(1e3, 3, (1000, *shape))
    moments, restored = (script.RunningMoments(shape=shape) for _ in range(2))
    for batch in np.split(stream, [1, 8, 300, 303, 900]):
        restored.load_state_dict(moments.state_dict())
        moments.update(batch)
        restored.update(batch)
    for each in (moments, restored):  # Gymnasium starts with a mean of 0 and a variance of 1 that count 1e-4 samples
        np.testing.assert_allclose(each.mean, stream.mean(0), rtol=1e-6)
        np.testing.assert_allclose(each.var, stream.var(0) + stream.mean(0) ** 2 * 1e-7, rtol=1e-3)


def test_a_constant_observation_is_normalized_to_something_finite_after_millions_of_steps(script):
    """Some tasks have observations that never change, such as a mass or the position of a target."""
    constants = np.linspace(1, 9, 8) * 10.0 ** np.arange(-1, 7)
    moments = script.RunningMoments(shape=8)
    for _ in range(1000):
        moments.update(np.tile(constants, (2048, 1)))
    np.testing.assert_allclose(moments.mean, constants, rtol=1e-9)
    assert (abs(script.normalize(constants, moments, True)) < 1e-3).all()  # a NaN is not less


def test_before_the_first_sample_normalizing_changes_nothing(script):
    obs = np.linspace(-9, 9, 3)
    np.testing.assert_allclose(script.normalize(obs, script.RunningMoments(shape=3), True), obs, rtol=1e-6)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_networks_have_two_tanh_layers_of_64_and_the_initialization_asked_for(script, orthogonal):
    network = script.mlp(5, 2, orthogonal, last_gain=0.01)
    w1, b1, w2, b2, w3, b3 = network.parameters()
    obs = torch.randn(30, 5)
    assert w1.shape == (64, 5) and w2.shape == (64, 64)
    assert_close(network(obs), torch.tanh(torch.tanh(obs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3)
    products = (w1.T @ w1, w2.T @ w2, w3 @ w3.T)
    are_orthogonal = [
        torch.allclose(product, gain * torch.eye(len(product)), atol=1e-5)
        for product, gain in zip(products, (2, 2, 1e-4), strict=True)
    ]
    assert are_orthogonal == [orthogonal] * 3
    assert all(bool((b == 0).all()) is orthogonal for b in (b1, b2, b3))
    assert torch.equal(script.Policy(5, 2, orthogonal).log_std, torch.zeros(2))


@pytest.mark.parametrize("norm_obs", [True, False])
def test_the_acting_policy_is_the_trained_one_on_normalized_observations(script, norm_obs):
    policy, moments = script.Policy(3, 2, orthogonal_init=False), script.RunningMoments(shape=3)
    seen = np.random.default_rng(1).normal(2, 5, (100, 3))
    moments.update(seen)
    obs = np.random.default_rng(0).normal(2, 5, (40, 3))
    obs[0, 0] = 1e4  # beyond the clip at 10
    normalized = np.clip((obs - seen.mean(0)) / seen.std(0), -10, 10)
    inputs = torch.as_tensor(normalized if norm_obs else obs, dtype=torch.float32)
    ours = script.normalize(obs, moments, norm_obs)
    assert_close(torch.as_tensor(ours), inputs, rtol=1e-5, atol=1e-5)
    actions = policy.numpy_mean()(ours)
    assert actions.dtype == np.float32
    assert_close(torch.as_tensor(actions), policy(inputs).loc.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "old_value", "target", "clipped", "plain"),
    [
        (1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.5),  # the clip at 0.2 holds the value back, and its error is the larger
        (1.0, 0.0, 0.0, 0.5, 0.5),  # the clip would lower the error
        (-1.0, 0.0, -2.0, 0.5 * 1.8**2, 0.5),
        (0.1, 0.0, 2.0, 0.5 * 1.9**2, 0.5 * 1.9**2),  # within the clip
    ],
)
def test_value_loss_by_hand(script, value, old_value, target, clipped, plain):
    tensors = [torch.tensor([number, number]) for number in (value, old_value, target)]
    assert_close(script.value_loss(*tensors, True), torch.tensor(clipped))
    assert_close(script.value_loss(*tensors, False), torch.tensor(plain))


@pytest.mark.parametrize("clip", [True, False])
def test_the_critics_gradient_is_that_of_the_value_loss(script, clip):
    critic, rows = script.mlp(3, 1, True, 1.0).double(), torch.randperm(30)[:20]
    batch = dict(obs=torch.randn(30, 3).double(), values=torch.randn(30).double(), returns=torch.randn(30).double())
    loss, gradient = gradient_left_by(script.critic_backward, critic, batch, rows, clip)
    obs, old_values, returns = (batch[name][rows] for name in ("obs", "values", "returns"))
    values = critic(obs)[:, 0]
    error = (values - returns).abs()
    if clip:
        error = torch.maximum(error, (old_values + (values - old_values).clamp(-0.2, 0.2) - returns).abs())
    expected = (error**2).mean() / 2
    assert_close(loss, expected.detach())
    assert_close(gradient, gradient_of(expected, critic))


def test_the_critic_sees_every_sample_once_an_epoch_in_a_new_order(script, in_process, monkeypatch):
    seen, backward = [], script.critic_backward
    monkeypatch.setattr(script, "critic_backward", lambda *given: seen.append(given[2]) or backward(*given))
    flags = ("--critic-minibatch-size", 48, "--critic-epochs", 3, "--total-timesteps", 256, "--run-name", "r")
    in_process(script, *PENDULUM, *flags)
    assert [len(rows) for rows in seen] == [48, 48, 32] * 3 * 2
    epochs = [torch.cat(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert all(torch.equal(epoch.sort().values, torch.arange(128)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 6


def test_an_iteration_acts_fits_and_logs_as_it_should(script, in_process, monkeypatch):
    """Noise of the policy's std, critic epochs over the rollout's returns, and the explained variance by hand."""
    seen, backward = [], script.critic_backward

    def watched(critic, batch, rows, clip):
        seen.append((copy.deepcopy(batch), len(rows)))
        return backward(critic, batch, rows, clip)

    class Narrow(script.Policy):
        def __init__(self, *given):
            super().__init__(*given)
            self.log_std.data.fill_(-1.5)

    monkeypatch.setattr(script, "critic_backward", watched)
    monkeypatch.setattr(script, "Policy", Narrow)
    flags = ("--num-steps", 1024, "--total-timesteps", 1024, "--critic-minibatch-size", 256, "--run-name", "r")
    (point,) = iterations(in_process(script, *PENDULUM, *flags).points)
    assert [size for _, size in seen] == [256] * 4 * 2
    batch = seen[0][0]
    noise = (batch["actions"] - batch["means"]) / np.exp(-1.5)
    assert noise.std().item() == pytest.approx(1, rel=0.1) and abs(noise.mean().item()) < 0.1
    values, returns = batch["values"].double(), batch["returns"].double()
    assert point["losses/explained_variance"] == pytest.approx((1 - (returns - values).var() / returns.var()).item())
    advantages = returns - values
    standardized = (advantages - advantages.mean()) / advantages.std(correction=0)
    assert_close(batch["advantages"].double(), standardized, rtol=1e-4, atol=1e-5)


@pytest.fixture
def watched_run(in_process, monkeypatch):
    """Three iterations on Toy: for each the networks before its updates, what gae() was given, and what happened."""

    def run(script, *flags, num_envs=1):
        rollouts, networks, moments = [], [], []
        gae, mlp, backward = script.gae, script.mlp, script.critic_backward

        class Watched(script.Policy):
            def __init__(self, *given):
                super().__init__(*given)
                networks.append(self)

        class WatchedMoments(script.RunningMoments):
            def __init__(self, **given):
                super().__init__(**given)
                moments.append(self)

        def watched_gae(*given):
            policy, critic, obs_moments = map(copy.deepcopy, (*networks[1:], moments[0]))
            state = dict(policy=policy, critic=critic, obs_moments=obs_moments)
            rollouts.append(SimpleNamespace(gae=copy.deepcopy(given), **state))
            return gae(*given)

        def watched_backward(critic, batch, *rest):
            rollouts[-1].batch = copy.deepcopy(batch)
            return backward(critic, batch, *rest)

        monkeypatch.setattr(
            script, "mlp", lambda *given, **named: networks.append(mlp(*given, **named)) or networks[-1]
        )
        monkeypatch.setattr(script, "Policy", Watched)
        monkeypatch.setattr(script, "gae", watched_gae)
        monkeypatch.setattr(script, "critic_backward", watched_backward)
        monkeypatch.setattr(script, "RunningMoments", WatchedMoments)
        Toy.made.clear()
        sizes = ("--num-steps", 50, "--num-envs", num_envs, "--total-timesteps", 150 * num_envs)
        points = in_process(script, "--env-id", "Toy-v0", "--run-name", "r", *sizes, *flags).points
        steps = zip(*(env.transitions for env in Toy.made if env.transitions), strict=True)
        happened = [np.array(column) for column in zip(*(zip(*step, strict=True) for step in steps), strict=True)]
        names = ("obs", "actions", "next_obs", "rewards", "terminated", "truncated")
        for k, rollout in enumerate(rollouts):
            vars(rollout).update({n: x[50 * k : 50 * (k + 1)] for n, x in zip(names, happened, strict=True)})
        assert len(rollouts) == 3 and len(networks) == 3
        return SimpleNamespace(rollouts=rollouts, points=points, policy=networks[1])

    return run


def normalized(moments, obs):
    """By the definition."""
    return torch.as_tensor((obs - moments.mean) / (moments.var + 1e-8) ** 0.5).clamp(-10, 10).float()


def by_environment(tensor, num_envs):
    """A batch of samples as an array of steps and environments."""
    return tensor.view(num_envs, 50, *tensor.shape[1:]).transpose(0, 1).numpy()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_truncation_bootstraps_from_the_last_observation_and_termination_does_not(script, watched_run, num_envs):
    for rollout in watched_run(script, "--no-norm-reward", num_envs=num_envs).rollouts:
        rewards, values, next_values, terminated, done, gamma, gae_lambda = rollout.gae
        assert (gamma, gae_lambda) == (0.99, 0.95)
        with torch.no_grad():
            expected, bootstrap = (
                rollout.critic(normalized(rollout.obs_moments, x)).squeeze(-1) for x in (rollout.obs, rollout.next_obs)
            )
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(next_values, bootstrap, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rewards, rollout.rewards)
        np.testing.assert_array_equal(terminated, rollout.terminated)
        np.testing.assert_array_equal(done, rollout.terminated | rollout.truncated)
        assert rollout.terminated.any() and rollout.truncated.any()
        returns = by_environment(rollout.batch["returns"], num_envs)
        ends, cuts = rollout.terminated, rollout.truncated
        np.testing.assert_allclose(returns[ends], rollout.rewards[ends], rtol=1e-4, atol=1e-4)
        bootstrapped = rollout.rewards + 0.99 * bootstrap.numpy()
        np.testing.assert_allclose(returns[cuts], bootstrapped[cuts], rtol=1e-4, atol=1e-4)


def test_the_batch_is_what_the_policy_did_and_saw(script, watched_run):
    run = watched_run(script, num_envs=2)
    for rollout in run.rollouts:
        batch = rollout.batch
        actions = by_environment(batch["actions"], 2)
        np.testing.assert_allclose(actions.clip(-0.5, 0.5), rollout.actions, rtol=1e-6)  # only the task's are clipped
        assert (abs(actions) > 0.5).any()
        inputs = normalized(rollout.obs_moments, rollout.obs).numpy()
        np.testing.assert_allclose(by_environment(batch["obs"], 2), inputs, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            old = Normal(rollout.policy.mean(batch["obs"]), rollout.policy.log_std.exp())
        assert_close(batch["log_probs"], old.log_prob(batch["actions"]).sum(-1))
    with torch.no_grad():
        new = Normal(run.policy.mean(batch["obs"]), run.policy.log_std.exp())
    last = iterations(run.points)[-1]
    kl = kl_divergence(Independent(new, 1), Independent(old, 1)).mean().item()
    assert last["losses/kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6) and kl > 1e-6
    assert last["losses/entropy"] == pytest.approx(Independent(new, 1).entropy().mean().item(), rel=1e-5)


def test_normalization_is_by_the_statistics_of_all_that_was_seen_before(script, watched_run):
    run = watched_run(script, num_envs=2)
    discounted, past, seen = [], np.zeros(2), np.zeros((0, 3))
    for rollout in run.rollouts:
        if len(seen):  # observations: those of earlier iterations; rewards: also those of this one
            np.testing.assert_allclose(rollout.obs_moments.mean, seen.mean(0), rtol=1e-5)
            np.testing.assert_allclose(rollout.obs_moments.var, seen.var(0), rtol=1e-5)
        seen = np.concatenate([seen, rollout.obs.reshape(-1, 3)])
        for reward, done in zip(rollout.rewards, rollout.terminated | rollout.truncated, strict=True):
            past = 0.99 * past + reward
            discounted.append(past)
            past = past * ~done
        scaled = np.clip(rollout.rewards / np.std(discounted), -10, 10)
        np.testing.assert_allclose(rollout.gae[0], scaled, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- MDPO


FIRST_STEPS = [(mdpo_gradient, dict(inverse_t=t, q=q)) for t in (1.0, 1e6) for q in (1.0, 0.7, 2.0)] + [
    (ppo_gradient, flags)
    for flags in (dict(objective="clip"), dict(kl_coef=1e6), dict(kl_coef=1e6, kl_direction="new-old"), dict())
]


@pytest.mark.parametrize(("gradient_function", "flags"), FIRST_STEPS)
def test_the_first_gradient_of_an_iteration_is_the_vanilla_policy_gradient(gradient_function, flags):
    policy = make_policy(mdpo if gradient_function is mdpo_gradient else ppo)
    batch = make_batch(policy)
    _, gradient = gradient_function(policy, batch, **flags)
    assert_close(gradient, -vanilla_gradient(policy, batch), rtol=1e-5, atol=1e-7)  # it descends the loss


def test_mdpos_kl_has_the_new_policy_first():
    policy = make_policy(mdpo)
    batch = make_batch(policy, scale=0.0)
    perturb(policy)
    loss, gradient = mdpo_gradient(policy, batch, inverse_t=0.01)
    new = joint(policy(batch["obs"]))
    expected, swapped = kl_divergence(new, old(batch)).mean(), kl_divergence(old(batch), new).mean()
    assert_close(loss, 0.01 * expected.detach(), rtol=1e-6, atol=0)
    assert_close(gradient, gradient_of(0.01 * expected, policy), rtol=1e-6, atol=1e-9)
    assert abs(expected - swapped) > 0.01 * expected  # so that the above would notice


def test_mdpos_objective_rises_over_the_steps_of_an_iteration():
    policy = mdpo.Policy(3, 2, orthogonal_init=True)
    batch, optimizer = make_batch(policy, 500), torch.optim.Adam(policy.parameters(), lr=3e-4)
    losses = []
    for _ in range(10):
        losses.append(mdpo_gradient(policy, batch, inverse_t=2.0)[0])
        optimizer.step()
    assert (torch.stack(losses).diff() < 0).all()


@pytest.mark.parametrize("loss_function", [mdpo.mdpo_loss, ppo.kl_loss])
@pytest.mark.parametrize("t", [1.0, 0.3])
def test_on_finite_actions_the_loss_is_least_at_the_exponentiated_advantages(loss_function, t):
    pi_k = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).double() / 16
    advantages = torch.tensor([-1.0, 0.5, 2.0, 0.0, 1.0]).double()
    samples = torch.arange(5).repeat_interleave(
        (pi_k * 16).long()
    )  # each action as often as pi_k takes it: exact means
    logits = pi_k.log().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_change=0, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        new = logits.softmax(0)
        kl = (new * (new / pi_k).log()).sum()
        value = loss_function((new / pi_k)[samples], advantages[samples], kl.expand(16), 1 / t)
        value.backward()
        return value

    optimizer.step(loss)
    expected = pi_k * torch.exp(t * advantages)
    assert_close(logits.softmax(0).detach(), expected / expected.sum(), rtol=0, atol=1e-6)


def test_mdpos_steps_use_the_whole_batch_and_the_annealed_stepsize(in_process, monkeypatch):
    calls, gradient, rates, step = [], mdpo.policy_backward, [], torch.optim.Adam.step

    def spy(policy, batch, inverse_t, q):
        calls.append((len(batch["obs"]), float(inverse_t), q))
        return gradient(policy, batch, inverse_t, q)

    monkeypatch.setattr(mdpo, "policy_backward", spy)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    flags = ("--num-envs", 2, "--num-steps", 64, "--total-timesteps", 512, "--sgd-steps", 3, "--tsallis-q", 1.5)
    flags += ("--critic-learning-rate", 2e-3)
    points = iterations(in_process(mdpo, *PENDULUM, *flags, "--anneal-lr", "--run-name", "r").points)
    t = [1, 3 / 4, 2 / 4, 1 / 4]
    assert calls == [(128, pytest.approx(1 / t_k), 1.5) for t_k in t for _ in range(3)]
    assert [p["charts/t_k"] for p in points] == t
    assert [p["charts/learning_rate"] for p in points] == [pytest.approx(3e-4 * t_k) for t_k in t]
    policy_then_critic = [3e-4] * 3 + [2e-3] * 2
    assert rates == [pytest.approx(rate * t_k) for t_k in t for rate in policy_then_critic]


@pytest.mark.parametrize(("module", "name"), [(mdpo, "mdpo_loss"), (ppo, "clip_loss")])
def test_the_norm_of_the_policys_gradient_is_clipped_at_one_half(module, name, in_process, monkeypatch):
    loss, norms, step = getattr(module, name), [], torch.optim.Adam.step

    def watched(self):
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norms.append(flat(gradients).norm().item())
        return step(self)

    monkeypatch.setattr(module, name, lambda *given: 100 * loss(*given))
    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    in_process(module, *PENDULUM, "--total-timesteps", 128, "--run-name", "r")
    assert norms[:10] == [pytest.approx(0.5, rel=1e-4)] * 10  # the policy's steps come first


# ---------------------------------------------------------------------------------- the Tsallis divergence


QS = (0.5, 0.8, 1.2, 1.5, 2.0)


def potential_divergence(p, p_k, q):
    """The pointwise Bregman divergence of x log_q x, which needs no closed form."""
    slope = (q * p_k ** (q - 1) - 1) / (q - 1)
    return (p**q - p) / (q - 1) - (p_k**q - p_k) / (q - 1) - slope * (p - p_k)


@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize(
    ("mean", "std", "std_k"), [(0.3, 0.9, 0.7), (-0.5, 0.4, 1.3), (0.0, 1.4, 1.2), (2.0, 1.0, 1.0)]
)
def test_the_tsallis_divergence_is_the_integral_of_its_definition(q, mean, std, std_k):
    pi, pi_k = (Normal(*torch.tensor([[m], [s]], dtype=torch.float64)) for m, s in ((mean, std), (0.1, std_k)))

    def density(x, m, s):
        return np.exp(-0.5 * ((x - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))

    def integral(function):
        return quad(function, -18, 18, epsabs=1e-13, epsrel=1e-11, limit=400, points=[mean, 0.1])[0]

    bregman = integral(lambda x: potential_divergence(density(x, mean, std), density(x, 0.1, std_k), q))
    expected = bregman / integral(lambda x: density(x, 0.1, std_k) ** q)
    assert mdpo.tsallis_divergence(pi, pi_k, q).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("q", [0.8, 1.5, 2.0])
def test_the_tsallis_divergence_in_three_dimensions_is_that_of_monte_carlo(q):
    pi = Normal(torch.tensor([0.2, -0.1, 0.0]).double(), torch.tensor([0.9, 1.1, 0.6]).double())
    pi_k = Normal(torch.tensor([0.0, 0.1, 0.1]).double(), torch.tensor([1.0, 1.0, 0.7]).double())
    x = pi_k.sample((400_000,))
    p, p_k = (joint(policy).log_prob(x).exp() for policy in (pi, pi_k))
    samples = potential_divergence(p, p_k, q) / p_k
    # The integral of pi_k^q is known without sampling.
    normalizer = ((2 * torch.pi * pi_k.scale**2) ** ((1 - q) / 2) * q**-0.5).prod()
    standard_error = (samples.std() / len(samples) ** 0.5 / normalizer).item()
    divergence = mdpo.tsallis_divergence(pi, pi_k, q).item()
    assert standard_error < 0.02 * divergence
    assert (samples.mean() / normalizer).item() == pytest.approx(divergence, abs=4 * standard_error)


@pytest.mark.parametrize("q", [*QS, 1.0])
def test_the_tsallis_divergence_and_its_gradient_vanish_at_pi_k_only(q):
    mean, log_std = torch.randn(2, 6, 4, dtype=torch.float64).mul(0.3).unbind()
    pi_k = Normal(mean.clone(), log_std.exp())
    mean.requires_grad_()
    log_std.requires_grad_()
    at = mdpo.tsallis_divergence(Normal(mean, log_std.exp()), pi_k, q)
    assert_close(at, torch.zeros_like(at))
    for gradient in torch.autograd.grad(at.sum(), (mean, log_std)):
        assert_close(gradient, torch.zeros_like(gradient))
    for size in (1e-3, 0.1):
        other = Normal(mean + size * torch.randn_like(mean), (log_std + size * torch.randn_like(mean)).exp())
        assert (mdpo.tsallis_divergence(other, pi_k, q) > 0).all()


def test_the_tsallis_divergence_tends_to_the_kl_and_is_it_at_q_1():
    mean, mean_k, log_std, log_std_k = 0.3 * torch.randn(4, 30, 4, dtype=torch.float64)
    pi, pi_k = Normal(mean, log_std.exp()), Normal(mean_k, log_std_k.exp())
    kl = mdpo.gaussian_kl(pi, pi_k)
    assert torch.equal(mdpo.tsallis_divergence(pi, pi_k, 1.0), kl)
    errors = [
        (mdpo.tsallis_divergence(pi, pi_k, 1 + gap) - kl).abs().max().item() for gap in (1e-2, -1e-2, 1e-5, -1e-5)
    ]
    assert max(errors[2:]) < 2e-3 * min(errors[:2]) and max(errors) > 1e-3  # linear in q - 1


@pytest.mark.parametrize("q", QS)
def test_the_tsallis_gradient_is_that_of_finite_differences(q):
    pi_k = Normal(torch.zeros(3).double(), torch.ones(3).double())
    theta = torch.tensor([0.2, -0.4, 0.3, 0.1, -0.3, 0.2]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: mdpo.tsallis_divergence(Normal(x[:3], x[3:].exp()), pi_k, q), theta)


def test_leaving_the_domain_of_q_below_1_ends_the_run_with_a_sentence(in_process, capsys):
    """At q = 0.01 the policy's std may grow by 0.5 % in an iteration; Adam's rate here allows 20 % in a step."""
    flags = ("--tsallis-q", 0.01, "--learning-rate", 0.2, "--total-timesteps", 1280, "--run-name", "r")
    assert in_process(mdpo, *PENDULUM, *flags).status == 1
    error = capsys.readouterr().err
    assert "q < 1" in error and "at step" in error and "Traceback" not in error
    assert not Path("runs/r/finished").exists()


# -------------------------------------------------------------------------------------------------------- PPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 2.4, 0.0),  # beyond the clip in the direction that the advantage favors: no more gain
        (0.5, 2.0, 1.0, 2.0),  # beyond it in the other direction: the gradient leads back
        (0.5, -2.0, -1.6, 0.0),
        (1.5, -2.0, -3.0, -2.0),
        (1.1, 2.0, 2.2, 2.0),  # within
        (0.9, -2.0, -1.8, -2.0),
    ],
)
def test_the_clipped_loss_and_its_gradient_by_hand(ratio, advantage, value, gradient):
    ratios = torch.tensor([ratio, 1.0], requires_grad=True)
    loss = ppo.clip_loss(ratios, torch.tensor([advantage, 1.0]), 0.2)
    assert_close(loss.detach(), -torch.tensor((value + 1) / 2))
    assert_close(torch.autograd.grad(loss, ratios)[0][0], -torch.tensor(gradient / 2))


@pytest.mark.parametrize("flags", [dict(objective="clip"), dict(), dict(kl_direction="new-old")])
def test_ppos_step_descends_its_loss_with_the_ratio_to_the_old_policy(flags):
    policy = make_policy(ppo)
    batch = make_batch(policy, scale=0.01)
    perturb(policy)
    loss, gradient = ppo_gradient(policy, batch, kl_coef=0.05, **flags)
    new = joint(policy(batch["obs"]))
    ratio, advantages = torch.exp(new.log_prob(batch["actions"]) - batch["log_probs"]), batch["advantages"]
    if "objective" in flags:
        expected = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        assert ((ratio - 1).abs() > 0.2).any()
    else:
        pair = (new, old(batch)) if flags else (old(batch), new)  # the PPO paper's direction is the default
        expected = 0.05 * kl_divergence(*pair).mean() - (ratio * advantages).mean()
    assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert_close(gradient, gradient_of(expected, policy), rtol=1e-6, atol=1e-9)


def test_ppos_policy_sees_every_sample_once_an_epoch(in_process, monkeypatch):
    sizes, gradient = [], ppo.policy_backward
    monkeypatch.setattr(ppo, "policy_backward", lambda *given: sizes.append(len(given[2])) or gradient(*given))
    flags = ("--minibatch-size", 48, "--update-epochs", 3, "--total-timesteps", 256, "--run-name", "r")
    in_process(ppo, *PENDULUM, *flags)
    assert sizes == [48, 48, 32] * 3 * 2


AS_MDPO = ("--objective=kl-annealed", "--kl-direction=new-old", "--minibatch-size=128", "--update-epochs=4")
AS_MDPO += ("--critic-minibatch-size=64", "--no-anneal-lr")


def test_the_flags_in_ppos_docstring_make_it_mdpo_with_its_defaults_to_the_bit(in_process):
    text = ppo.__doc__.partition("bit for bit:")[2].partition("\n\n")[0]
    flags = re.sub(r"\(.*?\)", "", text).rstrip(".").split()
    task = ("--env-id", "InvertedPendulum-v4", "--total-timesteps", 4096)
    ours = in_process(mdpo, *task, "--run-name", "mdpo").points
    theirs = in_process(ppo, *task, *flags, "--run-name", "ppo").points
    for point in (*ours, *theirs):
        point.pop("charts/t_k", 1), point.pop("charts/kl_coef", 1)
    assert len(iterations(ours)) == 2 and timeless(ours) == timeless(theirs)


def test_kl_ppo_with_all_three_differences_removed_is_mdpo_to_the_bit(in_process):
    flags = (*PENDULUM, "--total-timesteps", 640, "--learning-rate", 0.003)
    critic = ("--critic-minibatch-size", 64)
    runs = {"mdpo": in_process(mdpo, *flags, *critic, "--sgd-steps", 4, "--run-name", "mdpo").points}
    changes = {
        "none": (),
        "minibatches": ("--minibatch-size=64",),
        "schedule": ("--objective=kl-fixed",),
        "direction": ("--kl-direction=old-new",),
    }
    for name, change in changes.items():
        runs[name] = in_process(ppo, *flags, *AS_MDPO, *change, "--run-name", name).points
    assert len(iterations(runs["mdpo"])) == 5 and len(runs["mdpo"]) > 20  # with the episodes
    for points in runs.values():
        for point in points:
            t, coefficient = point.pop("charts/t_k", 1), point.pop("charts/kl_coef", 1)
            assert points is not runs["none"] or len(point) < 5 or coefficient >= t
    first, *others = (timeless(points) for points in runs.values())
    assert [points == first for points in others] == [True, False, False, False]
    networks = [checkpoint(name)["policy"] for name in ("mdpo", "none")]
    assert all(torch.equal(networks[0][key], networks[1][key]) for key in networks[0])
    constant = in_process(mdpo, *flags, *critic, "--sgd-steps", 4, "--no-anneal-t", "--run-name", "constant").points
    assert {point.pop("charts/t_k", 1) for point in constant} == {1}
    assert timeless(constant) == timeless(runs["schedule"])  # t_k = 1 is KL-PPO's fixed beta


def test_the_annealed_kl_coefficient_is_the_flag_divided_by_t_k(in_process):
    flags = ("--objective=kl-annealed", "--kl-coef=3", "--total-timesteps=512", "--run-name=r")
    points = iterations(in_process(ppo, *PENDULUM, *flags).points)
    assert [p["charts/kl_coef"] for p in points] == pytest.approx([3, 3 / 0.75, 3 / 0.5, 3 / 0.25])


@pytest.mark.parametrize(("target_kl", "cases"), [(1e-6, {2.0}), (3e-3, {0.5, 1.0, 2.0}), (1e3, {0.5})])
def test_the_adaptive_kl_coefficient_doubles_and_halves_and_survives_a_resume(in_process, target_kl, cases):
    """Doubled where the KL is above 1.5 times the target, halved below the target / 1.5, else kept."""
    adaptive = ("--objective=kl-adaptive", f"--target-kl={target_kl}", "--kl-direction=new-old", "--no-anneal-lr")
    flags = (*PENDULUM, *adaptive, "--learning-rate", 0.003, "--minibatch-size", 128, "--update-epochs", 3)
    points = iterations(in_process(ppo, *flags, "--total-timesteps", 1280, "--run-name", "r").points)
    resumed = in_process(ppo, "--resume", "--total-timesteps", 1536, "--run-name", "r")
    points += iterations(resumed.points)[-2:]
    assert [p["global_step"] for p in points] == list(range(128, 1537, 128))
    kls = [p["losses/kl"] for p in points]  # KL(new || old), the direction of this run
    factors = [2.0 if kl > 1.5 * target_kl else 0.5 if kl < target_kl / 1.5 else 1.0 for kl in kls]
    assert [p["charts/kl_coef"] for p in points] == [np.prod([1.0, *factors[:k]]) for k in range(12)]
    assert set(factors) == cases, kls


@pytest.mark.parametrize(("kl_coef", "target_kl", "bound"), [(7e5, 1e-9, 1e6), (1.5e-6, 1e3, 1e-6)])
def test_the_adaptive_kl_coefficient_neither_dies_nor_overflows(in_process, kl_coef, target_kl, bound):
    flags = ("--objective=kl-adaptive", f"--kl-coef={kl_coef}", f"--target-kl={target_kl}", "--total-timesteps=512")
    points = iterations(in_process(ppo, *PENDULUM, *flags, "--run-name", "r").points)
    assert [p["charts/kl_coef"] for p in points] == pytest.approx([kl_coef, bound, bound, bound])


# ------------------------------------------------------------------------------------------------------- TRPO


def fisher_product(policy, obs, vector):
    """F v from the definition: a Gaussian's F is J' M J, M = 1 / variance for means and 2 for log stds."""
    names = [name for name, _ in policy.named_parameters()]
    parameters = [p.detach() for p in policy.parameters()]
    shapes, sizes = [p.shape for p in parameters], [p.numel() for p in parameters]

    def means(vector):
        tensors = [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
        return torch.func.functional_call(policy, dict(zip(names, tensors, strict=True)), (obs,)).loc

    jacobian = torch.func.jacrev(means)(flat(parameters))
    precision = torch.exp(-2 * policy.log_std.detach())
    product = torch.einsum("sap,a,saq,q->p", jacobian, precision, jacobian, vector) / len(obs)
    start = sum(sizes[: names.index("log_std")])
    product[start : start + 2] += 2 * vector[start : start + 2]
    return product


def test_trpos_fisher_vector_product_is_that_of_the_explicit_matrix():
    policy, obs = make_policy(trpo), torch.randn(6, 3).double()
    size = len(parameters_to_vector(policy.parameters()))
    basis = torch.eye(size, dtype=torch.float64)[[0, 1, 200, -3, -1]]
    for vector in (*basis, *torch.randn(2, size, dtype=torch.float64)):
        expected = fisher_product(policy, obs, vector) + 0.3 * vector
        assert_close(trpo.fisher_product(policy, obs, damping=0.3)(vector), expected)


def test_trpos_fisher_matrix_is_the_hessian_of_the_constrained_kl_by_finite_differences():
    policy = make_policy(trpo)
    batch, start = make_batch(policy, 20), parameters_to_vector(policy.parameters()).detach().clone()
    vector = torch.randn_like(start)

    def kl(distance):
        vector_to_parameters(start + distance * vector, policy.parameters())
        return trpo.surrogate_and_kl(policy, batch)[1].item()

    assert kl(0) == pytest.approx(0, abs=1e-15)
    curvature = (kl(1e-3) + kl(-1e-3)) / 1e-6
    vector_to_parameters(start, policy.parameters())
    product = trpo.fisher_product(policy, batch["obs"], damping=0)(vector)
    assert (vector @ product).item() == pytest.approx(curvature, rel=1e-3)


def test_conjugate_gradient_solves_a_positive_definite_system():
    root = torch.randn(20, 20, dtype=torch.float64)
    matrix, b = root @ root.T + torch.eye(20), torch.randn(20, dtype=torch.float64)
    assert_close(trpo.conjugate_gradient(lambda x: matrix @ x, b, 60), torch.linalg.solve(matrix, b), rtol=0, atol=1e-5)
    assert torch.equal(trpo.conjugate_gradient(lambda x: matrix @ x, 0 * b, 10), 0 * b)
    errors = [(matrix @ trpo.conjugate_gradient(lambda x: matrix @ x, b, n) - b).norm() for n in (1, 20)]
    assert errors[1] < 1e-3 * errors[0]  # it stops after as many iterations as it is told
    calls = []
    trpo.conjugate_gradient(lambda x: calls.append(x) or matrix @ x, b, 7)
    assert len(calls) == 7


def test_trpos_step_is_the_natural_gradient_scaled_to_the_bound(monkeypatch):
    policy, steps = make_policy(trpo), []
    batch = make_batch(policy, 25)
    monkeypatch.setattr(trpo, "line_search", lambda policy, batch, step, max_kl: steps.append((step, max_kl)) or 1)
    assert trpo.natural_step(policy, batch, 0.02, 40, 0.1) == 1
    step, max_kl = steps[0]
    image = fisher_product(policy, batch["obs"][::5], step) + 0.1 * step  # every fifth sample
    assert max_kl == 0.02
    assert_close(0.5 * step @ image, torch.tensor(0.02).double(), rtol=1e-6, atol=0)
    gradient = vanilla_gradient(policy, batch)
    assert_close(image / image.norm(), gradient / gradient.norm(), rtol=0, atol=1e-4)


def surrogate_and_kl(policy, batch):
    with torch.no_grad():
        new = joint(policy(batch["obs"]))
        ratio = torch.exp(new.log_prob(batch["actions"]) - batch["log_probs"])
        return (ratio * batch["advantages"]).mean(), kl_divergence(old(batch), new).mean()


def test_trpos_surrogate_and_kl_are_those_of_torchs_distributions():
    policy = make_policy(trpo)
    batch = make_batch(policy)
    perturb(policy)
    for ours, theirs in zip(trpo.surrogate_and_kl(policy, batch), surrogate_and_kl(policy, batch), strict=True):
        assert_close(ours.detach(), theirs)


def test_trpos_line_search_takes_the_first_step_that_improves_within_the_bound():
    policy, trial, taken = make_policy(trpo), make_policy(trpo), []
    batch, start = make_batch(policy), parameters_to_vector(policy.parameters()).detach().clone()
    before, _ = surrogate_and_kl(policy, batch)
    gradient = vanilla_gradient(policy, batch)
    for _ in range(20):
        step = 3 * (gradient / gradient.norm() + 0.02 * torch.randn_like(gradient))
        vector_to_parameters(start, policy.parameters())
        expected = 0
        for attempt in range(1, 11):
            vector_to_parameters(start + 0.5 ** (attempt - 1) * step, trial.parameters())
            surrogate, kl = surrogate_and_kl(trial, batch)
            if surrogate > before and kl <= 0.01:
                expected = attempt
                break
        taken.append(trpo.line_search(policy, batch, step, 0.01))
        assert taken[-1] == expected
        end = parameters_to_vector(policy.parameters())
        assert torch.equal(end, parameters_to_vector(trial.parameters()) if expected else start)
    assert max(taken) > 1


def test_a_failed_line_search_restores_the_parameters_exactly():
    policy = make_policy(trpo)
    batch, start = make_batch(policy), parameters_to_vector(policy.parameters()).detach().clone()
    gradient = vanilla_gradient(policy, batch)
    for step in (-1e-3 * gradient, 1e6 * gradient, torch.full_like(gradient, torch.nan)):
        assert trpo.line_search(policy, batch, step, 0.01) == 0
        assert torch.equal(parameters_to_vector(policy.parameters()), start)


@pytest.mark.parametrize("natural_steps", [1, 4])
@pytest.mark.parametrize("max_kl", [1e-3, 1e-2, 1e-1])
def test_trpos_update_improves_the_surrogate_and_keeps_to_the_bound(natural_steps, max_kl):
    policy = trpo.Policy(3, 2, orthogonal_init=True)
    batch = make_batch(policy, 500)
    before, _ = surrogate_and_kl(policy, batch)
    attempts = [trpo.natural_step(policy, batch, max_kl, 10, 0.1) for _ in range(natural_steps)]
    surrogate, kl = surrogate_and_kl(policy, batch)
    assert attempts[0] > 0 and surrogate > before and 0 < kl <= max_kl * (1 + 1e-4)


def test_trpo_logs_a_kl_within_its_bound_and_takes_as_many_natural_steps_as_it_is_told(in_process, monkeypatch):
    calls, step = [], trpo.natural_step
    monkeypatch.setattr(trpo, "natural_step", lambda *given: calls.append(given[2:]) or step(*given))
    flags = ("--max-kl", 0.003, "--cg-iterations", 5, "--cg-damping", 0.2, "--natural-steps", 2, "--run-name", "r")
    points = iterations(in_process(trpo, *PENDULUM, *flags, "--total-timesteps", 512).points)
    assert calls == [(0.003, 5, 0.2)] * 8
    assert all(0 <= p["losses/kl_old_new"] <= 0.003 * (1 + 1e-4) for p in points)
    assert any(p["losses/kl_old_new"] > 0 for p in points)


class Numbered(gym.Env):
    """Observations that say which of the environments made them."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    count = 0

    def __init__(self):
        self.number = Numbered.count = Numbered.count + 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(action[0]), bool(self.np_random.random() < 0.1), False, {}

    def observe(self):
        return np.float32([self.number, self.np_random.normal()])


gym.register("Numbered-v0", Numbered, disable_env_checker=True)


@pytest.mark.parametrize("num_envs", [5, 10])
def test_every_fifth_sample_covers_all_environments(in_process, monkeypatch, num_envs):
    seen, product = [], trpo.fisher_product
    monkeypatch.setattr(trpo, "fisher_product", lambda *given: seen.append(given[1][:, 0]) or product(*given))
    flags = ("--env-id", "Numbered-v0", "--no-norm-obs", "--num-steps", 50, "--total-timesteps", 50 * num_envs)
    in_process(trpo, *flags, "--num-envs", num_envs, "--run-name", "r")
    numbers, counts = seen[0].unique(return_counts=True)
    assert len(numbers) == num_envs and (counts == 10).all()


# ---------------------------------------------------------------------------------------------------- --compile


def test_a_compiled_run_agrees_with_an_eager_one(in_process):
    """To rounding: Adam divides by small numbers, so that the last bits of a gradient show in the fifth digit."""
    flags = (*PENDULUM, "--total-timesteps", 256, "--sgd-steps", 3, "--critic-minibatch-size", 64)
    eager = in_process(mdpo, *flags, "--run-name", "eager").points
    compiled = in_process(mdpo, *flags, "--compile", "--run-name", "compiled").points
    for one, other in zip(eager, compiled, strict=True):
        for key in one.keys() - {"charts/SPS"}:
            assert float(one[key]) == pytest.approx(float(other[key]), rel=1e-3, abs=1e-4), key
    one, other = checkpoint("eager"), checkpoint("compiled")
    for part in ("policy", "critic"):
        for key, tensor in one[part].items():
            assert_close(other[part][key], tensor, rtol=1e-3, atol=1e-4, msg=f"{part}.{key}")
