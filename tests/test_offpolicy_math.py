"""The off-policy scripts' arithmetic, against definitions, other code and finite differences."""

import copy
import importlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

import mdpo_offpolicy as mdpo
import mdpo_tsallis as tsallis
import sac

OFF_POLICY = ("mdpo_offpolicy", "mdpo_tsallis", "sac")
QS = (1e-3, 0.1, 0.5, 0.9, 0.999999, 1.0, 1.000001, 1.1, 1.5, 1.8, 2.0)
LOW, HIGH = np.float32([-0.4, -2.0, 0.5]), np.float32([0.4, 3.0, 1.5])  # neither symmetric nor 1
OBS, ACTIONS, BATCH = 4, 3, 16


@pytest.fixture(params=OFF_POLICY)
def script(request):
    return importlib.import_module(request.param)


def make_agent(script, low=LOW, high=HIGH, obs_dim=OBS, seed=0, **flags):
    """An agent whose slow and old networks differ from the others, as they do in the middle of training."""
    torch.manual_seed(seed)
    if script is not sac:
        flags = dict(bregman_stepsize=0.5) | flags
    if script is tsallis:
        flags = dict(tsallis_q=1.5, entropy_q=1.3) | flags
    agent = script.Agent(obs_dim, low, high, script.Args(**dict(hidden_size=32) | flags)).double()
    for net in (agent.slow_v, *([] if script is sac else [agent.old_policy])):
        net.flat += 0.05 * torch.randn_like(net.flat)
    return agent


def make_batch(obs_dim=OBS, action_dim=ACTIONS, size=BATCH, low=LOW, high=HIGH, seed=1):
    g = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, size, obs_dim, generator=g, dtype=torch.float64)
    action = torch.as_tensor(low) + torch.as_tensor(high - low) * torch.rand(size, action_dim, generator=g).double()
    reward = torch.randn(size, 1, generator=g, dtype=torch.float64)
    terminated = (torch.rand(size, 1, generator=g) < 0.3).double()
    noise = torch.randn(size, action_dim, generator=g, dtype=torch.float64)
    return torch.cat([obs, action, next_obs, reward, terminated], -1), noise


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


def test_log_q_passes_smoothly_to_the_logarithm():
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
def test_log_q_never_overflows_and_keeps_a_gradient_where_it_grows(q):
    far = torch.tensor([20, 29.9, 30.1, 80, 400, 1e4, 1e10, 1e17])
    log_x = torch.cat([-far.flip(0), far]).requires_grad_()
    value = tsallis.log_q(log_x, q)
    (gradient,) = torch.autograd.grad(value.sum(), log_x)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert (value[log_x.abs() < 1e5] ** 2).isfinite().all()  # V's loss squares it
    assert (value.diff() >= 0).all() and (gradient >= 0).all()
    growing = gradient[-8:] if q >= 1 else gradient[:8]
    assert (growing > 0).all()


def distributions(count: int, size: int):
    return torch.distributions.Dirichlet(torch.full((size,), 0.7, dtype=torch.float64)).sample((count,)) * 0.99 + (
        0.01 / size
    )


@pytest.mark.parametrize("q", [0.2, 0.7, 1.3, 1.7, 2.0])
def test_both_forms_of_the_tsallis_bregman_divergence_are_the_bregman_divergence(q):
    torch.manual_seed(0)
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
    torch.testing.assert_close((p * log_q(p)).sum(-1), psi(p))  # Eq. 19
    torch.testing.assert_close(twenty, definition)
    torch.testing.assert_close(eighteen, definition)
    assert (definition > 1e-6).all()
    same = (p * (log_q(p) - q * log_q(p))).sum(-1) - (1 - q) * (p * log_q(p)).sum(-1)
    torch.testing.assert_close(same, torch.zeros_like(same))


def test_the_tsallis_bregman_divergence_tends_to_the_kl():
    torch.manual_seed(0)
    p, p_k = distributions(50, 6), distributions(50, 6)
    kl = (p * (p / p_k).log()).sum(-1)
    for gap in (1e-3, 1e-6):
        q = 1 + gap
        log_p, log_k = tsallis.log_q(p.log(), q), tsallis.log_q(p_k.log(), q)
        divergence = (p * (log_p - q * log_k)).sum(-1) - (1 - q) * (p_k * log_k).sum(-1)
        assert ((divergence - kl).abs() < 30 * gap).all()


# ------------------------------------------------------------------------------------- minimisers on finite action sets


