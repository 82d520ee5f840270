"""The numbers of the on-policy scripts against definitions, other libraries, and cases worked out by hand."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers Toy-v0
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close

import mdpo_onpolicy as mdpo
import ppo
import trpo


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def gaussian(mean, log_std):
    return Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)


def make_policy(module, obs_dim=3, action_dim=2):
    policy = module.MLP(obs_dim, action_dim, orthogonal_init=False, last_gain=1.0, extra=action_dim).double()
    with torch.no_grad():
        policy.parts()[-1].normal_(0, 0.3)
    return policy


def make_batch(policy, rows=100):
    """A batch of samples of the policy as it is now, with advantages that depend on the action."""
    with torch.no_grad():
        obs = torch.randn(rows, policy.shapes[0][1], dtype=policy.flat.dtype)
        means, log_std = policy(obs)
        actions = gaussian(means, log_std).sample()
        advantages = torch.tanh(actions.sum(-1)) + 0.1 * obs[:, 0]
        batch = dict(obs=obs, actions=actions, means=means, log_std=log_std.clone(), advantages=advantages)
        return batch | dict(log_probs=gaussian(means, log_std).log_prob(actions))


def perturb(policy, size=0.05):
    with torch.no_grad():
        policy.flat += size * torch.randn_like(policy.flat)


def gradient_of(value, policy):
    return torch.autograd.grad(value, policy.flat)[0]


def vanilla_gradient(policy, batch):
    log_prob = gaussian(*policy(batch["obs"])).log_prob(batch["actions"])
    return gradient_of((log_prob * batch["advantages"]).mean(), policy)


class Gradients(list):
    """An optimiser that only keeps the gradients it is given."""

    def step(self, params, gradient):
        self.append(gradient)


# ---------------------------------------------------------------------------------------------- shared numerics


def test_gaussian_functions_agree_with_torch_distributions(script):
    mean_p, mean_q, action = torch.randn(3, 50, 4, dtype=torch.float64)
    log_std_p, log_std_q = torch.randn(2, 4, dtype=torch.float64)
    p, q = gaussian(mean_p, log_std_p), gaussian(mean_q, log_std_q)
    assert_close(script.gaussian_log_prob(action, mean_p, log_std_p), p.log_prob(action))
    assert_close(script.gaussian_entropy(log_std_p), p.entropy()[0])
    assert_close(script.gaussian_kl(mean_p, log_std_p, mean_q, log_std_q), kl_divergence(p, q))


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
    stream = np.random.default_rng(0).normal(1e4, 3, (1000, *shape))
    moments = script.RunningMoments(*shape)
    for batch in np.split(stream, [1, 8, 300, 303, 900]):
        moments.update(torch.as_tensor(batch))
    np.testing.assert_allclose(moments.mean, stream.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, stream.var(0), rtol=1e-9)
    assert moments.count == 1000


def test_explained_variance_by_hand(script):
    targets = np.array([1.0, 2.0, 3.0, 4.0])
    assert script.explained_variance(targets, targets) == 1
    assert script.explained_variance(np.full(4, 9.0), targets) == 0
    assert script.explained_variance(2 * targets, targets) == 0  # the error varies as much as the targets
    assert script.explained_variance(targets / 2, targets) == pytest.approx(0.75)
    assert script.explained_variance(-targets, targets) == pytest.approx(-3)
    assert np.isnan(script.explained_variance(targets, np.ones(4)))


def test_adam_is_that_of_torch(script):
    ours = torch.randn(40)
    theirs = nn.Parameter(ours.clone())
    scales = torch.logspace(-7, 1, 40)  # small gradients show eps, and where it is added
    adam, reference = script.Adam(ours), torch.optim.Adam([theirs], eps=1e-5)
    for step in range(500):
        learning_rate = 0.01 * (1 - step / 500)
        adam.lr.fill_(learning_rate)
        reference.param_groups[0]["lr"] = learning_rate
        theirs.grad = torch.randn(40) * scales
        adam.step(ours, theirs.grad.clone())
        reference.step()
        assert_close(ours, theirs.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_mlp_is_the_sequential_network_of_its_parts(script, orthogonal):
    network = script.MLP(5, 2, orthogonal, last_gain=0.01, extra=3)
    sequential = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    *parts, extra = network.parts()
    sequential.load_state_dict(dict(zip(sequential.state_dict(), parts, strict=True)))
    obs = torch.randn(30, 5)
    output, also_extra = network(obs)
    assert_close(output, sequential(obs))
    assert torch.equal(extra, torch.zeros(3)) and torch.equal(also_extra, extra)
    gains = [parts[0].T @ parts[0], parts[2].T @ parts[2], parts[4] @ parts[4].T]
    are_orthogonal = [
        torch.allclose(product, gain * torch.eye(len(product)), atol=1e-5)
        for product, gain in zip(gains, (2, 2, 1e-4), strict=True)
    ]
    assert are_orthogonal == [orthogonal] * 3


@pytest.mark.parametrize("norm_obs", [True, False])
def test_the_acting_policy_is_the_trained_one_on_normalised_observations(script, norm_obs):
    agent = script.Agent(3, 2, script.Args(norm_obs=norm_obs, orthogonal_init=False))
    agent.obs_moments.update(torch.randn(100, 3) * 5 + 2)
    obs = np.random.default_rng(0).normal(2, 5, (40, 3))
    obs[0, 0] = 1e4  # beyond the clip
    normalized = np.clip((obs - agent.obs_moments.mean.numpy()) / agent.obs_moments.var.sqrt().numpy(), -10, 10)
    inputs = torch.as_tensor(normalized if norm_obs else obs, dtype=torch.float32)
    assert_close(agent.normalize(torch.as_tensor(obs)), inputs)
    assert_close(torch.as_tensor(agent.actor()(obs)), agent.policy(inputs)[0].detach(), rtol=1e-4, atol=1e-5)


def test_exploration_noise_has_the_standard_deviation_of_the_policy(script):
    agent = script.Agent(3, 2, script.Args())
    with torch.no_grad():
        agent.policy.parts()[-1].copy_(torch.tensor([0.5, -2.0]))
    noise = agent.noise(20_000, 3)
    assert noise.shape == (20_000, 3, 2)
    np.testing.assert_allclose(noise.std((0, 1)), np.exp([0.5, -2.0]), rtol=0.02)
    np.testing.assert_allclose(noise.mean((0, 1)), 0, atol=0.03)


@pytest.mark.parametrize(
    ("value", "old", "target", "clipped", "plain"),
    [
        (1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.5),  # the clip at 0.2 holds the value back, and its error is the worse
        (1.0, 0.0, 0.0, 0.5, 0.5),  # the clip would flatter
        (-1.0, 0.0, -2.0, 0.5 * 1.8**2, 0.5),
        (0.1, 0.0, 2.0, 0.5 * 1.9**2, 0.5 * 1.9**2),  # within the clip
    ],
)
def test_value_loss_by_hand(script, value, old, target, clipped, plain):
    tensors = [torch.tensor([number, number]) for number in (value, old, target)]
    assert_close(script.value_loss(*tensors, True), torch.tensor(clipped))
    assert_close(script.value_loss(*tensors, False), torch.tensor(plain))


def test_a_critic_step_descends_the_value_loss(script):
    critic, gradients = script.MLP(3, 1, True, 1.0).double(), Gradients()
    obs, (old, returns) = torch.randn(20, 3).double(), torch.randn(2, 20).double()
    loss = script.critic_step(critic, gradients, obs, old, returns, True)
    expected = script.value_loss(critic(obs)[0][:, 0], old, returns, True)
    assert_close(loss, expected.detach())
    assert_close(gradients[0], gradient_of(expected, critic))


def test_the_critic_sees_every_sample_once_an_epoch_in_shuffled_minibatches(script, monkeypatch):
    seen = []
    monkeypatch.setattr(script, "critic_step", lambda *a: seen.append(a[2][:, 0]) or torch.zeros(()))
    args = script.Args(critic_epochs=3, critic_minibatch_size=32)
    numbers = torch.arange(100.0)
    batch = dict(obs=numbers[:, None], values=numbers, returns=numbers)
    script.update_critic(script.Agent(1, 1, args), batch, args)
    assert [len(minibatch) for minibatch in seen] == [32, 32, 32, 4] * 3
    epochs = torch.cat(seen).view(3, 100)
    assert torch.equal(epochs.sort(1).values, numbers.expand(3, 100))
    assert not torch.equal(epochs[0], numbers) and not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("env_id", ["InvertedPendulum-v4", "Toy-v0"])
def test_serial_envs_step_like_gymnasiums_vector(script, env_id):
    ours, theirs = (
        kind([lambda: gym.make(env_id)] * 3, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
        for kind in (script.SerialEnvs, gym.vector.SyncVectorEnv)
    )
    rng, ends = np.random.default_rng(0), 0
    np.testing.assert_array_equal(ours.reset(seed=5)[0], theirs.reset(seed=5)[0])
    for _ in range(150):
        actions = rng.uniform(ours.action_space.low, ours.action_space.high).astype(np.float32)
        (*result, _), (*expected, _) = ours.step(actions), theirs.step(actions)
        for array, expected_array in zip(result, expected, strict=True):
            np.testing.assert_array_equal(array, expected_array)
        done = expected[2] | expected[3]
        if done.any():
            options, ends = {"reset_mask": done}, ends + 1
            np.testing.assert_array_equal(ours.reset(options=dict(options))[0], theirs.reset(options=options)[0])
    assert ends > 10


# ------------------------------------------------------------------------------------------------------- MDPO


@pytest.mark.parametrize("inverse_t", [1.0, 1e6])
def test_mdpos_first_gradient_is_the_vanilla_policy_gradient(inverse_t):
    policy, gradients = make_policy(mdpo), Gradients()
    batch = make_batch(policy)
    batch["advantages"] *= 0.01  # below the norm at which gradients are clipped
    mdpo.policy_step(policy, gradients, batch, torch.tensor(inverse_t))
    vanilla = vanilla_gradient(policy, batch)
    assert 0 < vanilla.norm() < 0.5
    assert_close(gradients[0], -vanilla)  # what descends the loss ascends the objective


def test_mdpos_kl_has_the_new_policy_first():
    policy, gradients = make_policy(mdpo), Gradients()
    batch = make_batch(policy)
    batch["advantages"] *= 0
    perturb(policy)
    loss, kl = mdpo.policy_step(policy, gradients, batch, torch.tensor(0.01))
    new, old = gaussian(*policy(batch["obs"])), gaussian(batch["means"], batch["log_std"])
    expected, swapped = kl_divergence(new, old).mean(), kl_divergence(old, new).mean()
    assert_close(kl, expected.detach())
    assert_close(loss, 0.01 * expected.detach())
    assert_close(gradients[0], gradient_of(0.01 * expected, policy))
    assert abs(expected - swapped) > 0.01 * expected  # so that the above would notice


def test_mdpos_objective_rises_over_the_steps_of_an_iteration():
    agent = mdpo.Agent(3, 2, mdpo.Args())
    batch = make_batch(agent.policy, 500)
    agent.set_learning_rate(3e-4)
    losses = [mdpo.policy_step(agent.policy, agent.policy_optimizer, batch, torch.tensor(2.0))[0] for _ in range(10)]
    assert (torch.stack(losses).diff() < 0).all()


@pytest.mark.parametrize("t", [1.0, 0.3])
def test_mdpo_on_finite_actions_converges_to_the_exponentiated_advantages(t):
    old = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).double() / 16
    advantages = torch.tensor([-1.0, 0.5, 2.0, 0.0, 1.0]).double()
    samples = torch.arange(5).repeat_interleave((old * 16).long())  # each action as often as pi_k takes it: exact means
    logits = old.log().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_change=0, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        new = logits.softmax(0)
        kl = (new * (new / old).log()).sum()
        value = -mdpo.mdpo_objective((new / old)[samples], advantages[samples], kl.expand(16), 1 / t)
        value.backward()
        return value

    optimizer.step(loss)
    expected = old * torch.exp(t * advantages)
    assert_close(logits.softmax(0).detach(), expected / expected.sum(), rtol=0, atol=1e-6)


def test_mdpos_steps_use_the_whole_batch_and_the_annealed_stepsize(in_process, monkeypatch):
    calls, step = [], mdpo.policy_step

    def spy(policy, optimizer, batch, inverse_t):
        calls.append((len(batch["obs"]), float(inverse_t)))
        return step(policy, optimizer, batch, inverse_t)

    monkeypatch.setattr(mdpo, "policy_step", spy)
    flags = dict(env_id="Toy-v0", run_name="r", num_steps=64, num_envs=2, total_timesteps=512, sgd_steps=3)
    points = in_process(mdpo, *(f"--{name}={value}" for name, value in flags.items()), "--anneal-lr").points
    t = [1, 3 / 4, 2 / 4, 1 / 4]
    assert calls == [(128, pytest.approx(1 / t_k)) for t_k in t for _ in range(3)]
    assert [p["charts/t_k"] for p in points if "charts/t_k" in p] == t
    assert [p["charts/learning_rate"] for p in points if "charts/t_k" in p] == [pytest.approx(3e-4 * t_k) for t_k in t]


def test_the_gradients_norm_is_at_most_one_half():
    for module, keys, rest in (mdpo, None, (torch.tensor(1.0),)), (ppo, "obs actions log_probs advantages", (0.2,)):
        policy, gradients = make_policy(module), Gradients()
        batch = make_batch(policy)
        for scale in (1e-3, 1e3):
            scaled = batch | dict(advantages=scale * batch["advantages"])
            inputs = [scaled[key] for key in keys.split()] if keys else [scaled]
            module.policy_step(policy, gradients, *inputs, *rest)
        small, large = gradients
        assert small.norm() < 0.5
        assert_close(large, 0.5 * small / small.norm())


# ------------------------------------------------------------------------------------------------------- TRPO


def fisher_product(policy, obs, vector):
    """F v from the definition: a Gaussian's F is J' M J, M = 1 / variance for means and 2 for log deviations."""
    outputs = torch.func.jacrev(lambda flat: torch.func.functional_call(policy, {"flat": flat}, (obs,)))
    mean_jacobian, log_std_jacobian = outputs(policy.flat.detach())
    precision = torch.exp(-2 * policy.parts()[-1].detach())
    mean_part = torch.einsum("sap,a,saq,q->p", mean_jacobian, precision, mean_jacobian, vector) / len(obs)
    return mean_part + 2 * log_std_jacobian.T @ (log_std_jacobian @ vector)


def test_trpos_fisher_vector_product_is_that_of_the_explicit_matrix():
    policy, obs = make_policy(trpo), torch.randn(6, 3).double()
    basis = torch.eye(len(policy.flat), dtype=torch.float64)[[0, 200, -3, -1]]
    for vector in (*basis, *torch.randn(2, len(policy.flat), dtype=torch.float64)):
        assert_close(trpo.fisher_vector_product(policy, obs, vector), fisher_product(policy, obs, vector))


def test_conjugate_gradient_solves_a_positive_definite_system():
    root = torch.randn(20, 20, dtype=torch.float64)
    matrix, b = root @ root.T + torch.eye(20), torch.randn(20, dtype=torch.float64)
    assert_close(trpo.conjugate_gradient(lambda x: matrix @ x, b, 60), torch.linalg.solve(matrix, b))
    assert torch.equal(trpo.conjugate_gradient(lambda x: matrix @ x, 0 * b, 10), 0 * b)
    errors = [(matrix @ trpo.conjugate_gradient(lambda x: matrix @ x, b, n) - b).norm() for n in (1, 20)]
    assert errors[1] < 1e-3 * errors[0]  # it stops after as many iterations as it is told


def test_trpos_step_is_the_natural_gradient_scaled_to_the_bound(monkeypatch):
    agent = trpo.Agent(3, 2, trpo.Args())
    agent.policy, steps = make_policy(trpo), []
    batch = make_batch(agent.policy, 25)
    monkeypatch.setattr(trpo, "line_search", lambda policy, batch, step, max_kl: steps.append(step) or 1)
    trpo.update_policy(agent, batch, trpo.Args(max_kl=0.02, cg_iterations=40, cg_damping=0.1), 0.0)
    step = steps[0]
    image = fisher_product(agent.policy, batch["obs"][::5], step) + 0.1 * step  # every fifth sample
    assert_close(0.5 * step @ image, torch.tensor(0.02).double(), rtol=1e-6, atol=0)
    gradient = vanilla_gradient(agent.policy, batch)
    assert_close(image / image.norm(), gradient / gradient.norm(), rtol=0, atol=1e-4)


def surrogate_and_kl(policy, batch):
    with torch.no_grad():
        new, old = gaussian(*policy(batch["obs"])), gaussian(batch["means"], batch["log_std"])
        ratio = torch.exp(new.log_prob(batch["actions"]) - batch["log_probs"])
        return (ratio * batch["advantages"]).mean(), kl_divergence(old, new).mean()


def test_trpos_line_search_takes_the_first_step_that_improves_within_the_bound():
    policy = make_policy(trpo)
    batch, start, taken = make_batch(policy), policy.flat.detach().clone(), []
    before, _ = surrogate_and_kl(policy, batch)
    gradient = vanilla_gradient(policy, batch)
    for _ in range(30):
        step = 3 * (gradient / gradient.norm() + 0.02 * torch.randn_like(gradient))
        expected = 0
        for attempt in range(1, 11):
            trial = copy.deepcopy(policy)
            trial.flat.data = start + 0.5 ** (attempt - 1) * step
            surrogate, kl = surrogate_and_kl(trial, batch)
            if surrogate > before and kl <= 0.01:
                expected = attempt
                break
        taken.append(trpo.line_search(policy, batch, step, 0.01))
        assert taken[-1] == expected
        assert torch.equal(policy.flat, trial.flat if expected else start)
        policy.flat.data = start.clone()
    assert max(taken) > 1


def test_a_rejected_line_search_leaves_the_parameters_as_they_were():
    policy = make_policy(trpo)
    batch, start = make_batch(policy), policy.flat.detach().clone()
    gradient = vanilla_gradient(policy, batch)
    for step in (-1e-3 * gradient, 1e6 * gradient, torch.full_like(gradient, torch.nan)):
        assert trpo.line_search(policy, batch, step, 0.01) == 0
        assert torch.equal(policy.flat, start)


@pytest.mark.parametrize("natural_steps", [1, 4])
def test_trpos_update_improves_the_surrogate_and_keeps_to_the_bound(natural_steps):
    for max_kl in (1e-3, 1e-2, 1e-1):
        args = trpo.Args(natural_steps=natural_steps, max_kl=max_kl)
        agent = trpo.Agent(3, 2, args)
        batch = make_batch(agent.policy, 500)
        before, _ = surrogate_and_kl(agent.policy, batch)
        point = trpo.update_policy(agent, batch, args, 0.0)
        surrogate, kl = surrogate_and_kl(agent.policy, batch)
        assert surrogate > before and 0 < kl <= max_kl * (1 + 1e-4)
        assert point["losses/kl_old_new"] == pytest.approx(kl.item(), rel=1e-3, abs=1e-6)
        assert point["losses/policy_loss"] == pytest.approx(-surrogate.item(), rel=1e-3)


# -------------------------------------------------------------------------------------------------------- PPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 2.4, 0.0),  # beyond the clip, the way the advantage favours: no more gain
        (0.5, 2.0, 1.0, 2.0),  # beyond it the wrong way: the gradient leads back
        (0.5, -2.0, -1.6, 0.0),
        (1.5, -2.0, -3.0, -2.0),
        (1.1, 2.0, 2.2, 2.0),  # within
        (0.9, -2.0, -1.8, -2.0),
    ],
)
def test_ppos_objective_and_its_gradient_by_hand(ratio, advantage, value, gradient):
    ratios = torch.tensor([ratio, 1.0], requires_grad=True)
    objective = ppo.ppo_objective(ratios, torch.tensor([advantage, 1.0]), 0.2)
    assert_close(objective.detach(), torch.tensor((value + 1) / 2))
    assert_close(torch.autograd.grad(objective, ratios)[0][0], torch.tensor(gradient / 2))


def test_ppos_step_ascends_its_objective_with_the_ratio_to_the_old_policy():
    policy, gradients = make_policy(ppo), Gradients()
    batch = make_batch(policy)
    batch["advantages"] *= 0.01
    perturb(policy)
    inputs = [batch[key] for key in ("obs", "actions", "log_probs", "advantages")]
    loss, clipped = ppo.policy_step(policy, gradients, *inputs, 0.2)
    ratio = torch.exp(gaussian(*policy(batch["obs"])).log_prob(batch["actions"]) - batch["log_probs"])
    expected = -ppo.ppo_objective(ratio, batch["advantages"], 0.2)
    assert_close(loss, expected.detach())
    assert_close(gradients[0], gradient_of(expected, policy))
    assert 0 < clipped < 1 and clipped == pytest.approx(((ratio - 1).abs() > 0.2).double().mean().item())


def test_ppos_policy_sees_every_sample_once_an_epoch(monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "policy_step", lambda *a: seen.append(a[2:6]) or torch.zeros(2))
    args, numbers = ppo.Args(update_epochs=2, minibatch_size=32), torch.arange(100.0)
    batch = dict(obs=numbers[:, None], actions=numbers[:, None], log_probs=numbers, advantages=numbers)
    ppo.update_policy(ppo.Agent(1, 1, args), batch, args, 0.0)
    assert all(torch.equal(obs[:, 0], other.flatten()) for obs, *others in seen for other in others)  # rows stay rows
    epochs = torch.cat([minibatch[3] for minibatch in seen]).view(2, 100)
    assert torch.equal(epochs.sort(1).values, numbers.expand(2, 100))
    assert not torch.equal(epochs[0], epochs[1])


# ---------------------------------------------------------------------------------------------------- --compile


def test_compiled_updates_agree_with_eager_ones():
    if not mdpo.can_compile(torch.device("cpu")):
        pytest.skip("torch.compile does not work here")
    agents = []
    for compiled in (False, True):
        torch.manual_seed(1)
        agents.append(mdpo.Agent(3, 2, mdpo.Args(compile=compiled)))
        agents[-1].set_learning_rate(3e-4)
    batch = make_batch(agents[0].policy, 128)
    values, returns = torch.randn(2, 128)
    for _ in range(30):
        for agent in agents:
            agent.policy_step(agent.policy, agent.policy_optimizer, batch, torch.tensor(1.5))
            agent.critic_step(agent.critic, agent.critic_optimizer, batch["obs"], values, returns, True)
    for network in ("policy", "critic"):
        eager, compiled = (getattr(agent, network).flat.detach() for agent in agents)
        assert_close(compiled, eager, rtol=0, atol=1e-5)


def test_a_machine_that_cannot_compile_goes_on_without(monkeypatch, capsys):
    def no_compiler(_):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(mdpo, "compiled", no_compiler)
    assert not mdpo.can_compile(torch.device("cpu"))
    assert "No working C++ compiler found" in capsys.readouterr().err
