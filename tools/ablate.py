"""Train a copy of a script with a design choice changed, and print the score.

    python tools/ablate.py sac.py min-q --env-id HalfCheetah-v4 --preset minimal --seed 1 --compile

Variants can be joined: critic-first+min-q+target-q is what SBX and stable-baselines3 do; `none` changes nothing. The
flags are the script's own. The run is kept in runs-ablate/, apart from those that report.py reads, and resumes with
--resume. The score is the mean return of the last 100 training episodes.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

OPTIMIZER = "self.optimizer = Adam(self.policy_params + self.critic_params)"
POLICY_LOSS = "actor_loss = sac_loss(log_prob, q1_pi, args.entropy_coef)"
STEP = """policy_gradients = torch.autograd.grad(actor_loss, agent.policy_params)
    critic_gradients = torch.autograd.grad(qf1_loss + qf2_loss + vf_loss, agent.critic_params)
    agent.optimizer.step(policy_gradients + critic_gradients, args.learning_rate)"""
TARGETS = "zip(agent.target_v.parameters(), agent.v.parameters(), strict=True)"

VARIANTS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    # The policy's last layer starts as large as the others.
    "large-last-layer": [("parameter.data *= 0.01", "pass")],
    # The policy maximizes min(Q1, Q2) instead of Q1.
    "min-q": [(", q1_pi, args", ", torch.minimum(q1_pi, q2_pi), args")],
    # The policy's gradient is taken after the critic's step instead of at the same parameters.
    "critic-first": [
        (OPTIMIZER, "self.optimizer, self.critic_optimizer = Adam(self.policy_params), Adam(self.critic_params)"),
        (POLICY_LOSS, "pass"),
        (
            STEP,
            f"""gradients = torch.autograd.grad(qf1_loss + qf2_loss + vf_loss, agent.critic_params)
    agent.critic_optimizer.step(gradients, args.learning_rate)
    q1_pi, q2_pi = (q(torch.cat([obs, torch.tanh(u)], -1)) for q in (agent.q1, agent.q2))
    {POLICY_LOSS}
    agent.optimizer.step(torch.autograd.grad(actor_loss, agent.policy_params), args.learning_rate)""",
        ),
    ],
    # Two slow Q networks instead of V and its slow copy. Row i's next action takes the noise of another row.
    "target-q": [
        ("self.target_v = copy.deepcopy(self.v)", "self.target_q = copy.deepcopy(nn.ModuleList([self.q1, self.q2]))"),
        (", *self.v.parameters()]", "]"),
        (
            "args.gamma * (1 - terminated) * agent.target_v(next_obs)",
            "args.gamma * (1 - terminated) * (torch.minimum(*next_q) - args.entropy_coef * next_log_prob)",
        ),
        (
            "v_target = torch.minimum(q1_pi, q2_pi) - args.entropy_coef * log_prob",
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