def simplex_projection(x):
    """The nearest point of the simplex (Michelot's sort): a sparse distribution."""
    ordered = x.sort(descending=True).values
    cumulative = ordered.cumsum(0) - 1
    count = (ordered * torch.arange(1, len(x) + 1) > cumulative).sum()
    return (x - cumulative[count - 1] / count).clamp(min=0)


def tsallis_objective(p, p_k, q_values, **flags):
    """The expectation over a ~ p of the script's own loss, for a finite set of actions."""
    args = tsallis.Args(**flags)
    log_p, log_k = p.log()[:, None], p_k.log()[:, None]
    losses = [tsallis.tsallis_loss(*(x[i : i + 1] for x in (log_p, log_k, q_values)), args) for i in range(len(p))]
    return (p * torch.stack(losses)).sum()


def test_at_q_2_the_minimiser_is_the_sparse_projection():
    torch.manual_seed(0)
    flags = dict(bregman_stepsize=0.5, entropy_coef=0.2, tsallis_q=2.0, entropy_q=2.0)
    q_values, p_k = torch.randn(8, dtype=torch.float64), distributions(1, 8)[0]
    # (1/t)(p - 2 p_k) + 2 lambda p_k - Q, averaged over p, is a square: complete it.
    best = simplex_projection(((0.5 - 0.2) * 2 * p_k + q_values) / (2 * 0.5))
    assert 1 < (best > 0).sum() < 8  # sparse, and not a vertex
    p = best.clamp(min=1e-12).requires_grad_()
    (gradient,) = torch.autograd.grad(tsallis_objective(p, p_k, q_values, **flags), p)
    support, rest = gradient[best > 0], gradient[best == 0]
    torch.testing.assert_close(support, support.mean().expand_as(support), rtol=0, atol=1e-9)  # the KKT conditions
    assert (rest > support.mean()).all()
    lowest = tsallis_objective(best.clamp(min=1e-12), p_k, q_values, **flags)
    assert all(lowest < tsallis_objective(other, p_k, q_values, **flags) for other in distributions(200, 8))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
def test_the_kl_minimiser_is_the_closed_form(entropy_coef):
    torch.manual_seed(0)
    q_values, p_k, inverse_t = torch.randn(6, dtype=torch.float64), distributions(1, 6)[0], 0.5
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=200, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def objective():
        optimizer.zero_grad()
        log_p, log_k = logits.log_softmax(-1), p_k.log()
        terms = [
            mdpo.mdpo_loss(log_p[i : i + 1], log_k[i : i + 1], q_values[i : i + 1], inverse_t, entropy_coef)
            for i in range(6)
        ]
        loss = (log_p.exp() * torch.stack(terms)).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    t = 1 / inverse_t
    closed_form = (p_k ** (1 - entropy_coef * t) * torch.exp(t * q_values)).log().softmax(-1)  # Eq. 15, soft
    torch.testing.assert_close(logits.softmax(-1), closed_form, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------- the squashed Gaussian


def squashed(mean, std, low, high):
    scale, shift = torch.as_tensor((high - low) / 2), torch.as_tensor((high + low) / 2)
    return TransformedDistribution(Normal(mean, std), [TanhTransform(), AffineTransform(shift, scale)])


def squashed_log_prob(mean, std, action):
    """Of the action as a share of its range: the losses' λ and q are for actions in [-1, 1], whatever the bounds."""
    return squashed(mean, std, LOW, HIGH).log_prob(action) + torch.as_tensor((HIGH - LOW) / 2).log()


def test_the_log_density_is_that_of_torchs_tanh_transform(script):
    agent, (batch, noise) = make_agent(script), make_batch()
    obs = batch[:, :OBS]
    _, log_prob, _, inputs, *rest = script.policy_loss(agent, obs, noise)
    mean, log_std = script.mean_and_log_std(agent.policy(obs))
    action, by_dimension = inputs[:, OBS:], script is tsallis
    expected = squashed_log_prob(mean, log_std.exp(), action)
    torch.testing.assert_close(log_prob, expected if by_dimension else expected.sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs[:, :OBS], obs)
    assert (action > torch.as_tensor(LOW)).all() and (action < torch.as_tensor(HIGH)).all()
    if script is not sac:
        old_mean, old_log_std = script.mean_and_log_std(agent.old_policy(obs))
        expected = squashed_log_prob(old_mean, old_log_std.exp(), action)
        torch.testing.assert_close(rest[0], expected if by_dimension else expected.sum(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.6)])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.3, 2.0), (5.0, 6.0)])
