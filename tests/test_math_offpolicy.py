"""The numbers of the off-policy scripts against definitions, other libraries and finite differences."""

import copy
import importlib
import math
import os
import shutil
from decimal import Decimal, localcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from conftest import timeless
from torch import nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.testing import assert_close

import mdpo_offpolicy as mdpo
import mdpo_tsallis as tsallis
import sac

OFF_POLICY = ("mdpo_offpolicy", "mdpo_tsallis", "sac")
QS = (1e-3, 0.1, 0.5, 0.9, 0.999999, 1.0, 1.000001, 1.1, 1.5, 1.8, 2.0)
OBS, ACTIONS, BATCH = 4, 3, 16
SMALL = ("--hidden-size", 16, "--batch-size", 16, "--buffer-size", 150, "--run-name", "r")
SHORT = ("--env-id", "Bounds-v0", "--total-timesteps", 160, "--learning-starts", 64, *SMALL)
LONGER = ("--env-id", "Bounds-v0", "--total-timesteps", 1000, "--learning-starts", 800, *SMALL)  # logs its losses once
NETWORKS = ("policy", "q1", "q2", "v", "target_v")


class Bounds(gym.Env):
    """A random walk whose two actions have other bounds than 1, and which remembers its transitions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(np.float32([-0.4, 0]), np.float32([0.4, 10]))
    made: ClassVar = []

    def __init__(self):
        self.transitions, self.episode = [], 0
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        self.state = self.np_random.normal(0, 1, 3).astype(np.float32)
        return self.state, {}

    def step(self, action):
        before, self.time = self.state, self.time + 1
        self.state = (0.9 * before + self.np_random.normal(0, 0.3, 3) + action[0]).astype(np.float32)
        reward = float(self.state[0] - 0.01 * action[1])
        over = self.time == 5 + self.episode % 4
        ends = over and self.episode % 2 == 1, over and self.episode % 2 == 0
        self.transitions.append((before, action.copy(), self.state, reward, *ends))
        return self.state, reward, *ends, {}


gym.register("Bounds-v0", Bounds, disable_env_checker=True)


@pytest.fixture(params=OFF_POLICY)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def one_thread_a_seed_and_a_folder(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def make_args(script, **flags):
    if script is not sac:
        flags = dict(bregman_stepsize=0.5) | flags
    if script is tsallis:
        flags = dict(tsallis_q=1.5, entropy_q=1.3) | flags
    return script.Args(**flags)


def make_agent(script, obs_dim=OBS, action_dim=ACTIONS):
    """An agent in the middle of training: its target and old networks differ from the others."""
    torch.manual_seed(0)
    agent = script.Agent(obs_dim, action_dim, 32).double()
    for net in (agent.policy, agent.target_v, *([] if script is sac else [agent.old_policy])):
        for parameter in net.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return agent


def make_batch(obs_dim=OBS, action_dim=ACTIONS, size=BATCH):
    generator = torch.Generator().manual_seed(1)
    obs, next_obs = torch.randn(2, size, obs_dim, generator=generator, dtype=torch.float64)
    action = 2 * torch.rand(size, action_dim, generator=generator).double() - 1
    reward = torch.randn(size, 1, generator=generator, dtype=torch.float64)
    terminated = (torch.rand(size, 1, generator=generator) < 0.3).double()
    noise = torch.randn(size, action_dim, generator=generator, dtype=torch.float64)
    return torch.cat([obs, action, next_obs, reward, terminated], -1), noise


def gradients_of_update(script, agent, batch, noise, args):
    """The losses of update() and the gradients it gives to the optimizers, which do not step."""
    with mock.patch.object(script.Adam, "step", autospec=True) as step:
        losses = script.update(agent, batch, noise, args)
    steps = [call.args for call in step.call_args_list]
    gradients = {id(p): g for adam, given, _ in steps for p, g in zip(adam.params, given, strict=True)}
    networks = (agent.policy, agent.q1, agent.q2, agent.v)
    return losses, [flat(gradients[id(p)] for p in network.parameters()) for network in networks]


def load(name="r"):
    return torch.load(Path("runs", name, "checkpoint.pt"), weights_only=True)


def differing(one: dict, other: dict) -> set[str]:
    """The networks and the optimizer in which two checkpoints differ."""
    parts = {*NETWORKS, "policy_optimizer", "critic_optimizer"}
    assert all(one[part].keys() == other[part].keys() and one[part] for part in parts)
    return {part for part in parts if not all(torch.equal(x, other[part][key]) for key, x in one[part].items())}


# ------------------------------------------------------------------------------------------------------------ log_q


@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_log_q_is_its_definition_for_densities_from_1e_minus_30_to_1e30(q, dtype, tolerance):
    with localcontext() as context:
        context.prec = 60
        for power in range(-30, 31):
            x, p = Decimal(10) ** power, Decimal(q) - 1
            expected = (x**p - 1) / p if p else x.ln()
            log_x = torch.tensor(float(x.ln()), dtype=dtype)
            value = tsallis.log_q(log_x, q, limit=70.0).item()
            assert value == pytest.approx(float(expected), rel=tolerance * max(1, abs(power)), abs=1e-30), (q, power)


@pytest.mark.parametrize("q", QS)
def test_the_derivative_of_log_q_is_that_of_finite_differences_also_beyond_the_limit(q):
    log_x = torch.linspace(-90, 90, 181, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(tsallis.log_q(log_x, q).sum(), log_x)
    with torch.no_grad():
        differences = (tsallis.log_q(log_x + 1e-5, q) - tsallis.log_q(log_x - 1e-5, q)) / 2e-5
        size = tsallis.log_q(log_x, q).abs()
    assert (gradient >= 0).all()
    assert ((gradient - differences).abs() <= 1e-5 * gradient + 1e-10 * size + 1e-9).all()


@pytest.mark.parametrize("q", [0.5, 1.5, 2.0])
def test_log_q_and_its_slope_are_continuous_at_the_limit_and_exact_up_to_it(q):
    seam = 30 / (q - 1)
    log_x = torch.tensor([seam * (1 - 1e-9), seam * (1 + 1e-9)], dtype=torch.float64, requires_grad=True)
    value = tsallis.log_q(log_x, q)
    (slope,) = torch.autograd.grad(value.sum(), log_x)
    assert_close(value[0], value[1], rtol=1e-6, atol=0)
    assert_close(slope[0], slope[1], rtol=1e-6, atol=0)
    assert value[0].item() == pytest.approx((math.exp(30) - 1) / (q - 1), rel=1e-6)


def test_log_q_tends_to_the_logarithm_and_is_it_at_1():
    log_x = torch.linspace(-40, 40, 161, dtype=torch.float64, requires_grad=True)
    assert tsallis.log_q(log_x, 1.0) is log_x
    for gap in (1e-3, 1e-5, 1e-8, 1e-12, 1e-15):
        for q in (1 - gap, 1 + gap):
            value = tsallis.log_q(log_x, q)
            (slope,) = torch.autograd.grad(value.sum(), log_x)
            bound = 1.1 * gap * log_x.detach().abs()  # of the series (q - 1) log(x)^2 / 2 and its derivative
            assert ((value - log_x).abs() <= bound * log_x.abs() + 1e-13).all()
            assert ((slope - 1).abs() <= bound + 1e-13).all()


@pytest.mark.parametrize("q", QS)
def test_log_q_is_monotone_never_overflows_and_keeps_a_gradient_where_it_grows(q):
    far = torch.tensor([20, 29.9, 30.1, 80, 400, 1e4, 1e10, 1e17])
    log_x = torch.cat([-far.flip(0), far]).requires_grad_()
    value = tsallis.log_q(log_x, q)
    (gradient,) = torch.autograd.grad(value.sum(), log_x)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert (value[log_x.abs() < 1e5] ** 2).isfinite().all()  # V's loss squares it
    assert (value.diff() >= 0).all() and (gradient >= 0).all()
    growing = gradient[-8:] if q >= 1 else gradient[:8]
    assert (growing > 0).all()


@pytest.mark.parametrize("q", [0.5, 1.0, 1.5, 2.0])
def test_log_q_of_a_vector_is_of_the_joint_density_or_summed_over_dimensions(q):
    densities = torch.rand(7, 3, dtype=torch.float64) + 0.5

    def log_q(x):
        return x.log() if q == 1 else (x ** (q - 1) - 1) / (q - 1)

    joint, summed = (tsallis.log_q_density(densities.log(), q, kind) for kind in ("joint", "per-dimension"))
    assert_close(joint, log_q(densities.prod(-1, keepdim=True)))
    assert_close(summed, log_q(densities).sum(-1, keepdim=True))
    assert torch.allclose(joint, summed) == (q == 1)
    one_dimension = [tsallis.log_q_density(densities[:, :1].log(), q, kind) for kind in ("joint", "per-dimension")]
    assert_close(*one_dimension)


# ------------------------------------------------------------------------------- discrete distributions


def distributions(count: int, size: int):
    dirichlet = torch.distributions.Dirichlet(torch.full((size,), 0.7, dtype=torch.float64))
    return dirichlet.sample((count,)) * 0.99 + 0.01 / size


@pytest.mark.parametrize("q", [0.2, 0.7, 1.3, 1.7, 2.0])
def test_both_forms_of_the_tsallis_bregman_divergence_are_the_bregman_divergence(q):
    p, p_k = distributions(50, 6), distributions(50, 6)

    def log_q(x):
        return tsallis.log_q(x.log(), q)

    def psi(x):  # Eq. 17
        return (1 - (x**q).sum(-1)) / (1 - q)

    twenty = (p * (log_q(p) - q * log_q(p_k))).sum(-1) - (1 - q) * (p_k * log_q(p_k)).sum(-1)
    eighteen = (q * (p * p_k ** (q - 1)).sum(-1) - (p**q).sum(-1)) / (1 - q) + (p_k**q).sum(-1)
    x = p_k.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(psi(x).sum(), x)
    definition = psi(p) - psi(p_k) - (gradient * (p - p_k)).sum(-1)
    assert_close((p * log_q(p)).sum(-1), psi(p))  # Eq. 19
    assert_close(twenty, definition)
    assert_close(eighteen, definition)
    assert (definition > 1e-6).all()
    same = (p * (log_q(p) - q * log_q(p))).sum(-1) - (1 - q) * (p * log_q(p)).sum(-1)
    assert_close(same, torch.zeros_like(same))


def test_the_tsallis_bregman_divergence_tends_to_the_kl():
    p, p_k = distributions(50, 6), distributions(50, 6)
    kl = (p * (p / p_k).log()).sum(-1)
    for gap in (1e-3, 1e-6, -1e-6):
        q = 1 + gap
        log_p, log_k = tsallis.log_q(p.log(), q), tsallis.log_q(p_k.log(), q)
        divergence = (p * (log_p - q * log_k)).sum(-1) - (1 - q) * (p_k * log_k).sum(-1)
        assert ((divergence - kl).abs() < 30 * abs(gap)).all()


def simplex_projection(x):
    """The nearest point of the simplex, by sorting: a sparse distribution."""
    ordered = x.sort(descending=True).values
    cumulative = ordered.cumsum(0) - 1
    count = (ordered * torch.arange(1, len(x) + 1) > cumulative).sum()
    return (x - cumulative[count - 1] / count).clamp(min=0)


def expected_loss(loss, log_p, p_k, q_values):
    """The expectation over a ~ p of a script's own loss, for a finite set of actions."""
    columns = [x[:, None] for x in (log_p, p_k.log(), q_values)]
    losses = [loss(*(x[i : i + 1] for x in columns)) for i in range(len(p_k))]
    return (log_p.exp() * torch.stack(losses)).sum()


