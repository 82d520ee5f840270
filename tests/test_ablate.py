"""tools/ablate.py: each variant changes what it says and nothing else."""

import copy
import sys
from types import ModuleType

import pytest
import torch
from conftest import ROOT
from torch.distributions import Normal, TanhTransform, TransformedDistribution

sys.path.append(str(ROOT / "tools"))
from ablate import VARIANTS, changed

PARTS = ("policy", "q1", "q2", "v", "target_v", "target_q")


def load(variant: str, script: str = "sac.py") -> ModuleType:
    module = sys.modules["ablated"] = ModuleType("ablated")
    module.__file__ = script
    exec(changed((ROOT / script).read_text(), variant), vars(module))
    return module


def after_one_update(variant: str) -> dict[str, torch.Tensor]:
    module, obs_dim, action_dim = load(variant), 4, 2
    torch.manual_seed(1)
    agent = module.Agent(obs_dim, action_dim, hidden=16)
    batch, noise = torch.randn(32, 2 * obs_dim + action_dim + 2), torch.randn(32, action_dim)
    batch[:, -1] = 0  # nothing terminates
    module.update(agent, batch, noise, module.Args())
    vectors = torch.nn.utils.parameters_to_vector
    return {name: vectors(part.parameters()).detach() for name, part in agent.named_children() if name in PARTS}


@pytest.mark.parametrize(
    ("variant", "same", "different"),
    [
        ("none", ["policy", "q1", "q2", "v", "target_v"], []),
        ("q1", ["q1", "q2", "v", "target_v"], ["policy"]),
        ("simultaneous", ["q1", "q2", "v", "target_v"], ["policy"]),
        ("target-q", [], ["policy", "q1", "q2", "v"]),
        ("large-last-layer", ["q1", "q2"], ["policy", "v"]),
        ("simultaneous+q1", ["q1", "q2", "v", "target_v"], ["policy"]),
    ],
)
def test_a_variant_changes_what_it_says(variant, same, different):
    before, after = after_one_update("none"), after_one_update(variant)
    assert [name for name in same if not torch.equal(before[name], after[name])] == []
    assert [name for name in different if torch.equal(before[name], after[name])] == []


def test_the_target_of_two_slow_q_networks():
    module = load("target-q")
    torch.manual_seed(1)
    agent, batch, noise = module.Agent(4, 2, hidden=16), torch.randn(32, 12), torch.randn(32, 2)
    obs, action, next_obs, reward, terminated = batch.split([4, 2, 4, 1, 1], -1)
    terminated[:] = torch.arange(32)[:, None] % 2
    mean, log_std = agent.policy(next_obs).chunk(2, -1)
    pi = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    next_action = torch.tanh(mean + log_std.exp() * noise.flip(0))
    inputs = torch.cat([next_obs, next_action], -1)
    value = torch.minimum(agent.q1(inputs), agent.q2(inputs)) - 0.2 * pi.log_prob(next_action).sum(-1, keepdim=True)
    target = reward + 0.99 * (1 - terminated) * value  # the slow networks start as copies
    expected = 0.5 * (agent.q1(torch.cat([obs, action], -1)) - target).square().mean()
    torch.testing.assert_close(module.update(agent, batch, noise, module.Args())["losses/qf1_loss"], expected.detach())


def test_with_slow_q_networks_the_policy_ascends_the_smaller_new_q():
    module = load("target-q")
    torch.manual_seed(1)
    agent, batch, noise = module.Agent(4, 2, hidden=16), torch.randn(32, 12), torch.randn(32, 2)
    agent.q2[-1].bias.data -= 1  # Q2 is the smaller one
    policy = copy.deepcopy(agent.policy)
    args = module.Args(learning_rate=0.03)
    actor_loss = module.update(agent, batch, noise, args)["losses/actor_loss"]
    mean, log_std = policy(batch[:, :4]).chunk(2, -1)
    action = torch.tanh(mean + log_std.exp() * noise)
    log_prob = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(action).sum(-1)
    inputs = torch.cat([batch[:, :4], action], -1)
    q = torch.minimum(agent.q1(inputs), agent.q2(inputs)).squeeze(-1)  # of the new critics
    torch.testing.assert_close(actor_loss, (0.2 * log_prob - q).mean().detach())