def test_the_density_integrates_to_one_over_the_action_bounds(script, mean, log_std, low, high):
    scale, shift = torch.tensor((high - low) / 2, dtype=torch.float64), (high + low) / 2
    edges = torch.linspace(low, high, 400_001, dtype=torch.float64)
    action = (edges[1:] + edges[:-1]) / 2
    u = torch.atanh((action - shift) / scale)
    log_std = torch.tensor(log_std, dtype=torch.float64)
    density = script.gaussian_log_density((u - mean) / log_std.exp(), log_std) - script.log_slope(u, scale)
    assert (density.exp().sum() * (high - low) / 400_000).item() == pytest.approx(1, abs=1e-5)


def test_the_log_density_is_exact_where_the_tanh_has_saturated(script):
    u = torch.tensor([-100.0, -30, -12, 12, 30, 100], requires_grad=True)  # 1 - tanh(12)^2 rounds to 0 in float32
    slope = script.log_slope(u, torch.tensor(2.5))
    (gradient,) = torch.autograd.grad(slope.sum(), u)
    torch.testing.assert_close(slope, math.log(2.5) + 2 * math.log(2) - 2 * u.abs())  # log(4 e^(-2|u|))
    torch.testing.assert_close(gradient, -2 * u.sign())


def test_the_reparameterised_gradient_is_that_of_finite_differences_with_the_same_noise(script):
    agent, (batch, noise) = make_agent(script), make_batch()
    loss = script.policy_loss(agent, batch[:, :OBS], noise)[0]
    (gradient,) = torch.autograd.grad(loss, agent.policy.flat)
    torch.manual_seed(3)
    for _ in range(5):
        direction = torch.randn_like(gradient)

        def shifted(size):
            other = copy.deepcopy(agent)
            other.policy.flat.data += size * direction
            return script.policy_loss(other, batch[:, :OBS], noise)[0].item()

        difference = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
        assert (gradient @ direction).item() == pytest.approx(difference, rel=1e-5)


def test_log_std_is_clipped_to_minus_20_and_2(script):
    mean, log_std = script.mean_and_log_std(torch.tensor([[5.0, -7.0, -50.0, 50.0]]))
    assert mean.tolist() == [[5, -7]] and log_std.tolist() == [[-20, 2]]


@pytest.mark.parametrize("preset", ["loaded", "minimal"])
def test_the_first_policy_is_nearly_the_same_in_every_state_however_large_its_observation(script, preset):
    """Else the first pi_k is all but deterministic in some states, and the KL from it without bound (on Humanoid)."""
    agent = make_agent(script, obs_dim=376, **script.PRESETS[preset])
    with torch.no_grad():
        mean, log_std = script.mean_and_log_std(agent.policy(100 * torch.randn(1000, 376, dtype=torch.float64)))
    assert mean.abs().max() < 1 and log_std.abs().max() < 1
    assert (mean.std(0) > 0).all()  # and yet a policy that listens


def test_acting_in_numpy_is_the_policy_in_torch_and_follows_its_parameters(script):
    torch.manual_seed(0)
    agent = script.Agent(OBS, LOW, HIGH, script.Args(hidden_size=32))
    act, obs, noise = agent.actor(), torch.randn(OBS), torch.randn(ACTIONS)
    for _ in range(2):
        mean, log_std = script.mean_and_log_std(agent.policy(obs[None]))
        for eps in (noise, torch.zeros(ACTIONS)):
            expected = torch.tanh(mean + log_std.exp() * eps)[0] * agent.scale + agent.shift
            torch.testing.assert_close(torch.as_tensor(act(obs.numpy(), eps.numpy())), expected.detach())
        np.testing.assert_array_equal(act(obs.numpy()), act(obs.numpy(), np.zeros(ACTIONS, np.float32)))
        agent.policy.flat.data.mul_(1.5)


# --------------------------------------------------------------------------------------------------- losses and updates


def as_modules(net, row=None):
    """A script's flat network as a torch.nn.Sequential with parameters of its own."""
    parts = net.parts(net.flat.detach() if row is None else net.flat.detach()[row])
    layers = []
    for weight, bias in zip(parts[::2], parts[1::2], strict=True):
        layer = nn.Linear(*weight.shape, dtype=weight.dtype)
        layer.weight.data, layer.bias.data = weight.t().clone(), bias.clone()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def flat_gradient(net, loss):
    """The gradient of a loss in the order of a script's flat vector."""
    gradients = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    return torch.cat([g.t().flatten() for g in gradients])