def test_at_q_2_the_loss_is_least_at_the_sparse_projection():
    args = tsallis.Args(bregman_stepsize=0.5, entropy_coef=0.2, tsallis_q=2.0, entropy_q=2.0)
    q_values, p_k = torch.randn(8, dtype=torch.float64), distributions(1, 8)[0]

    def objective(p):
        return expected_loss(lambda *columns: tsallis.tsallis_loss(*columns, args), p.log(), p_k, q_values)

    # (1/t)(p - 2 p_k) + 2 lambda p_k - Q, averaged over p, is a square: complete it.
    best = simplex_projection(((0.5 - 0.2) * 2 * p_k + q_values) / (2 * 0.5))
    assert 1 < (best > 0).sum() < 8  # sparse, and not a vertex
    p = best.clamp(min=1e-12).requires_grad_()
    (gradient,) = torch.autograd.grad(objective(p), p)
    support, rest = gradient[best > 0], gradient[best == 0]
    assert_close(support, support.mean().expand_as(support), rtol=0, atol=1e-9)  # the KKT conditions
    assert (rest > support.mean()).all()
    lowest = objective(best.clamp(min=1e-12))
    assert all(lowest < objective(other) for other in distributions(100, 8))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
@pytest.mark.parametrize("module", [mdpo, tsallis])
def test_the_kl_loss_is_least_at_the_closed_form(module, entropy_coef):
    q_values, p_k, inverse_t = torch.randn(6, dtype=torch.float64), distributions(1, 6)[0], 0.5
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=200, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    args = make_args(tsallis, tsallis_q=1.0, entropy_q=1.0, entropy_coef=entropy_coef)
    losses = {
        mdpo: lambda *columns: mdpo.mdpo_loss(*columns, inverse_t, entropy_coef),
        tsallis: lambda *columns: tsallis.tsallis_loss(*columns, args),
    }

    def objective():
        optimizer.zero_grad()
        loss = expected_loss(losses[module], logits.log_softmax(-1), p_k, q_values)
        loss.backward()
        return loss

    optimizer.step(objective)
    t = 1 / inverse_t
    closed_form = (p_k ** (1 - entropy_coef * t) * torch.exp(t * q_values)).log().softmax(-1)  # Eq. 15, soft
    assert_close(logits.softmax(-1).detach(), closed_form, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------- the squashed Gaussian


def squashed(mean, std):
    return TransformedDistribution(Normal(mean, std), [TanhTransform(cache_size=1)])


def test_the_log_density_is_that_of_torchs_tanh_transform(script):
    mean, log_std, noise = torch.randn(3, 200, 4, dtype=torch.float64)
    u = mean + log_std.exp() * noise
    assert u.abs().max() > 5
    distribution = squashed(mean, log_std.exp())
    action = distribution.transforms[0](u)
    assert_close(script.log_density(noise, log_std, u), distribution.log_prob(action))


def test_the_log_density_is_exact_where_the_tanh_has_saturated(script):
    u = torch.tensor([-100.0, -30, -12, 12, 30, 100], requires_grad=True)  # 1 - tanh(12)^2 rounds to 0 in float32
    log_density = script.log_density(torch.zeros(6), torch.zeros(6), u)
    (gradient,) = torch.autograd.grad(log_density.sum(), u)
    assert_close(log_density, -0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 2 * u.abs())  # 1 - tanh^2 is 4 e^(-2|u|)
    assert_close(gradient, 2 * u.sign())


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.6)])
def test_the_density_integrates_to_one_over_the_actions(script, mean, log_std):
    edges = torch.linspace(-1, 1, 400_001, dtype=torch.float64)
    u = torch.atanh((edges[1:] + edges[:-1]) / 2)
    log_std = torch.tensor(log_std, dtype=torch.float64)
    density = script.log_density((u - mean) / log_std.exp(), log_std, u).exp()
    assert (density.sum() * 2 / 400_000).item() == pytest.approx(1, abs=1e-5)