def test_the_large_last_layer_is_100_times_the_small_one():
    layers = []
    for variant in ("none", "large-last-layer"):
        torch.manual_seed(1)
        layers.append(load(variant).Agent(4, 2, hidden=16).policy[-1].weight)
    torch.testing.assert_close(100 * layers[0], layers[1])


def test_a_fast_log_std_takes_larger_steps_than_the_mean(monkeypatch, tmp_path):
    """Adam's first step is the learning rate times the sign of the gradient."""
    monkeypatch.chdir(tmp_path)
    flags = "--env-id InvertedPendulum-v4 --num-steps 64 --total-timesteps 64 --sgd-steps 1 --wandb-mode disabled"
    policies = {}
    for variant in ("none", "fast-log-std"):
        assert load(variant, "mdpo_onpolicy.py").main([*flags.split(), "--run-name", variant]) == 0
        policies[variant] = torch.load(f"runs/{variant}/checkpoint.pt", weights_only=True)["policy"]
    usual, fast = (policy.pop("log_std").abs() for policy in policies.values())
    torch.testing.assert_close(torch.cat([usual, fast]), torch.tensor([3e-4, 1e-3]), rtol=0.01, atol=0)
    torch.testing.assert_close(*policies.values())


def test_minibatch_advantages_are_standardized_in_their_minibatch():
    torch.manual_seed(1)
    losses, rows = {}, torch.arange(0, 32, 3)
    policy, advantages = load("none", "ppo.py").Policy(4, 2, True), 3 + 5 * torch.randn(32)
    batch = dict(obs=torch.randn(32, 4), actions=torch.randn(32, 2), means=torch.zeros(32, 2), std=torch.ones(32, 2))
    batch |= dict(log_probs=policy(batch["obs"]).log_prob(batch["actions"]).sum(-1).detach() + 0.3 * torch.randn(32))
    scores = advantages.clone()
    scores[rows] = (advantages[rows] - advantages[rows].mean()) / (advantages[rows].std() + 1e-8)
    for variant, used in (("none", scores), ("minibatch-advantages", advantages)):
        module = load(variant, "ppo.py")
        used = batch | dict(advantages=used)
        losses[variant] = module.policy_backward(policy, used, rows, torch.ones(()), module.Args())
    torch.testing.assert_close(*losses.values())


def test_joint_clip_clips_policy_and_critic_together_once_per_minibatch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = "--env-id InvertedPendulum-v4 --num-steps 64 --total-timesteps 64 --update-epochs 3 --minibatch-size 32"
    module, clipped, usual = load("joint-clip", "ppo.py"), [], torch.nn.utils.clip_grad_norm_
    assert "clip_grad_norm_" not in module.policy_backward.__code__.co_names
    counting = lambda parameters, norm: clipped.append((len(parameters), norm)) or usual(parameters, norm)  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counting)
    assert module.main([*flags.split(), "--wandb-mode", "disabled", "--run-name", "r"]) == 0
    assert clipped == [(7 + 6, 0.5)] * 6
    state = torch.load("runs/r/checkpoint.pt", weights_only=True)
    assert state["critic_optimizer"]["state"][0]["step"] == state["policy_optimizer"]["state"][0]["step"] == 6


def test_online_statistics_are_those_of_all_observations_so_far(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = "--env-id InvertedPendulum-v4 --num-steps 64 --total-timesteps 64 --wandb-mode disabled"
    module, counts = load("online-statistics", "ppo.py"), []
    usual = module.normalize
    module.normalize = lambda obs, moments, on: counts.append(round(moments.count)) or usual(obs, moments, on)
    assert module.main([*flags.split(), "--run-name", "r"]) == 0
    assert counts == [step for step in range(1, 65) for _ in ("obs", "next_obs")]
    assert round(torch.load("runs/r/checkpoint.pt", weights_only=True)["obs_moments"]["count"].item()) == 64


@pytest.mark.parametrize("script", ["sac.py", "mdpo_offpolicy.py", "mdpo_tsallis.py"])
def test_the_last_layer_and_q_can_be_changed_in_all_three(script):
    load("large-last-layer+q1+simultaneous", script)


def test_a_variant_that_does_not_apply_stops():
    with pytest.raises(SystemExit, match="q1 does not apply"):
        changed("x = 1", "q1")
    assert changed("x = 1", "none") == "x = 1" and len(VARIANTS) == 9