def log_q_definition(x, q):
    return torch.log(x) if q == 1 else (x ** (q - 1) - 1) / (q - 1)


def reference(script, agent, batch, noise):
    """The losses from the paper, by torch.nn and torch.distributions; and each network's gradient of its own loss."""
    args = agent.args
    policy, v, slow_v = as_modules(agent.policy), as_modules(agent.v), as_modules(agent.slow_v)
    q1, q2 = as_modules(agent.q, 0), as_modules(agent.q, 1)
    obs, action, next_obs = batch[:, :OBS], batch[:, OBS : OBS + ACTIONS], batch[:, OBS + ACTIONS : -2]
    reward, terminated = batch[:, -2:].T

    def distribution(net):
        mean, log_std = net(obs).chunk(2, -1)
        return mean, log_std.clamp(-20, 2).exp()

    mean, std = distribution(policy)
    new_action = torch.tanh(mean + std * noise) * agent.scale + agent.shift
    log_pi = squashed_log_prob(mean, std, new_action)
    both = torch.cat([obs, new_action], -1)
    q_new = q1(both).squeeze(-1)
    lam = args.entropy_coef
    if script is sac:
        actor, entropy_term = lam * log_pi.sum(-1) - q_new, log_pi.sum(-1)
    else:
        log_k = squashed_log_prob(*distribution(as_modules(agent.old_policy)), new_action)
        inverse_t = args.bregman_stepsize
        if script is mdpo:
            actor = inverse_t * log_pi.sum(-1) - (inverse_t - lam) * log_k.sum(-1) - q_new
            entropy_term = log_pi.sum(-1)
        else:

            def lq(log_density, q):
                if args.log_q == "joint":
                    return log_q_definition(log_density.sum(-1).exp(), q)
                return log_q_definition(log_density.exp(), q).sum(-1)

            qb, qm = args.tsallis_q, args.entropy_q
            actor = inverse_t * (lq(log_pi, qb) - qb * lq(log_k, qb)) + lam * qm * lq(log_k, qm) - q_new
            entropy_term = lq(log_pi, qm)
    v_target = (torch.minimum(q_new, q2(both).squeeze(-1)) - lam * entropy_term).detach()
    q_target = (reward + args.gamma * (1 - terminated) * slow_v(next_obs).squeeze(-1)).detach()
    here = torch.cat([obs, action], -1)
    losses = dict(
        actor_loss=actor.mean(),
        qf1_loss=0.5 * ((q1(here).squeeze(-1) - q_target) ** 2).mean(),
        qf2_loss=0.5 * ((q2(here).squeeze(-1) - q_target) ** 2).mean(),
        vf_loss=0.5 * ((v(obs).squeeze(-1) - v_target) ** 2).mean(),
    )
    gradients = (
        flat_gradient(policy, losses["actor_loss"]),
        torch.stack([flat_gradient(q1, losses["qf1_loss"]), flat_gradient(q2, losses["qf2_loss"])]),
        flat_gradient(v, losses["vf_loss"]),
    )
    return losses, gradients


@pytest.fixture
def gradients_of_update(monkeypatch):
    """What update() hands to the three optimisers, which then do not step."""

    def gradients(script, agent, batch, noise):
        given = {}
        with monkeypatch.context() as patch:
            patch.setattr(script.Adam, "step", lambda self, params, gradient: given.__setitem__(id(params), gradient))
            losses = script.update(agent, batch, noise)
        return losses, [given[id(net.flat)] for net in (agent.policy, agent.q, agent.v)]

    return gradients


CASES = [(mdpo, {}), (mdpo, dict(entropy_coef=0.0)), (sac, {}), (sac, dict(entropy_coef=0.0))] + [
    (tsallis, dict(tsallis_q=qb, entropy_q=qm, log_q=kind))
    for qb, qm in ((1.5, 1.5), (2.0, 1.0), (0.6, 1.4), (1.0, 2.0))
    for kind in ("joint", "per-dimension")
]


@pytest.mark.parametrize(("module", "flags"), CASES)
def test_losses_and_gradients_are_the_papers_and_each_reaches_its_own_parameters_only(
    module, flags, gradients_of_update
):
    agent, (batch, noise) = make_agent(module, **flags), make_batch()
    expected_losses, expected = reference(module, agent, batch, noise)
    losses, gradients = gradients_of_update(module, agent, batch, noise)
    for name, loss in expected_losses.items():
        torch.testing.assert_close(losses[f"losses/{name}"], loss.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())
        assert theirs.abs().max() > 1e-3


