"""Train a copy of a script with a design choice changed, and print the score.

    python tools/ablate.py sac.py target-q --env-id HalfCheetah-v4 --preset minimal --seed 1 --compile

Variants can be joined: q1+simultaneous is what the scripts did up to 624f89b; `none` changes nothing. The
flags are the script's own. The run is kept in runs-ablate/, apart from those that report.py reads, and resumes with
--resume. The score is the mean return of the last 100 training episodes.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

POLICY_Q = "    q = agent.min_q(obs, torch.tanh(u))"
CRITIC_STEP = "    agent.critic_optimizer.step(critic_gradients, args.learning_rate)\n"
POLICY_STEP = "    agent.policy_optimizer.step(policy_gradients, args.learning_rate)\n"
TWO_RATES = "Adam([dict(params=policy.mean.parameters()), dict(params=[policy.log_std], lr=1e-3)],"
BATCH = '"log_probs", "advantages")}\n'
CLIP = "    nn.utils.clip_grad_norm_(policy.parameters(), 0.5, foreach=False)"
LR = "critic_optimizer.param_groups[0]['lr'] = "
NORMALIZE = "normalize(obs, obs_moments, args.norm_obs)"
TARGETS = "zip(agent.target_v.parameters(), agent.v.parameters(), strict=True)"

VARIANTS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    # On-policy: the log std has Adam's learning rate 1e-3, the mean network that of the flags.
    "fast-log-std": [("Adam(policy.parameters(),", TWO_RATES)],
    # PPO as in CleanRL and stable-baselines3: advantages are standardized in each minibatch, not over the whole batch,
    "minibatch-advantages": [
        (BATCH, BATCH + "    a = batch['advantages']\n    batch['advantages'] = (a - a.mean()) / (a.std() + 1e-8)\n"),
    ],
    # and observations are normalized with statistics that each step updates, not each iteration.
    "online-statistics": [
        ("observations[t] = obs\n", f"obs_moments.update(obs)\n            observations[t] = {NORMALIZE}\n"),
        (f"actions[t] = mean_action({NORMALIZE})", "actions[t] = mean_action(observations[t].astype(np.float32))"),
        ("next_observations[t, i] = obs[i]", f"next_observations[t, i] = {NORMALIZE.replace('obs,', 'obs[i],')}"),
        (
            "normalize(np.stack([observations, next_observations]), obs_moments, args.norm_obs)",
            "np.stack([observations, next_observations]).astype(np.float32)",
        ),
        ("if args.norm_obs:  # after the update", "if False:  # after the update"),
    ],
    # and each minibatch's gradients of policy and critic are clipped together; ours clips only the policy's.
    "joint-clip": [
        (CLIP, "    pass"),
        (
            "policy_optimizer.param_groups[0]",
            LR + "policy_optimizer.param_groups[0]",
        ),
        (
            "policy_loss = improve(policy, batch, rows, kl_coef, args)\n",
            """policy_loss = improve(policy, batch, rows, kl_coef, args)
                v_loss = fit(critic, batch, rows, args.clip_value_loss)
                nn.utils.clip_grad_norm_([*policy.parameters(), *critic.parameters()], 0.5)
                critic_optimizer.step()
                critic_optimizer.zero_grad()\n""",
        ),
        ("in range(args.critic_epochs)", "in range(0)"),
    ],
    # The policy's last layer starts as large as the others.
    "large-last-layer": [("parameter.data *= 0.01", "pass")],
    # The policy maximizes Q1 instead of min(Q1, Q2), as in the MDPO authors' code.
    "q1": [(POLICY_Q, "    q = agent.q1(torch.cat([obs, torch.tanh(u)], -1))")],
    # Critics and policy step at the same time instead of one after the other.
    "simultaneous": [(CRITIC_STEP, ""), (POLICY_STEP, CRITIC_STEP + POLICY_STEP)],
    # Two slow Q networks instead of V and its slow copy, as in SBX and stable-baselines3. Row i's next action takes the
    # noise of another row.
    "target-q": [
        ("self.target_v = copy.deepcopy(self.v)", "self.target_q = copy.deepcopy(nn.ModuleList([self.q1, self.q2]))"),
        (", *self.v.parameters()]", "]"),
        (
            "args.gamma * (1 - terminated) * agent.target_v(next_obs)",
            "args.gamma * (1 - terminated) * (torch.minimum(*next_q) - args.entropy_coef * next_log_prob)",
        ),
        (
            "v_target = agent.min_q(obs, torch.tanh(u)) - args.entropy_coef * log_prob",
            """next_mean, next_log_std = mean_and_log_std(agent.policy(next_obs))
        next_noise = noise.flip(0)
        next_u = next_mean + torch.exp(next_log_std) * next_noise
        next_log_prob = log_density(next_noise, next_log_std, next_u).sum(-1, keepdim=True)
        next_q = [q(torch.cat([next_obs, torch.tanh(next_u)], -1)) for q in agent.target_q]""",
        ),
        ("vf_loss = 0.5 * F.mse_loss(agent.v(obs), v_target)", "vf_loss = torch.zeros(())"),
        (TARGETS, "zip(agent.target_q.parameters(), agent.critic_params, strict=True)"),
    ],
}


def changed(source: str, variant: str) -> str:
    for name in variant.split("+"):
        for old, new in VARIANTS[name]:
            if source.count(old) != 1:
                sys.exit(f"{name} does not apply: the script has {source.count(old)} times: {old}")
            source = source.replace(old, new)
    return source


if __name__ == "__main__":
    if len(sys.argv) < 3 or not set(sys.argv[2].split("+")) <= set(VARIANTS) or not Path(sys.argv[1]).is_file():
        sys.exit(f"{__doc__}\nvariants: {', '.join(VARIANTS)}")
    script, variant, flags = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script.name)
        path.write_text(changed(script.read_text(), variant))
        spec = importlib.util.spec_from_file_location(script.stem, path)
        module = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        args = module.parse_args([flag for flag in flags if flag != "--resume"])  # which needs the name
        name = f"{args.env_id}__{script.stem}__{variant}__{args.total_timesteps}__{args.seed}"
        if status := module.main(["--runs-dir", "runs-ablate", "--run-name", name, *flags]):
            sys.exit(status)
    points = torch.load(Path("runs-ablate", name, "checkpoint.pt"), weights_only=True)["points"]
    returns = [values["charts/episodic_return"] for _, values in points if "charts/episodic_return" in values]
    where = f"{args.env_id}, {args.preset}, seed {args.seed}, {args.total_timesteps} steps"
    print(f"{script.name} with {variant}, {where}: {np.mean(returns[-100:]):.1f}")