def test_log_std_is_clipped_to_minus_20_and_2(script):
    mean, log_std = script.mean_and_log_std(torch.tensor([[5.0, -7.0, -50.0, 50.0]]))
    assert mean.tolist() == [[5, -7]] and log_std.tolist() == [[-20, 2]]


@pytest.mark.parametrize("hidden", [64, 256])
def test_the_first_policy_is_nearly_the_same_in_every_state_however_large_its_observation(script, hidden):
    """Otherwise the first pi_k is almost deterministic in some states, and the KL to it has no bound (on Humanoid)."""
    agent = script.Agent(376, 17, hidden)
    with torch.no_grad():
        mean, log_std = script.mean_and_log_std(agent.policy(100 * torch.randn(1000, 376)))
    assert mean.abs().max() < 1 and log_std.abs().max() < 1
    assert (mean.std(0) > 0).all()
    assert script is sac or torch.equal(flat(agent.old_policy.parameters()), flat(agent.policy.parameters()))
    assert torch.equal(flat(agent.target_v.parameters()), flat(agent.v.parameters()))


def test_the_numpy_policy_is_the_torch_policy_and_follows_its_parameters(script):
    agent = script.Agent(OBS, ACTIONS, 32)
    act, obs, noise = partial(script.act, agent.policy_params), torch.randn(OBS), torch.randn(ACTIONS)
    for scale in (100.0, 1.5, 3.0):
        for parameter in agent.policy[-1].parameters():
            parameter.data *= scale
        mean, log_std = script.mean_and_log_std(agent.policy(obs))
        for eps in (noise, torch.zeros(ACTIONS)):
            expected = torch.tanh(mean + log_std.exp() * eps).detach()
            assert_close(torch.as_tensor(act(obs.double().numpy(), eps.numpy())), expected)  # environments give doubles
        np.testing.assert_array_equal(act(obs.numpy()), act(obs.numpy(), np.zeros(ACTIONS, np.float32)))
    agent.policy[-1].bias.data[ACTIONS:] = 50  # beyond the clip of log std
    limit = torch.tanh(agent.policy(obs)[:ACTIONS] + math.exp(2) * 0.01).detach()
    assert_close(torch.as_tensor(act(obs.numpy(), np.full(ACTIONS, 0.01, np.float32))), limit)


