"""Off-policy MDPO with a Tsallis Bregman divergence (Tomar, Shani, Efroni & Ghavamzadeh, 2021), in one file.

Mirror descent (Eq. 1) may take any strongly convex potential. With the negative Tsallis entropy in place of Shannon's,

    psi(pi) = sum_a pi(a) log_q pi(a),     log_q x = (x^(q - 1) - 1) / (q - 1),  log x at q = 1     (Eqs. 17 and 19),

the divergence between policies is, up to a term without pi, the mean over a ~ pi of log_q pi - q log_q pi_k (Eqs. 18
and 20): the KL at q = 1, the squared distance, whose projections are sparse, at q = 2. In the place of the KL in
the off-policy objective (Eq. 10), with a = a_theta(eps, s) reparameterised by noise, it makes the loss
log_q pi_theta - q log_q pi_k - t_k Q_k (Eq. 21).

In a soft MDP the reward carries lambda times the Tsallis entropy of the policy, perhaps with another q. Linearised at
pi_k it adds lambda t_k q_M log_{q_M} pi_k, as the KL form has lambda t_k log pi_k. Multiplied through by 1 / t_k, with
q_B of the Bregman divergence (--tsallis-q) and q_M of the MDP (--entropy-q), the loss is

    mean[ (1 / t_k) (log_{q_B} pi_theta(a) - q_B log_{q_B} pi_k(a)) + lambda q_M log_{q_M} pi_k(a) - Q(s, a) ]

and V's target min(Q1, Q2) - lambda log_{q_M} pi. At q = 1 this is mdpo_offpolicy.py, which has the rest of the story,
to the bit; at 1 / t_k = lambda and q_B = q_M the old policy drops out, and it is the paper's SAC-Tsallis.
`diff mdpo_offpolicy.py mdpo_tsallis.py` shows what Tsallis adds.

The density of an action of several dimensions is the joint one in the paper (--log-q joint). The authors' release sums
log_q over the dimensions instead (--log-q per-dimension). They are the same at q = 1 only. On two tasks, with three
seeds of 300k steps, neither ended clearly above the other, and on one the joint rose earlier (results/300k): the
paper's is the default. Where (q - 1) log pi exceeds 30 and float32 would soon overflow, log_q goes on as a logarithm:
a departure from Eq. 21 that keeps its gradient.

As in mdpo_offpolicy.py an update takes all four gradients at the same parameters, and m steps with pi_k fixed are
either m updates, one per environment step (--old-policy-interval), or m policy steps within one environment step
(--gradient-steps, Algorithm 2). This file, too, follows the paper where the release differs: no penalty
on the policy's outputs, no floor under densities, exploration by sampling. Q1 in the policy's loss is the release's
choice. An episode cut by a time limit is bootstrapped: only a real termination has value zero. The policy starts close
to uniform in every state: densities far above 1, to the power q - 1, would be the critic's ruin.
"""

