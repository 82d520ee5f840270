"""Measure how much of on-policy MDPO's m steps is real: their gain on the batch they were taken on, and on others.

    python tools/held_out.py runs/Walker2d-v4__mdpo_onpolicy__loaded-gae__10000000__1 --sgd-steps 5 10 20

From the run's checkpoint, with its Adam state and t_k, it takes m steps on each of several batches of pi_k. The gain is
the mean of r A with standardized advantages, which is 0 at pi_k. The effective sample size of the ratios r is
(sum r)^2 / sum r^2, here divided by the number of samples. Numbers are medians over batches.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mdpo_onpolicy as mdpo


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]]  # runs of mdpo_onpolicy.py
    sgd_steps: tuple[int, ...] = (5, 10, 20)  # values of m
    batches: int = 16  # batches of pi_k, at least 2


class Learner:
    """A checkpoint of mdpo_onpolicy.py, ready for the next iteration."""

    def __init__(self, folder: Path):
        if not (folder / "checkpoint.pt").is_file():
            sys.exit(f"no checkpoint in {folder}")
        self.state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        self.args, self.step = mdpo.Args(**self.state["args"]), self.state["step"]
        self.env = mdpo.make_env(self.args.env_id)
        obs_dim, action_dim = self.env.observation_space.shape[0], self.env.action_space.shape[0]
        self.policy = mdpo.Policy(obs_dim, action_dim, self.args.orthogonal_init)
        self.critic = mdpo.mlp(obs_dim, 1, self.args.orthogonal_init, last_gain=1.0)
        self.obs_moments, self.return_moments = mdpo.RunningMoments(shape=obs_dim), mdpo.RunningMoments()
        for name in ("policy", "critic", "obs_moments", "return_moments"):
            getattr(self, name).load_state_dict(self.state[name])
        iteration = self.args.num_steps * self.args.num_envs
        self.left = 1 - (self.step // iteration) / (self.args.total_timesteps // iteration)  # 1 - k/K
        if self.left <= 0:
            sys.exit(f"{folder} is finished: it has no next iteration, at which t_k would be 0")

    def batch(self, seed: int) -> dict[str, Tensor]:
        """A rollout of pi_k, from a new episode on, and its standardized advantages."""
        args, env, mean_action = self.args, self.env, self.policy.numpy_mean()
        generator, std = np.random.default_rng(seed), self.policy.log_std.detach().exp().numpy()
        low, high, rows = env.action_space.low, env.action_space.high, []
        obs, _ = env.reset(seed=seed)
        for _ in range(args.num_steps):
            noise = std * generator.standard_normal(len(low), dtype=np.float32)
            action = mean_action(mdpo.normalize(obs, self.obs_moments, args.norm_obs)) + noise
            next_obs, reward, terminated, truncated, _ = env.step(action.clip(low, high))
            rows.append((obs, next_obs, action, reward, terminated, terminated | truncated))
            obs = env.reset()[0] if terminated or truncated else next_obs
        obs, next_obs, actions, rewards, terminated, done = map(np.array, zip(*rows, strict=True))
        if args.norm_reward:
            rewards = np.clip(rewards / np.sqrt(self.return_moments.var + 1e-8), -10, 10)
        inputs = [torch.as_tensor(mdpo.normalize(x, self.obs_moments, args.norm_obs)) for x in (obs, next_obs)]
        with torch.no_grad():
            values, next_values = (self.critic(x).squeeze(-1).double().numpy() for x in inputs)
            pi_k, actions = self.policy(inputs[0]), torch.as_tensor(actions)
            log_probs = pi_k.log_prob(actions).sum(-1)
        advantages = mdpo.gae(rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        advantages = torch.as_tensor((advantages - advantages.mean()) / (advantages.std() + 1e-8)).float()
        batch = dict(obs=inputs[0], actions=actions, means=pi_k.loc, std=pi_k.scale, log_probs=log_probs)
        return batch | dict(advantages=advantages)

    def improved(self, batch: dict[str, Tensor], sgd_steps: int) -> mdpo.Policy:
        """The policy after m steps on a batch."""
        policy = copy.deepcopy(self.policy)
        optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5)
        optimizer.load_state_dict(copy.deepcopy(self.state["policy_optimizer"]))
        optimizer.param_groups[0]["lr"] = self.args.learning_rate * (self.left if self.args.anneal_lr else 1)
        inverse_t = torch.tensor(1 / self.left if self.args.anneal_t else 1.0)
        for _ in range(sgd_steps):
            mdpo.policy_backward(policy, batch, inverse_t, self.args.tsallis_q)
            optimizer.step()
            optimizer.zero_grad()
        return policy


@torch.no_grad()
def measure(policy: mdpo.Policy, batch: dict[str, Tensor]) -> tuple[float, float, float, float]:
    """Gain, KL(pi || pi_k), largest ratio, and effective sample size as a fraction of the batch."""
    pi = policy(batch["obs"])
    ratio = torch.exp(pi.log_prob(batch["actions"]).sum(-1) - batch["log_probs"])
    gain, kl = (ratio * batch["advantages"]).mean(), mdpo.gaussian_kl(pi, Normal(batch["means"], batch["std"])).mean()
    return gain.item(), kl.item(), ratio.max().item(), (ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)).item()


def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Args, args=argv, description=__doc__)
    torch.set_num_threads(1)
    for folder in args.folders:
        learner = Learner(folder)
        batches = [learner.batch(seed) for seed in range(args.batches)]
        size = torch.cat([batch["advantages"] for batch in batches]).abs().max()
        print(f"{learner.args.run_name}, step {learner.step}: largest standardized advantage {size:.1f}")
        for m in args.sgd_steps:
            rows = []
            for own in batches:
                policy = learner.improved(own, m)
                rows.append((*measure(policy, own), np.mean([measure(policy, b)[0] for b in batches if b is not own])))
            gain, kl, largest, ess, new_gain = np.median(rows, axis=0)
            line = f"  m = {m}: gain {gain:.3f}, on other batches {new_gain:.3f}, KL {kl:.3f}"
            print(f"{line}, largest ratio {largest:.1f}, ESS {ess:.2f}", flush=True)


if __name__ == "__main__":
    main()