# --------------------------------------------------------------------------------------------------- losses and updates


def log_q_definition(x, q):
    return torch.log(x) if q == 1 else (x ** (q - 1) - 1) / (q - 1)


def reference(script, agent, batch, noise, args):
    """The losses from the paper by torch.distributions, and each network's gradient of its own loss."""
    agent = copy.deepcopy(agent)
    obs, action, next_obs = batch[:, :OBS], batch[:, OBS : OBS + ACTIONS], batch[:, OBS + ACTIONS : -2]
    reward, terminated = batch[:, -2:].T

    def distribution(net):
        mean, log_std = net(obs).chunk(2, -1)
        return mean, log_std.clamp(-20, 2).exp()

    mean, std = distribution(agent.policy)
    new_action = torch.tanh(mean + std * noise)
    log_pi = squashed(mean, std).log_prob(new_action)
    both = torch.cat([obs, new_action], -1)
    q_new, lam = torch.minimum(agent.q1(both), agent.q2(both)).squeeze(-1), args.entropy_coef
    if script is sac:
        actor, regularizer = lam * log_pi.sum(-1) - q_new, log_pi.sum(-1)
    else:
        log_k = squashed(*distribution(agent.old_policy)).log_prob(new_action)
        inverse_t = args.bregman_stepsize
        if script is mdpo:
            actor = inverse_t * log_pi.sum(-1) - (inverse_t - lam) * log_k.sum(-1) - q_new
            regularizer = log_pi.sum(-1)
        else:

            def lq(log_density, q):
                if args.log_q == "joint":
                    return log_q_definition(log_density.sum(-1).exp(), q)
                return log_q_definition(log_density.exp(), q).sum(-1)

            qb, qm = args.tsallis_q, args.entropy_q
            actor = inverse_t * (lq(log_pi, qb) - qb * lq(log_k, qb)) + lam * qm * lq(log_k, qm) - q_new
            regularizer = lq(log_pi, qm)
    v_target = (q_new - lam * regularizer).detach()
    q_target = (reward + args.gamma * (1 - terminated) * agent.target_v(next_obs).squeeze(-1)).detach()
    here = torch.cat([obs, action], -1)
    losses = dict(
        actor_loss=actor.mean(),
        qf1_loss=0.5 * ((agent.q1(here).squeeze(-1) - q_target) ** 2).mean(),
        qf2_loss=0.5 * ((agent.q2(here).squeeze(-1) - q_target) ** 2).mean(),
        vf_loss=0.5 * ((agent.v(obs).squeeze(-1) - v_target) ** 2).mean(),
    )
    networks = (agent.policy, agent.q1, agent.q2, agent.v)
    gradients = [
        flat(torch.autograd.grad(loss, list(net.parameters()), retain_graph=True))
        for net, loss in zip(networks, losses.values(), strict=True)
    ]
    metrics = dict(qf1_values=agent.q1(here).mean(), entropy=-log_pi.sum(-1).mean())
    if script is not sac:
        metrics["kl_to_old"] = (log_pi - log_k).sum(-1).mean()
    return losses | metrics, gradients


CASES = [(mdpo, {}), (mdpo, dict(entropy_coef=0.0)), (sac, {}), (sac, dict(entropy_coef=0.0, gamma=0.5))] + [
    (tsallis, dict(tsallis_q=qb, entropy_q=qm, log_q=kind))
    for qb, qm in ((1.5, 1.5), (2.0, 1.0), (0.6, 1.4), (1.0, 2.0))
    for kind in ("joint", "per-dimension")
]