import copy
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from shutil import disk_usage, which
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from torch import Tensor, nn
from tqdm import tqdm


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # any Gymnasium task with flat Box observations and bounded Box actions
    seed: int = 1  # of the networks, the exploration noise, the minibatches and the environments
    total_timesteps: int = 1_000_000  # K, environment steps to train for
    preset: Literal["loaded", "minimal"] = "loaded"  # the paper's variant; a flag given by hand wins
    cuda: bool = True  # use the GPU if there is one
    compile: bool = False  # compile the update: half a minute the first time, a few seconds from the cache
    run_name: str = ""  # a run lives in runs/NAME; default: {env_id}__{exp_name}__{seed}__{unix time}
    checkpoint_interval: int = 25_000  # steps between checkpoints, the most that a crash loses; 25 000 at most
    resume: bool = False  # continue --run-name from its checkpoint if it has one; flags not given are that run's
    evaluate: bool = False  # play the deterministic policy of --run-name's checkpoint, print its returns, train nothing
    eval_episodes: int = 10  # episodes to play with --evaluate
    capture_video: bool = False  # record the episodes of --evaluate in runs/NAME/videos
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline: no account; `wandb sync` uploads later
    wandb_project: str = "mdpo"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    wandb_group: str | None = None  # W&B group; default: {exp_name}__{preset}__{env_id}
    exp_name: tyro.conf.Fixed[str] = Path(__file__).stem  # the algorithm, in the run's name and records

    learning_rate: float = 3e-4  # η, Adam's rate for all networks
    gamma: float = 0.99  # γ, the discount
    tau: float = 0.005  # τ, how far the slow copy of V moves towards V in an update
    entropy_coef: float = 0.2  # λ, the weight of the entropy in the soft MDP; 0 is the hard MDP
    hidden_size: int = 256  # units in each of a network's two hidden layers (minimal: 64)
    batch_size: int = 256  # N, transitions in an update (minimal: 64)
    buffer_size: int = 1_000_000  # transitions in the replay buffer, a file that grows as it fills
    learning_starts: int = 10_000  # steps with uniformly random actions before the first update
    gradient_steps: int = 1  # policy updates per environment step; above 1 it is m of Algorithm 2, and π_k lasts a step
    old_policy_interval: int = 1000  # m, updates for which π_k is kept (with --gradient-steps 1)
    bregman_stepsize: float | None = None  # 1/t_k, constant; default: the paper's for the task, 0.5 for other tasks
    tsallis_q: float | None = None  # q in (0, 2] of the Bregman term; default: the paper's best for the task, or 1.5
    entropy_q: float | None = None  # q in (0, 2] of the entropy in the soft MDP; default: --tsallis-q
    log_q: Literal["joint", "per-dimension"] = "joint"  # of the action's joint density, or summed over its dimensions


PRESETS = {"loaded": dict(hidden_size=256, batch_size=256), "minimal": dict(hidden_size=64, batch_size=64)}
BREGMAN_STEPSIZE = dict(Hopper=0.8, Walker2d=0.4, HalfCheetah=0.3, Ant=0.5, Humanoid=0.5, HumanoidStandup=0.3)
compiled = partial(torch.compile, fullgraph=True, options={"cpp_wrapper": True})
TSALLIS_Q = {
    "loaded": dict(Hopper=1.0, Walker2d=2.0, HalfCheetah=1.0, Ant=2.0, Humanoid=1.2, HumanoidStandup=1.4),
    "minimal": dict(Hopper=1.0, Walker2d=1.8, HalfCheetah=1.4, Ant=2.0, Humanoid=1.6, HumanoidStandup=1.2),
}
# What --resume may change of a run; every other flag is part of what the run is.
CHANGEABLE = "run_name total_timesteps cuda compile checkpoint_interval resume evaluate eval_episodes capture_video"
CHANGEABLE += " wandb_mode wandb_project wandb_entity wandb_group"


class MLP(nn.Module):
    """Two ReLU layers. One flat vector of parameters: Adam is then a dozen operations, not a dozen a layer.

    `copies` networks side by side are the rows of a matrix of parameters, and one batched product evaluates them."""

    def __init__(self, inputs: int, hidden_size: int, outputs: int, copies: int = 0, last_gain: float = 1.0):
        super().__init__()
        sizes = (inputs, hidden_size, hidden_size, outputs)
        layers = [nn.Linear(*pair) for _ in range(copies or 1) for pair in pairwise(sizes)]
        parts = [p.detach().t() for layer in layers for p in layer.parameters()]
        for part in parts[-2:]:
            part.mul_(last_gain)
        self.shapes = [p.shape for p in parts[:6]]
        self.flat = nn.Parameter(torch.cat([p.flatten() for p in parts]).view((copies, -1) if copies else -1))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of the flat vector: weight (inputs x outputs) and bias of each layer."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return [p.view(*flat.shape[:-1], *s) for p, s in zip(flat.split(sizes, -1), self.shapes, strict=True)]

    def forward(self, x: Tensor, flat: Tensor | None = None) -> Tensor:
        """The networks' outputs, with their own parameters or with `flat` in their place."""
        w1, b1, w2, b2, w3, b3 = self.parts(self.flat if flat is None else flat)
        if w1.dim() == 2:
            x = torch.relu_(torch.addmm(b1, x, w1))
            x = torch.relu_(torch.addmm(b2, x, w2))
            return torch.addmm(b3, x, w3)
        x = torch.relu_(torch.baddbmm(b1.unsqueeze(1), x.expand(len(w1), *x.shape), w1))
        x = torch.relu_(torch.baddbmm(b2.unsqueeze(1), x, w2))
        return torch.baddbmm(b3.unsqueeze(1), x, w3)