def test_only_termination_cuts_the_bootstrap_and_targets_come_from_the_slow_v(script, gradients_of_update):
    batch, noise = make_batch()

    def q_gradient(terminated, slow_v=1.0, v=1.0):
        agent = make_agent(script)
        agent.slow_v.flat.mul_(slow_v)
        agent.v.flat.data.mul_(v)
        batch[:, -1] = terminated
        return gradients_of_update(script, agent, batch, noise)[1][1]

    assert torch.equal(q_gradient(1), q_gradient(1, slow_v=3))  # ended: nothing beyond counts
    assert not torch.equal(q_gradient(0), q_gradient(0, slow_v=3))
    assert torch.equal(q_gradient(0), q_gradient(0, v=3))


def test_polyak_averaging_to_the_letter(script):
    agent, (batch, noise) = make_agent(script, tau=0.05), make_batch()
    before, v = agent.slow_v.flat.clone(), agent.v.flat.detach().clone()
    script.update(agent, batch, noise)
    assert not torch.equal(v, agent.v.flat.detach())
    torch.testing.assert_close(agent.slow_v.flat, 0.95 * before + 0.05 * agent.v.flat.detach(), rtol=1e-12, atol=1e-15)


def test_an_update_leaves_the_old_policy_and_takes_no_gradient_of_it():
    for script in (mdpo, tsallis):
        agent, (batch, noise) = make_agent(script), make_batch()
        before = agent.old_policy.flat.clone()
        script.update(agent, batch, noise)
        script.policy_step(agent, batch, noise)
        assert torch.equal(agent.old_policy.flat, before)
        assert not agent.old_policy.flat.requires_grad and agent.old_policy.flat.grad is None
        assert not agent.slow_v.flat.requires_grad


def test_a_policy_step_moves_the_policy_as_update_does_and_nothing_else(script):
    agent, (batch, noise) = make_agent(script), make_batch()
    other = copy.deepcopy(agent)
    script.policy_step(agent, batch, noise)
    script.update(other, batch, noise)
    torch.testing.assert_close(agent.policy.flat, other.policy.flat, rtol=1e-10, atol=1e-14)
    fresh = make_agent(script)
    for name, tensor in agent.state_dict().items():
        assert (
            name.startswith("policy") == (not torch.equal(tensor, fresh.state_dict()[name]))
            or "betas" in name
            or (name == "policy_optimizer.lr")
        ), name


def test_the_loss_with_t_times_q_has_a_proportional_gradient():
    torch.manual_seed(0)
    log_pi, log_k, q = (torch.randn(9, dtype=torch.float64, requires_grad=True) for _ in range(3))
    t, lam = 1 / 0.3, 0.2
    ours = torch.autograd.grad(mdpo.mdpo_loss(log_pi, log_k, q, 1 / t, lam), (log_pi, log_k, q))
    paper = torch.autograd.grad((log_pi - log_k - t * q + lam * t * log_k).mean(), (log_pi, log_k, q))  # Eq. 11, soft
    for x, y in zip(ours, paper, strict=True):
        torch.testing.assert_close(t * x, y)


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
@pytest.mark.parametrize("q", [0.5, 1.0, 1.5, 2.0])
def test_tsallis_at_stepsize_lambda_has_the_loss_of_sac_tsallis(q, kind):
    torch.manual_seed(0)
    log_pi, log_k, values = torch.randn(9, 3), torch.randn(9, 3), torch.randn(9)
    args = tsallis.Args(bregman_stepsize=0.2, entropy_coef=0.2, tsallis_q=q, entropy_q=q, log_q=kind)
    expected = (0.2 * tsallis.log_q_density(log_pi, q, kind) - values).mean()
    assert tsallis.tsallis_loss(log_pi, log_k, values, args).item() == expected.item()