@pytest.mark.parametrize(("module", "flags"), CASES)
def test_losses_and_gradients_are_the_papers_and_each_reaches_its_own_network_only(module, flags):
    agent, (batch, noise), args = make_agent(module), make_batch(), make_args(module, **flags)
    expected_losses, expected = reference(module, agent, batch, noise, args)
    losses, gradients = gradients_of_update(module, agent, batch, noise, args)
    assert losses.keys() == {f"losses/{name}" for name in expected_losses}
    for name, loss in expected_losses.items():
        assert_close(losses[f"losses/{name}"], loss.detach(), rtol=1e-6, atol=1e-8)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-8 * theirs.abs().max().item())
        assert theirs.abs().max() > 1e-3


def test_the_reparameterized_gradient_is_that_of_finite_differences_with_the_same_noise(script):
    agent, (batch, noise), args = make_agent(script), make_batch(), make_args(script)
    gradient = gradients_of_update(script, agent, batch, noise, args)[1][0]
    for _ in range(3):
        direction = torch.randn_like(gradient)

        def shifted(size, direction=direction):
            other = copy.deepcopy(agent)
            start = nn.utils.parameters_to_vector(other.policy.parameters())
            nn.utils.vector_to_parameters(start + size * direction, other.policy.parameters())
            return gradients_of_update(script, other, batch, noise, args)[0]["losses/actor_loss"].item()

        difference = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
        assert (gradient @ direction).item() == pytest.approx(difference, rel=1e-5)