class Adam(nn.Module):
    """Adam (Kingma & Ba, 2015) on a flat vector: torch.optim's spends more time in Python than these networks train."""

    def __init__(self, params: Tensor, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        start = dict(lr=torch.zeros(()), mean=torch.zeros_like(params), square=torch.zeros_like(params))
        start |= dict(betas=torch.tensor([0.9, 0.999]), count=torch.zeros(()))
        for name, value in start.items():
            self.register_buffer(name, value)

    @torch.no_grad()
    def step(self, params: Tensor, gradient: Tensor) -> None:
        self.count += 1
        if not torch.compiler.is_compiling():  # torch's kernel of the lines below: a tenth of an eager update less
            state = [params], [gradient], [self.mean], [self.square], [], [self.count]
            options = dict(lr=self.lr, beta1=0.9, beta2=0.999, eps=self.eps, weight_decay=0.0)
            return torch._fused_adam_(*state, **options, amsgrad=False, maximize=False)
        correction = 1 - self.betas**self.count
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient * gradient, 0.001)
        deviation = (self.square / correction[1]).sqrt().add_(self.eps)
        params.sub_(self.lr / correction[0] * self.mean / deviation)


class Agent(nn.Module):
    """All that is learnt: the policy, two Q and V, their optimisers, the old policy pi_k and the slow copy of V."""

    def __init__(self, obs_dim: int, low: np.ndarray, high: np.ndarray, args: Args):
        super().__init__()
        self.obs_dim, self.action_dim, self.args = obs_dim, len(low), args
        self.policy = MLP(obs_dim, args.hidden_size, 2 * len(low), last_gain=0.01)  # pi_0: nearly uniform, in any state
        self.q = MLP(obs_dim + len(low), args.hidden_size, 1, copies=2)
        self.v = MLP(obs_dim, args.hidden_size, 1)
        self.old_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.slow_v = copy.deepcopy(self.v).requires_grad_(False)
        self.policy_optimizer, self.q_optimizer, self.v_optimizer = (
            Adam(net.flat.detach(), eps=1e-8) for net in (self.policy, self.q, self.v)
        )
        for optimizer in (self.policy_optimizer, self.q_optimizer, self.v_optimizer):
            optimizer.lr.fill_(args.learning_rate)
        halves, dtype = dict(scale=high / 2 - low / 2, shift=high / 2 + low / 2), torch.get_default_dtype()
        for name, value in halves.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=dtype), persistent=False)

    def actor(self):
        """The policy as a function of numpy arrays: for one observation five times faster than torch.

        Without noise it plays the mean. On the CPU the arrays are the parameters, and follow them as they change."""
        w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in self.policy.parts(self.policy.flat))
        scale, shift, n = self.scale.cpu().numpy(), self.shift.cpu().numpy(), self.action_dim

        def action(obs: np.ndarray, noise: np.ndarray | float = 0.0) -> np.ndarray:
            x = obs.astype(np.float32).dot(w1) + b1
            x = np.maximum(x, 0).dot(w2) + b2
            x = np.maximum(x, 0).dot(w3) + b3
            return np.tanh(x[:n] + np.exp(x[n:].clip(-20, 2)) * noise) * scale + shift

        return action


def gaussian_log_density(z: Tensor, log_std: Tensor) -> Tensor:
    """log N(mean + std z; mean, std^2), in each dimension."""
    return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)


def log_slope(u: Tensor, scale: Tensor) -> Tensor:
    """log da/du of the action a = scale tanh(u) + shift; exact also where 1 - tanh(u)^2 would round to 0.

    The log-density of a is that of u less this; two policies at the same action share it, as they share u."""
    return torch.log(scale) + 2 * (math.log(2) - u - F.softplus(-2 * u))