@pytest.mark.parametrize("kind", ["joint", "per-dimension"])
@pytest.mark.parametrize("q", [0.05, 0.5, 0.99, 1.01, 1.5, 2.0])
@pytest.mark.parametrize("outputs", [(0, 0), (0, -30), (0, 30), (50, -30), (-50, 3), (8, -3)])
def test_tsallis_stays_finite_at_every_q_in_17_dimensions_and_far_from_density_1(q, kind, outputs):
    """The policy's means and log-deviations are driven to the ends of their ranges, beside an old policy elsewhere."""
    low, high = -np.full(17, 0.4, np.float32), np.full(17, 0.4, np.float32)
    flags = dict(tsallis_q=q, entropy_q=q, log_q=kind)
    agent = make_agent(tsallis, low, high, obs_dim=20, **flags).float()
    with torch.no_grad():
        for net, sign in ((agent.policy, 1), (agent.old_policy, -1)):
            bias = net.parts(net.flat)[-1]
            bias[:17] += sign * outputs[0]
            bias[17:] += outputs[1]
    batch, noise = (x.float() for x in make_batch(20, 17, low=low, high=high))
    for _ in range(3):
        losses = tsallis.update(agent, batch, noise)
        assert all(loss.isfinite() for loss in losses.values()), losses
    for name, tensor in agent.state_dict().items():
        assert tensor.isfinite().all(), name


def test_adam_is_torchs(script):
    agent, (batch, noise) = make_agent(script), make_batch()
    names = ("policy", "q", "v")
    copies = {name: nn.Parameter(getattr(agent, name).flat.detach().clone()) for name in names}
    optimizer = torch.optim.Adam(copies.values(), lr=3e-4)  # eps 1e-8, as in the authors' release
    step = script.Adam.step

    def both(self, params, gradient):
        name = next(name for name in names if getattr(agent, name).flat is params)
        copies[name].grad = gradient.clone()
        step(self, params, gradient)

    for _ in range(20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script.Adam, "step", both)
            script.update(agent, batch, noise)
        optimizer.step()
    for name in names:
        torch.testing.assert_close(getattr(agent, name).flat.detach(), copies[name].detach(), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------- an independent check


def test_sac_agrees_with_stable_baselines3_where_the_two_coincide():
    """The same policy and twice the same Q, so that min(Q1, Q2) is Q1: actions, log-densities, the actor's gradient."""
    sb3 = pytest.importorskip("stable_baselines3")
    import gymnasium as gym

    env = gym.make("Pendulum-v1")  # bounds of 2, which stable-baselines3 rescales to 1
    model = sb3.SAC("MlpPolicy", env, policy_kwargs=dict(net_arch=[32, 32]), ent_coef=0.2, device="cpu", seed=0)
    actor, critic = model.actor, model.critic
    critic.qf1.load_state_dict(critic.qf0.state_dict())
    one = np.ones(1, np.float32)
    agent = sac.Agent(3, -one, one, sac.Args(hidden_size=32))

    def load(net, *modules):
        linears = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
        return torch.cat([torch.cat([m.weight.t().flatten(), m.bias]) for m in linears]).detach()

    with torch.no_grad():
        hidden = load(agent.policy, actor.latent_pi)
        weight = torch.cat([actor.mu.weight, actor.log_std.weight]).t().flatten()
        agent.policy.flat.copy_(torch.cat([hidden, weight, actor.mu.bias, actor.log_std.bias]))
        agent.q.flat.copy_(load(agent.q, critic.qf0).expand(2, -1))
    torch.manual_seed(5)
    obs = torch.randn(64, 3)
    action, log_prob = actor.action_log_prob(obs)
    q = torch.cat(critic(obs, action), 1).min(1).values
    loss = (0.2 * log_prob - q).mean()
    torch.manual_seed(5)
    torch.randn(64, 3)
    noise = torch.randn(64, 1)
    our_loss, our_log_prob, _, inputs = sac.policy_loss(agent, obs, noise)
    torch.testing.assert_close(inputs[:, 3:], action)
    torch.testing.assert_close(our_log_prob, log_prob, rtol=1e-4, atol=1e-4)  # theirs adds 1e-6 to 1 - tanh^2
    torch.testing.assert_close(our_loss, loss, rtol=1e-4, atol=1e-4)
    (ours,) = torch.autograd.grad(our_loss, agent.policy.flat)
    theirs = torch.autograd.grad(
        loss, [*actor.latent_pi.parameters(), *actor.mu.parameters(), *actor.log_std.parameters()]
    )
    *hidden, mu_w, mu_b, std_w, std_b = theirs
    expected = [g.t().flatten() for g in hidden] + [torch.cat([mu_w, std_w]).t().flatten(), mu_b, std_b]
    torch.testing.assert_close(ours, torch.cat(expected), rtol=1e-3, atol=1e-5)