def test_only_termination_cuts_the_bootstrap_and_targets_come_from_the_target_v(script):
    batch, noise = make_batch()

    def q_gradient(terminated, target_v=1.0, v=1.0):
        agent = make_agent(script)
        for net, scale in ((agent.target_v, target_v), (agent.v, v)):
            for parameter in net.parameters():
                parameter.data *= scale
        batch[:, -1] = terminated
        return gradients_of_update(script, agent, batch, noise, make_args(script))[1][1]

    assert torch.equal(q_gradient(1), q_gradient(1, target_v=3))  # the episode ended: nothing beyond counts
    assert not torch.equal(q_gradient(0), q_gradient(0, target_v=3))
    assert torch.equal(q_gradient(0), q_gradient(0, v=3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_adam_is_torchs(script, dtype, tolerance):
    ours = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((40,), (3, 40), ())]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    scales = torch.logspace(-7, 1, 40, dtype=dtype)  # small gradients show eps, and where it is added
    adam = script.Adam(ours).to(dtype)
    reference = torch.optim.Adam(theirs)  # eps 1e-8, as in the authors' code
    for step in range(200):
        reference.param_groups[0]["lr"] = learning_rate = 0.01 * (1 - step / 200)
        for p in theirs:
            p.grad = torch.randn_like(p) * (scales if p.shape else 1)
        adam.step([p.grad.clone() for p in theirs], torch.tensor(learning_rate, dtype=dtype))
        reference.step()
    for p, expected in zip(ours, theirs, strict=True):
        assert_close(p.detach(), expected.detach(), rtol=tolerance, atol=tolerance)


def test_adams_state_restored_from_a_checkpoint_continues_the_same_steps(script):
    torch.manual_seed(1)
    gradients = torch.randn(20, 5)
    first, second = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    one = script.Adam([first])
    for gradient in gradients[:10]:
        one.step([gradient], torch.tensor(0.1))
    second.data.copy_(first)
    two = script.Adam([second])
    two.load_state_dict(one.state_dict())
    for gradient in gradients[10:]:
        for adam in (one, two):
            adam.step([gradient], torch.tensor(0.1))
    assert torch.equal(first, second)


def test_polyak_averaging_to_the_letter(script):
    agent, (batch, noise) = make_agent(script), make_batch()
    before, v = flat(agent.target_v.parameters()), flat(agent.v.parameters())
    script.update(agent, batch, noise, make_args(script, tau=0.05))
    after = flat(agent.v.parameters())
    assert not torch.equal(v, after)
    assert_close(flat(agent.target_v.parameters()), 0.95 * before + 0.05 * after, rtol=1e-12, atol=1e-15)


def test_an_update_is_torchs_adam_on_the_critics_then_on_the_policy_and_leaves_the_old_policy(script):
    agent, (batch, noise), args = make_agent(script), make_batch(), make_args(script, learning_rate=1e-3)
    networks = agent.policy, agent.q1, agent.q2, agent.v
    old_policy = None if script is sac else flat(agent.old_policy.parameters())
    copies = [nn.Parameter(flat(net.parameters())) for net in networks]
    adam = torch.optim.Adam(copies, lr=1e-3)  # eps 1e-8, as in the authors' code
    for _ in range(20):
        before = copy.deepcopy(agent)
        _, *critic_gradients = gradients_of_update(script, copy.deepcopy(agent), batch, noise, args)[1]
        script.update(agent, batch, noise, args)
        before.q1.load_state_dict(agent.q1.state_dict())  # the policy ascends the new Q
        before.q2.load_state_dict(agent.q2.state_dict())
        policy_gradient = gradients_of_update(script, before, batch, noise, args)[1][0]
        for parameter, gradient in zip(copies, [policy_gradient, *critic_gradients], strict=True):
            parameter.grad = gradient
        adam.step()
    for net, expected in zip(networks, copies, strict=True):
        assert_close(flat(net.parameters()), expected.detach(), rtol=1e-6, atol=1e-8)
    assert script is sac or torch.equal(flat(agent.old_policy.parameters()), old_policy)


def test_the_loss_with_t_times_q_has_a_proportional_gradient():
    log_pi, log_k, q = (torch.randn(9, 1, dtype=torch.float64, requires_grad=True) for _ in range(3))
    t, lam = 1 / 0.3, 0.2
    ours = torch.autograd.grad(mdpo.mdpo_loss(log_pi, log_k, q, 1 / t, lam), (log_pi, log_k, q))
    paper = torch.autograd.grad((log_pi - log_k - t * q + lam * t * log_k).mean(), (log_pi, log_k, q))  # Eq. 11, soft
    for x, y in zip(ours, paper, strict=True):
        assert_close(t * x, y)


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
@pytest.mark.parametrize("q", [0.5, 1.0, 1.5, 2.0])
def test_tsallis_at_stepsize_lambda_has_the_loss_of_sac_tsallis(q, kind):
    log_pi, log_k, values = torch.randn(9, 3), torch.randn(9, 3), torch.randn(9, 1)
    args = tsallis.Args(bregman_stepsize=0.2, entropy_coef=0.2, tsallis_q=q, entropy_q=q, log_q=kind)
    expected = (0.2 * tsallis.log_q_density(log_pi, q, kind) - values).mean()
    assert tsallis.tsallis_loss(log_pi, log_k, values, args).item() == expected.item()


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
@pytest.mark.parametrize("q", [0.05, 0.5, 0.99, 1.01, 1.5, 2.0])
@pytest.mark.parametrize("outputs", [(0, 0), (0, -12), (0, 30), (50, -30), (-50, 3), (8, -3)])
def test_tsallis_stays_finite_at_every_q_in_17_dimensions_and_far_from_density_1(q, kind, outputs):
    """Extreme means and log stds, the old policy elsewhere. Not covered: both stds near e^-20, means apart, q = 0.99
    per dimension. There a squared gradient overflows float32 in Adam, and the run stops with a sentence."""
    agent = make_agent(tsallis, 20, 17).float()
    for net, sign in ((agent.policy, 1), (agent.old_policy, -1)):
        net[-1].bias.data[:17] += sign * outputs[0]
        net[-1].bias.data[17:] += outputs[1]
    batch, noise = (x.float() for x in make_batch(20, 17))
    args = make_args(tsallis, tsallis_q=q, entropy_q=q, log_q=kind)
    for _ in range(3):
        losses = tsallis.update(agent, batch, noise, args)
        assert all(loss.isfinite() for loss in losses.values()), losses
    assert all(tensor.isfinite().all() for tensor in agent.state_dict().values())  # Adam's moments too


def test_sac_agrees_with_stable_baselines3_where_the_two_coincide():
    """The same policy and Q networks: log-density, loss and the actor's gradient."""
    env = gym.make("Pendulum-v1")  # bounds of 2, which stable-baselines3 rescales to 1
    kwargs = dict(policy_kwargs=dict(net_arch=[32, 32]), ent_coef=0.2, device="cpu", seed=0, buffer_size=100)
    model = stable_baselines3.SAC("MlpPolicy", env, **kwargs)
    actor, critic = model.actor, model.critic
    agent = sac.Agent(3, 1, 32)
    agent.q1.load_state_dict(critic.qf0.state_dict())
    agent.q2.load_state_dict(critic.qf1.state_dict())
    heads = [torch.cat([getattr(actor.mu, x), getattr(actor.log_std, x)]) for x in ("weight", "bias")]
    theirs = [*actor.latent_pi.parameters(), *heads]
    for parameter, value in zip(agent.policy.parameters(), theirs, strict=True):
        parameter.data.copy_(value)
    torch.manual_seed(5)
    obs = torch.randn(64, 3)
    action, log_prob = actor.action_log_prob(obs)
    loss = (0.2 * log_prob - torch.cat(critic(obs, action), 1).min(1).values).mean()
    torch.manual_seed(5)
    torch.randn(64, 3)
    noise = torch.randn(64, 1)
    batch = torch.cat([obs, action.detach(), obs, torch.zeros(64, 2)], -1)
    losses, (gradient, *_) = gradients_of_update(sac, agent, batch, noise, sac.Args())
    tolerance = dict(rtol=1e-4, atol=1e-4)  # theirs adds 1e-6 to 1 - tanh^2
    assert_close(losses["losses/entropy"], -log_prob.mean().detach(), **tolerance)
    assert_close(losses["losses/actor_loss"], loss.detach(), **tolerance)
    parts = [*actor.latent_pi.parameters(), actor.mu.weight, actor.log_std.weight, actor.mu.bias, actor.log_std.bias]
    assert_close(gradient, flat(torch.autograd.grad(loss, parts)), rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------- identities of runs


@pytest.mark.parametrize("steps", [1, 2])
def test_mdpo_at_stepsize_lambda_is_sac_to_the_bit(in_process, steps):
    common = (*LONGER, "--gradient-steps", steps)
    at_lambda = ("--bregman-stepsize", 0.2, "--old-policy-interval", 50)
    first = in_process(mdpo, *common, *at_lambda).points
    second = in_process(sac, *common, "--run-name", "sac").points
    assert differing(load("r"), load("sac")) == set()
    kl = [p.pop("losses/kl_to_old") for p in first if "losses/kl_to_old" in p]
    assert kl and timeless(first) == timeless(second)
    in_process(mdpo, *SHORT, "--bregman-stepsize", 0.3, "--old-policy-interval", 50, "--run-name", "other")
    in_process(sac, *SHORT, "--run-name", "short")
    assert differing(load("other"), load("short"))


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
def test_tsallis_at_q_1_is_mdpo_to_the_bit(in_process, kind):
    common = ("--bregman-stepsize", 0.5, "--old-policy-interval", 50)
    first = in_process(mdpo, *LONGER, *common).points
    flags = ("--tsallis-q", 1, "--log-q", kind, "--run-name", "tsallis")
    second = in_process(tsallis, *LONGER, *common, *flags).points
    assert differing(load("r"), load("tsallis")) == set()
    assert "losses/kl_to_old" in first[-1] and timeless(first) == timeless(second)
    in_process(tsallis, *LONGER, *common, "--tsallis-q", 1.2, "--entropy-q", 1, "--log-q", kind, "--run-name", "other")
    assert differing(load("r"), load("other"))


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
def test_tsallis_at_stepsize_lambda_and_one_q_does_not_depend_on_the_old_policy(in_process, kind):
    common = (*SHORT, "--bregman-stepsize", 0.2, "--tsallis-q", 1.5, "--log-q", kind)
    for name, flags in dict(r=(7,), same=(1000,), two=(7, "--entropy-q", 2), qs=(1000, "--entropy-q", 2)).items():
        in_process(tsallis, *common, "--run-name", name, "--old-policy-interval", *flags)
    assert differing(load("r"), load("same")) == set()
    assert differing(load("two"), load("qs"))


def test_a_compiled_run_agrees_with_an_eager_one(in_process):
    """To rounding. A rounding that flips a ReLU makes Adam take another step, hence the median."""
    flags = (*SHORT, "--total-timesteps", 100)
    for name, extra in dict(eager=(), compiled=("--compile",)).items():
        in_process(mdpo, *flags, *extra, "--run-name", name)
    for part in (*NETWORKS, "old_policy"):
        eager, compiled = (flat(load(name)[part].values()) for name in ("eager", "compiled"))
        error = (eager - compiled).abs()
        assert error.median() < 1e-6 and error.max() < 5e-3, part


# ------------------------------------------------------------------------------------ the order of an iteration


def watch_updates(script, monkeypatch):
    events, update = [], script.update

    def watched(agent, batch, noise, args):
        old = None if script is sac else flat(agent.old_policy.parameters())
        before = {name: flat(getattr(agent, name).parameters()) for name in NETWORKS}
        events.append((before, old, batch.clone(), noise.clone(), len(Bounds.made[-1].transitions)))
        return update(agent, batch, noise, args)

    monkeypatch.setattr(script, "update", watched)
    return events


@pytest.mark.parametrize(("steps", "interval"), [(1, 7), (3, 3), (3, 7)])
def test_gradient_steps_are_full_updates_with_their_own_batches_and_pi_k_is_refreshed_every_m_updates(
    script, in_process, monkeypatch, steps, interval
):
    events = watch_updates(script, monkeypatch)
    flags = () if script is sac else ("--old-policy-interval", interval)
    in_process(script, *SHORT, "--gradient-steps", steps, "--total-timesteps", 80, *flags)
    assert [event[-1] for event in events] == [k for k in range(65, 81) for _ in range(steps)]  # after each own step
    for (before, _, batch, noise, _), (after, _, other_batch, other_noise, _) in pairwise(events):
        assert not any(torch.equal(before[name], after[name]) for name in NETWORKS)
        assert not torch.equal(batch, other_batch) and not torch.equal(noise, other_noise)
    if script is not sac:
        for i, (_, old, *_) in enumerate(events):
            assert torch.equal(old, events[i - i % interval][0]["policy"])  # as it was when the m updates began


def test_the_refreshes_of_pi_k_continue_after_a_resume_as_if_it_had_not_stopped(in_process, monkeypatch):
    events = watch_updates(mdpo, monkeypatch)
    flags = (*SHORT, "--old-policy-interval", 7, "--gradient-steps", 2)
    in_process(mdpo, *flags, "--total-timesteps", 70)
    in_process(mdpo, "--resume", "--run-name", "r", "--total-timesteps", 90)
    assert len(events) == 2 * (90 - 64)
    for i, (_, old, *_) in enumerate(events):
        assert torch.equal(old, events[i - i % 7][0]["policy"])


def test_actions_are_in_plus_minus_1_for_q_and_within_the_bounds_for_the_environment(script, in_process, monkeypatch):
    events = watch_updates(script, monkeypatch)
    in_process(script, *SHORT, "--total-timesteps", 400, "--learning-starts", 350)
    env = Bounds.made[-1]
    low, high = env.action_space.low, env.action_space.high
    rows = np.fromfile("runs/r/replay.bin", np.float32).reshape(-1, 10)[:400]
    received = np.array([transition[1] for transition in env.transitions])
    np.testing.assert_allclose(received, low + (rows[:, 3:5] + 1) / 2 * (high - low), rtol=1e-5, atol=1e-6)
    random, policys = rows[:350, 3:5], rows[350:, 3:5]
    np.testing.assert_allclose(random.mean(0), 0, atol=0.12)
    np.testing.assert_allclose(random.std(0), 3**-0.5, rtol=0.1)  # uniform
    assert abs(random).max() <= 1 and abs(policys).max() <= 1 and policys.std() > 0.3
    assert len(events) == 50 and all(event[2][:, 3:5].abs().max() <= 1 for event in events)

    assert script.main(["--evaluate", "--run-name", "r", "--eval-episodes", "1"]) == 0
    policy = script.mlp(3, 16, 4)
    policy.load_state_dict(load()["policy"])
    env = Bounds.made[-1]
    for obs, action, *_ in env.transitions:
        mean = torch.tanh(policy(torch.as_tensor(obs))[:2]).detach().numpy()
        np.testing.assert_allclose(action, low + (mean + 1) / 2 * (high - low), rtol=1e-4, atol=1e-5)
    assert env.transitions


def test_the_buffer_holds_what_happened_and_only_termination_as_an_end(script, in_process):
    in_process(script, *SHORT)
    env = Bounds.made[-1]
    rows = np.fromfile("runs/r/replay.bin", np.float32).reshape(-1, 10)
    assert len(rows) == 150 + script.HEADROOM and len(env.transitions) == 160
    for row, (obs, _, next_obs, reward, terminated, truncated) in zip(rows, env.transitions, strict=False):
        np.testing.assert_array_equal(np.delete(row, [3, 4]), np.float32([*obs, *next_obs, reward, terminated]))
        assert not (terminated and truncated)
    assert any(t[-1] for t in env.transitions) and any(t[-2] for t in env.transitions)


# --------------------------------------------------------------------------------------------------- the replay buffer


def small_buffer(script, monkeypatch, resume=False):
    monkeypatch.setattr(script, "HEADROOM", 20)
    return script.ReplayBuffer(Path("replay.bin"), 7, 60, 1000, resume)


def fill(buffer, first, last):
    for k in range(first, last):
        buffer.add(k, np.float64([k, k]), np.float32([k]), np.float32([k, k]), (float(k), False))


def test_the_buffer_wraps_around_and_samples_the_last_transitions_up_to_the_newest(script, monkeypatch):
    buffer, done = small_buffer(script, monkeypatch), 0
    for k in (1, 5, 59, 60, 61, 80, 81, 200, 1003):
        fill(buffer, done, k)
        done = k
        sample = buffer.sample(k, 3000)
        assert (sample[:, :1] == sample[:, :-1]).all()
        assert {int(x) for x in sample[:, 0]} == set(range(max(0, k - 60), k)), k


def test_sampling_is_uniform(script, monkeypatch):
    buffer = small_buffer(script, monkeypatch)
    fill(buffer, 0, 145)
    counts = np.bincount(buffer.sample(145, 60_000)[:, 0].int().numpy() - 85, minlength=60)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 30 < chi_square < 102  # 59 degrees of freedom: the 0.1 % and 99.95 % points


def test_the_rows_of_a_checkpoint_survive_as_many_steps_as_the_headroom_and_are_read_back(script, monkeypatch):
    buffer = small_buffer(script, monkeypatch)
    fill(buffer, 0, 135)
    buffer.state_dict()
    fill(buffer, 135, 155)  # killed after 20 more steps
    again = small_buffer(script, monkeypatch, resume=True)
    torch.manual_seed(3)
    assert {int(x) for x in again.sample(135, 3000)[:, 0]} == set(range(75, 135))
    fill(again, 155, 156)
    assert {int(x) for x in again.sample(135, 3000)[:, 0]} != set(range(75, 135))  # one more would not


def test_a_million_transitions_of_humanoid_take_at_most_3_3_gigabytes_and_only_as_they_come(script):
    buffer = script.ReplayBuffer(Path("replay.bin"), 2 * 376 + 17 + 2, 1_000_000, 1000, False)
    assert buffer.rows.nbytes == os.stat("replay.bin").st_size <= 3.3e9
    before = os.stat("replay.bin").st_blocks * 512
    for k in range(100):
        buffer.add(k, np.ones(376), np.ones(17), np.ones(376), (1.0, True))
    buffer.state_dict()
    assert before < 1e6 and os.stat("replay.bin").st_blocks * 512 < 2e6


class Killed(BaseException):
    """Reaches no handler of the script, as a kill does."""


def test_a_resume_after_a_kill_does_not_depend_on_what_was_written_since_the_checkpoint(
    script, in_process, monkeypatch
):
    """The buffer has wrapped around. The run has overwritten rows since its checkpoint at 250 and is killed at 270."""
    monkeypatch.setattr(script, "HEADROOM", 50)
    monkeypatch.setitem(script.PRESETS, "loaded", dict(checkpoint_interval=50))
    flags = (*SHORT, "--checkpoint-interval", 50, "--total-timesteps", 300)
    calls, update = [], script.update

    def killed(*given):
        calls.append(given)
        if len(calls) > 270 - 64:
            raise Killed
        return update(*given)

    with monkeypatch.context() as patch:
        patch.setattr(script, "update", killed)
        with pytest.raises(Killed):
            in_process(script, *flags)
    assert load()["step"] == 250
    shutil.copytree("runs/r", "runs/spoiled", symlinks=True)
    rows = np.memmap("runs/spoiled/replay.bin", np.float32, "r+").reshape(200, -1)
    assert np.isfinite(rows).all()
    rows[np.arange(250, 300) % 200] = np.nan
    rows.base.flush()
    resume = ("--resume", "--checkpoint-interval", 50)
    first, second = (in_process(script, *resume, "--run-name", name) for name in ("r", "spoiled"))
    assert first.status == second.status == 0 and timeless(first.points) == timeless(second.points)
    assert differing(load("r"), load("spoiled")) == set()