def mean_and_log_std(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = outputs.chunk(2, -1)
    return mean, log_std.clamp(-20, 2)


def log_q(log_x: Tensor, q: float, limit: float = 30.0) -> Tensor:
    """log_q x from log x: expm1 is exact as q -> 1, and where a power of the density would overflow or cancel.

    The exponent (q - 1) log x is followed up to `limit`, e^30 = 1e13, whose square float32 still holds. A clamp there
    would leave no gradient, and nothing to pull back a policy that got so far: beyond, log_q goes on as a logarithm of
    the exponent, with the same slope at the seam, still increasing in x, and with a gradient that only shrinks."""
    if q == 1:
        return log_x
    exponent = (q - 1) * log_x
    inside, beyond = exponent.clamp(max=limit), torch.relu(exponent - limit)
    return (torch.expm1(inside) + math.exp(limit) * torch.log1p(beyond)) / (q - 1)


def log_q_density(log_densities: Tensor, q: float, kind: str) -> Tensor:
    """log_q of the joint density of an action's dimensions, or the sum of their log_q."""
    return log_q(log_densities.sum(-1), q) if kind == "joint" else log_q(log_densities, q).sum(-1)


def tsallis_loss(log_densities: Tensor, old_log_densities: Tensor, q: Tensor, args: Args) -> Tensor:
    """Eq. 21 for a soft MDP, times 1 / t_k. At q = 1 it is, to the bit, the loss of mdpo_offpolicy.py."""
    log_pi = log_q_density(log_densities, args.tsallis_q, args.log_q)
    old_bregman = args.tsallis_q * log_q_density(old_log_densities, args.tsallis_q, args.log_q)
    old_entropy = args.entropy_q * log_q_density(old_log_densities, args.entropy_q, args.log_q)
    inverse_t, entropy_coef = args.bregman_stepsize, args.entropy_coef
    return (inverse_t * log_pi - (inverse_t * old_bregman - entropy_coef * old_entropy) - q).mean()


def squared_error(values: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((values - targets) ** 2).mean(-1)


def policy_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    """The loss at the actions that the policy makes of the noise; also its log-density by dimension, Q1, Q's inputs."""
    args = agent.args
    mean, log_std = mean_and_log_std(agent.policy(obs))
    u = mean + torch.exp(log_std) * noise
    slope = log_slope(u, torch.ones_like(agent.scale))  # lambda and q are for actions in [-1, 1], whatever the bounds
    log_prob = gaussian_log_density(noise, log_std) - slope
    old_mean, old_log_std = mean_and_log_std(agent.old_policy(obs))
    old_log_prob = gaussian_log_density((u - old_mean) * torch.exp(-old_log_std), old_log_std) - slope
    inputs = torch.cat([obs, torch.tanh(u) * agent.scale + agent.shift], -1)
    q1 = agent.q(inputs, agent.q.flat[0].detach()).squeeze(-1)  # its gradient is for the action alone
    loss = tsallis_loss(log_prob, old_log_prob, q1, args)
    return loss, log_prob, q1, inputs, old_log_prob


def policy_step(agent: Agent, batch: Tensor, noise: Tensor) -> None:
    """Algorithm 2, line 8: a step of the policy alone."""
    loss, *_ = policy_loss(agent, batch[:, : agent.obs_dim], noise)
    agent.policy_optimizer.step(agent.policy.flat, torch.autograd.grad(loss, agent.policy.flat)[0])


def update(agent: Agent, batch: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """Algorithm 2, lines 8 and 12: a step of the policy, of Q and of V, all gradients at the same parameters."""
    args = agent.args
    obs, _, next_obs, reward, terminated = columns(batch, agent.obs_dim, agent.action_dim)
    actor_loss, log_prob, q1, inputs, old_log_prob = policy_loss(agent, obs, noise)
    with torch.no_grad():
        q2 = agent.q(inputs, agent.q.flat[1]).squeeze(-1)
        v_target = torch.minimum(q1, q2) - args.entropy_coef * log_q_density(log_prob, args.entropy_q, args.log_q)
        q_target = reward + args.gamma * (1 - terminated) * agent.slow_v(next_obs).squeeze(-1)
    q = agent.q(batch[:, : agent.obs_dim + agent.action_dim]).squeeze(-1)
    qf1_loss, qf2_loss = q_losses = squared_error(q, q_target)
    vf_loss = squared_error(agent.v(obs).squeeze(-1), v_target)
    # Each loss depends on its own parameters only, so that the gradient of the sum is the gradient of each.
    networks = (agent.policy, agent.q, agent.v)
    gradients = torch.autograd.grad(actor_loss + q_losses.sum() + vf_loss, [net.flat for net in networks])
    optimizers = (agent.policy_optimizer, agent.q_optimizer, agent.v_optimizer)
    for optimizer, net, gradient in zip(optimizers, networks, gradients, strict=True):
        optimizer.step(net.flat, gradient)
    agent.slow_v.flat.lerp_(agent.v.flat.detach(), args.tau)
    return {
        "losses/actor_loss": actor_loss.detach(),
        "losses/qf1_loss": qf1_loss.detach(),
        "losses/qf2_loss": qf2_loss.detach(),
        "losses/vf_loss": vf_loss.detach(),
        "losses/qf1_values": q[0].detach().mean(),
        "losses/entropy": -log_prob.detach().sum(-1).mean(),
        "losses/kl_to_old": (log_prob - old_log_prob).detach().sum(-1).mean(),
    }


def columns(rows: Tensor, obs_dim: int, action_dim: int) -> tuple[Tensor, ...]:
    """Views of rows: observation, action, next observation, reward, terminated. The first two are Q's input."""
    obs, action, next_obs, last = rows.split([obs_dim, action_dim, obs_dim, 2], -1)
    return obs, action, next_obs, last[:, 0], last[:, 1]


class ReplayBuffer:
    """The last `size` transitions, in a file mapped to memory: it grows as it fills, and a checkpoint just flushes it.

    Transition k is row k modulo the length of the file, which is HEADROOM rows longer than `size`; and no more than
    HEADROOM steps pass between checkpoints. So the rows that a checkpoint can sample stay untouched until the next
    checkpoint is there: a run that was killed, however often, finds its buffer as it was, and what it had written
    since lies beyond the checkpoint's count and is written again before it is ever sampled."""

    HEADROOM = 25_000

    def __init__(self, path: Path, obs_dim: int, action_dim: int, size: int, resume: bool):
        shape = (size + self.HEADROOM, 2 * obs_dim + action_dim + 2)
        if resume and (not path.exists() or path.stat().st_size != 4 * math.prod(shape)):
            refuse(f"{path}, the replay buffer that the checkpoint needs to go on, is missing or of another size.")
        self.file = np.memmap(path, np.float32, "r+" if resume else "w+", shape=shape)
        self.array, self.size = np.asarray(self.file), size
        self.rows = torch.from_numpy(self.array)

    def add(self, k: int, *transition: np.ndarray | tuple) -> np.ndarray:
        return np.concatenate(transition, out=self.array[k % len(self.array)], casting="same_kind")

    def sample(self, k: int, batch_size: int) -> Tensor:
        """Uniformly, with replacement, from the transitions before the k-th."""
        age = torch.randint(1, min(k, self.size) + 1, (batch_size,))
        return self.rows[(k - age) % len(self.rows)]


def refuse(sentence: str) -> NoReturn:
    """Input that cannot work: a plain sentence, and exit status 2."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def load_checkpoint(args: Args, agent: Agent | None = None) -> dict | None:
    """The checkpoint of --run-name, if it has one, and its agent into `agent`. weights_only: no code is unpickled."""
    path = Path("runs", args.run_name, "checkpoint.pt")
    if not args.run_name or not path.exists():
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if (writer := checkpoint["args"]["exp_name"]) != args.exp_name:
            raise ValueError(f"it was written by {writer}, not by {args.exp_name}")
        _ = Args(**checkpoint["args"]), checkpoint["state"]["iteration"]
        if agent is not None:
            agent.load_state_dict(checkpoint["agent"])
    except Exception as error:  # a damaged, unsafe or unfit file fails in many ways
        reason = str(error).strip().split("\n")[0]
        refuse(f"{path} cannot be used here: {reason} ({type(error).__name__}). It is left as it is.")
    return checkpoint


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags given by hand win; the others come from the run that is resumed or evaluated, else from the preset."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    checkpoint, goes_on = load_checkpoint(args), args.resume or args.evaluate
    saved = PRESETS[args.preset] | dict(preset=args.preset)
    if checkpoint and goes_on:
        saved = checkpoint["args"] | dict(resume=args.resume, evaluate=args.evaluate)
    args = tyro.cli(Args, args=argv, default=Args(**saved))
    task = args.env_id.split("/")[-1].split("-v")[0]
    if args.bregman_stepsize is None:
        args.bregman_stepsize = BREGMAN_STEPSIZE.get(task, 0.5)
    if args.tsallis_q is None:
        args.tsallis_q = TSALLIS_Q[args.preset].get(task, 1.5)
    if args.entropy_q is None:
        args.entropy_q = args.tsallis_q
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')}"
        if type(value) in (int, float) and name not in ("seed", "entropy_coef") and not 0 < value < float("inf"):
            refuse(f"{flag} must be a positive number, not {value}.")
        if checkpoint and args.resume and name not in CHANGEABLE.split() and value != saved[name]:
            refuse(f"{flag} is {saved[name]} in run {args.run_name}; it cannot become {value} when the run is resumed.")
        if name in ("tsallis_q", "entropy_q") and value > 2:
            refuse(f"{flag} must lie in (0, 2], and {value} does not.")
        if name in ("learning_starts", "buffer_size") and value < args.batch_size:
            refuse(f"--batch-size {args.batch_size} is more than the {value} transitions of {flag}.")
    folder = Path("runs", args.run_name)
    problems = {
        f"{folder} holds a run: --resume continues it, another --run-name starts one.": checkpoint and not goes_on,
        f"--evaluate needs {folder / 'checkpoint.pt'}, which is not there.": args.evaluate and not checkpoint,
        "--capture-video records the episodes of --evaluate: give both.": args.capture_video and not args.evaluate,
        f"--seed must not be negative, and {args.seed} is.": args.seed < 0,
        f"--gamma must lie in (0, 1], and {args.gamma} does not.": args.gamma > 1,
        f"--tau must lie in (0, 1], and {args.tau} does not.": args.tau > 1,
        f"--entropy-coef must not be negative, and {args.entropy_coef} is.": not 0 <= args.entropy_coef < float("inf"),
        f"--total-timesteps must be more than --learning-starts, {args.learning_starts} steps.": (
            args.total_timesteps <= args.learning_starts
        ),
    }
    if found := [sentence for sentence, is_so in problems.items() if is_so]:
        refuse(found[0])
    if args.capture_video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    try:
        env = gym.make(args.env_id)
    except Exception as error:  # an unknown name, a missing package, or whatever a third-party task raises
        refuse(f"Gymnasium cannot make {args.env_id}: {error}")
    for kind, space in ("observations", env.observation_space), ("actions", env.action_space):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            refuse(f"{args.env_id} has {kind} {space}; only a Box of one dimension will do.")
    if not (env.action_space.is_bounded() and (env.action_space.high > env.action_space.low).all()):
        refuse(f"{args.env_id} has actions {env.action_space}; a squashed policy needs finite bounds, apart.")
    env.close()
    args.run_name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    return args


def evaluate(args: Args) -> int:
    """Play the policy's mean, squashed."""
    env = gym.make(args.env_id)
    if args.capture_video:
        # Gymnasium's own tasks have a camera that follows the robot; by default it runs out of the picture.
        camera = {"camera_name": "track"} if "gymnasium.envs.mujoco" in str(env.spec.entry_point) else {}
        env = gym.make(args.env_id, render_mode="rgb_array", **camera)
        env = gym.wrappers.RecordVideo(env, f"runs/{args.run_name}/videos", episode_trigger=lambda episode: True)
    low, high = env.action_space.low, env.action_space.high
    agent = Agent(env.observation_space.shape[0], low, high, args)
    load_checkpoint(args, agent)
    mean_action, returns = agent.actor(), []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=args.seed + episode)
        done, rewards = False, []
        while not done:
            obs, reward, terminated, truncated, _ = env.step(np.clip(mean_action(obs), low, high))
            rewards.append(float(reward))
            done = terminated or truncated
        returns.append(sum(rewards))
        print(f"episode {episode + 1}: return {returns[-1]:.1f} in {len(rewards)} steps", flush=True)
    env.close()
    print(f"mean {np.mean(returns):.1f} ± {np.std(returns):.1f} (std) over {len(returns)} episodes of {args.env_id}")
    return 0


def provenance() -> dict:
    """What it takes to make a figure again: the commit, and the versions that decide results."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True) if which("git") else None
    packages = ("torch", "gymnasium", "mujoco", "numpy", "wandb")
    return dict(git_commit=git and git.stdout.strip(), versions={package: version(package) for package in packages})


def can_compile(device: torch.device) -> bool:
    torch._dynamo.config.trace_autograd_ops = True  # loss, gradient and optimiser in one graph
    try:
        compiled(lambda x: torch.autograd.grad(x.sin().sum(), x)[0])(torch.ones(8, device=device, requires_grad=True))
    except Exception as error:  # no C++ compiler, no Python headers, no Triton, ...
        print(f"--compile does not work here, going on without: {error}".split("\n")[0], file=sys.stderr)
        return False
    return True


def check_finite(step: int, **named: np.ndarray | Tensor) -> None:
    for name, values in named.items():
        if not torch.as_tensor(values).isfinite().all():
            raise FloatingPointError(f"{name} not finite at step {step}")


def train(args: Args) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped it."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more only slow networks this small down
    torch.set_flush_denormal(True)  # Adam's means of dead units decay into numbers that a CPU is slow with
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    env, K = gym.make(args.env_id), args.total_timesteps
    obs_dim, low, high = env.observation_space.shape[0], env.action_space.low, env.action_space.high
    args.compile = args.compile and can_compile(device)
    agent = Agent(obs_dim, low, high, args).to(device)
    learn, learn_policy = (compiled(f) if args.compile else f for f in (update, policy_step))
    folder, checkpoint = Path("runs", args.run_name), load_checkpoint(args, agent)
    state = dict(iteration=0, wandb_id=secrets.token_hex(4), returns=[], points=[])
    if checkpoint:
        state = checkpoint["state"]
        torch.set_rng_state(checkpoint["rng"])
    if state["iteration"] >= K and (folder / "finished").exists():
        print(f"{folder} is finished: it has made its {state['iteration']} steps.")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    buffer = ReplayBuffer(folder / "replay.bin", obs_dim, len(low), args.buffer_size, bool(checkpoint))
    needed = buffer.rows[: min(K, len(buffer.rows))].nbytes - 512 * os.stat(folder / "replay.bin").st_blocks
    if needed > disk_usage(folder).free:
        refuse(f"{folder / 'replay.bin'} will grow by {needed / 1e9:.1f} GB, more than is free there.")
    (folder / "finished").unlink(missing_ok=True)
    try:
        run = wandb.init(
            dir=folder.resolve(), name=args.run_name, id=state["wandb_id"], mode=args.wandb_mode,
            project=args.wandb_project, entity=args.wandb_entity, job_type=args.exp_name,
            group=args.wandb_group or f"{args.exp_name}__{args.preset}__{args.env_id}",
            tags=[args.exp_name, args.preset, args.env_id], config=asdict(args) | provenance(),
            resume="allow" if args.wandb_mode == "online" else None,
        )  # fmt: skip
    except wandb.Error as error:
        refuse(f"W&B cannot start: {error}")
    (folder / "args.json").write_text(json.dumps(asdict(args), indent=2))

    stop = []  # the first signal lets the iteration end and saves the run, a second of its kind kills

    def log(step: int, point: dict[str, float]) -> None:
        point = {name: float(value) for name, value in point.items()}
        state["points"].append((time.time(), step, point))
        try:
            run.log(point | {"global_step": step}, step=step)
        except ConnectionError:  # W&B's process is gone: SLURM or a shutdown sends SIGTERM to all processes at once
            stop.append(signal.SIGTERM)

    def save() -> None:
        """Write under another name and rename: a kill at any instant leaves the old checkpoint or the new one, whole.

        A kill also loses what W&B has not flushed: the last minute's points go along, and a resume logs them again."""
        buffer.file.flush()
        state["points"] = [p for p in state["points"] if p[0] > time.time() - 60]
        with open(folder / "checkpoint.tmp", "wb") as file:
            torch.save(dict(args=asdict(args), agent=agent.state_dict(), state=state, rng=torch.get_rng_state()), file)
            os.fsync(file.fileno())
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")

    points, state["points"] = state["points"], []
    for _, step, point in points:
        log(step, point)
    save()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda n, _: (stop.append(n), signal.signal(n, signal.SIG_DFL)))
    policy, losses, episode_return, episode_length = agent.actor(), {}, 0.0, 0
    first = last_save = last_log = state["iteration"]
    obs, _ = env.reset(seed=int(np.random.SeedSequence([args.seed, first]).generate_state(1)[0]))
    bar = tqdm(total=K, initial=first, unit=" steps", mininterval=0.5 if sys.stderr.isatty() else 60)
    start = time.time()
    for k in range(first, K):
        # Act: uniformly at first, then as the policy says.
        if k < args.learning_starts:
            action = low + (high - low) * torch.rand(len(low)).numpy()
        else:
            action = policy(obs, torch.randn(len(low)).numpy())
        action = action.clip(low, high)  # against rounding
        next_obs, reward, terminated, truncated, _ = env.step(action)
        step, row = k + 1, buffer.add(k, obs, action, next_obs, (reward, terminated))
        if not np.isfinite(row).all():
            check_finite(step, policy=agent.policy.flat, observations=next_obs, rewards=reward, transition=row)
        obs = next_obs
        episode_return += float(reward)
        episode_length += 1
        if terminated or truncated:
            log(step, {"charts/episodic_return": episode_return, "charts/episodic_length": episode_length})
            state["returns"] = [*state["returns"][-99:], episode_return]
            obs, _ = env.reset()
            episode_return, episode_length = 0.0, 0

        # Learn: the policy and the critic, from one batch.
        if k >= args.learning_starts:
            if args.gradient_steps > 1 or (k - args.learning_starts) % args.old_policy_interval == 0:
                agent.old_policy.flat.copy_(agent.policy.flat.detach())
            batch = buffer.sample(step, args.batch_size).to(device)
            for _ in range(args.gradient_steps - 1):
                learn_policy(agent, batch, torch.randn(args.batch_size, len(low)).to(device))
            losses = learn(agent, batch, torch.randn(args.batch_size, len(low)).to(device))
            if device.type != "cpu":
                policy = agent.actor()

        state["iteration"] = step
        to_save = stop or step == K or step - last_save >= min(args.checkpoint_interval, buffer.HEADROOM)
        if to_save or step % 1000 == 0:
            point = {name: value.item() for name, value in losses.items()}
            check_finite(step, **point, policy=agent.policy.flat, q=agent.q.flat, v=agent.v.flat)
            point["charts/learning_rate"] = args.learning_rate
            point["charts/SPS"] = (step - last_log) / (time.time() - start)
            log(step, point)
            last_log, start = step, time.time()
            bar.set_postfix({"return": f"{np.mean(state['returns'] or [np.nan]):.0f}"}, refresh=False)
        bar.update(1)
        if to_save:
            save()
            last_save = step
            if stop:
                break
    bar.close()
    env.close()
    status = 128 + stop[0] if state["iteration"] < K else 0
    try:
        run.finish(exit_code=status)
    except ConnectionError:
        status = 128 + signal.SIGTERM  # also at the end of training: what W&B missed, a resume logs again
    if status == 0:
        (folder / "finished").write_text(f"{args.total_timesteps}\n")  # benchmark.sh skips runs that say so
    else:
        print(f"stopped after {state['iteration']} steps: go on with --run-name {args.run_name} --resume")
    return status


def main(argv: list[str] | None = None) -> int:
    warnings.filterwarnings("ignore", message=".*out of date.*")  # v4 tasks are what the literature reports
    args = parse_args(argv)
    try:
        return evaluate(args) if args.evaluate else train(args)
    except gym.error.DependencyNotInstalled as error:  # what it takes to render
        refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except FloatingPointError as error:
        print(f"\nerror: {error}. The last good checkpoint is runs/{args.run_name}/checkpoint.pt.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
