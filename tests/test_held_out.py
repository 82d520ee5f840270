"""tools/held_out.py: what it measures, on numbers that are known."""

import sys

import pytest
import torch
from conftest import ROOT, SHORT
from torch.distributions import Normal

sys.path.append(str(ROOT / "tools"))
import held_out

import mdpo_onpolicy


@pytest.fixture
def run(in_process, tmp_path):
    """A run that has trained for one of its two iterations."""
    in_process(mdpo_onpolicy, *SHORT[:4], "--total-timesteps", 256, "--run-name", "r")
    folder = tmp_path / "runs/r"
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["args"]["total_timesteps"] = 512
    torch.save(state, folder / "checkpoint.pt")
    return folder


def test_no_step_gains_nothing(run):
    learner = held_out.Learner(run)
    batch = learner.batch(seed=1)
    gain, kl, largest, ess = held_out.measure(learner.improved(batch, 0), batch)
    assert gain == pytest.approx(0, abs=1e-6) and kl == pytest.approx(0, abs=1e-7)
    assert largest == pytest.approx(1) and ess == pytest.approx(1)


def test_gain_ratio_and_effective_sample_size_of_two_samples():
    policy = mdpo_onpolicy.Policy(1, 1, orthogonal_init=True)
    obs, actions = torch.ones(2, 1), torch.zeros(2, 1)
    pi = policy(obs)
    log_probs = pi.log_prob(actions).sum(-1).detach() - torch.tensor([1.0, 3.0]).log()  # ratios 1 and 3
    batch = dict(obs=obs, actions=actions, means=pi.loc.detach() + 1, std=pi.scale.detach(), log_probs=log_probs)
    gain, kl, largest, ess = held_out.measure(policy, batch | dict(advantages=torch.tensor([-1.0, 2.0])))
    assert gain == pytest.approx((-1 + 6) / 2) and kl == pytest.approx(0.5)
    assert largest == pytest.approx(3) and ess == pytest.approx(16 / 10 / 2)


def test_the_first_step_is_adams_along_the_gradient(run):
    """With Adam's state reset, each parameter moves by the learning rate against the sign of its gradient."""
    learner = held_out.Learner(run)
    learner.state["policy_optimizer"]["state"] = {}
    batch = learner.batch(seed=1)
    ratio = (learner.policy(batch["obs"]).log_prob(batch["actions"]).sum(-1) - batch["log_probs"]).exp()
    gradient = torch.autograd.grad(-(ratio * batch["advantages"]).mean(), learner.policy.log_std)[0]
    moved = learner.improved(batch, 1).log_std - learner.policy.log_std
    torch.testing.assert_close(moved, -3e-4 * gradient.sign(), atol=0, rtol=0.05)


def test_batches_are_of_pi_k(run):
    learner = held_out.Learner(run)
    batch, again, other = learner.batch(seed=1), learner.batch(seed=1), learner.batch(seed=2)
    assert torch.equal(batch["obs"], again["obs"]) and not torch.equal(batch["obs"], other["obs"])
    advantages = batch["advantages"]
    assert advantages.mean() == pytest.approx(0, abs=1e-6)
    assert advantages.std(correction=0) == pytest.approx(1, rel=1e-5)
    log_probs = Normal(batch["means"], learner.policy.log_std.exp()).log_prob(batch["actions"]).sum(-1)
    torch.testing.assert_close(batch["log_probs"], log_probs.detach())
    noise = (batch["actions"] - batch["means"]) / batch["std"]
    assert noise.std() == pytest.approx(1, rel=0.2)


def test_output_names_each_m(run, capsys):
    held_out.main([str(run), "--sgd-steps", "1", "3", "--batches", "2"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("r, step 256:") and [line.split(":")[0] for line in lines] == ["  m = 1", "  m = 3"]


def test_a_finished_run_has_no_next_iteration(run):
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["args"]["total_timesteps"] = 256
    torch.save(state, run / "checkpoint.pt")
    with pytest.raises(SystemExit, match="finished"):
        held_out.Learner(run)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"no checkpoint in {tmp_path}"):
        held_out.main([str(tmp_path)])
