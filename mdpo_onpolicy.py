"""On-policy Mirror Descent Policy Optimization (MDPO; Tomar, Shani, Efroni & Ghavamzadeh, 2021), in one file.

Mirror descent maximises a function by maximising, again and again, its linearisation less a Bregman divergence that
keeps the next point near the last one (Eq. 1). Take the expected return of a policy as the function and the negative
Shannon entropy as the potential: the linearisation at pi_k is the expected advantage, the divergence is the KL, and
the next policy is (Eq. 5, for a parameterised policy Eq. 6)

    theta_{k+1} = argmax_theta Psi(theta, theta_k)
    Psi(theta, theta_k) = E_{s ~ rho_k} [ E_{a ~ pi_theta} A_k(s, a) - (1 / t_k) KL(pi_theta || pi_k) ].

Were the policy free, the maximiser would be pi_k exp(t_k A_k) / Z (Eq. 2). A network is not free, so each iteration
takes m gradient steps on Psi. With the samples of pi_k and the ratio r = pi_theta(a|s) / pi_k(a|s), their gradient is
Eq. 7, that of

    mean[ r A_k ] - (1 / t_k) mean[ KL(pi_theta || pi_k) ],          t_k = 1 - k / K  for iteration k of K.

The KL is in closed form, the new policy first: TRPO and KL-PPO have it the other way round. At theta_k its gradient is
zero, so that one step (m = 1) is the vanilla policy gradient: the trust region needs m > 1. Every step sees the whole
batch; only the critic is fitted in minibatches (Algorithm 1).

Where the authors' release and their paper differ, this file follows the paper, but for Adam's rate: the paper's table
anneals it in the loaded presets (--anneal-lr), the release keeps it constant, as here. t_k goes to 0 already, and with
both the policy comes to rest too soon: at 1M steps constant was better on both tasks and all seeds tried (results/).
Beyond both, an episode cut by a time limit is bootstrapped from the value of its true last observation; only a real
termination has value zero.
"""

import atexit
import json
import multiprocessing
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
from pathlib import Path
from shutil import which
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
    env_id: str = "Hopper-v4"  # any Gymnasium task with flat Box observations and Box actions
    seed: int = 1  # of the networks, the exploration noise, the minibatches and the environments
    total_timesteps: int = 1_000_000  # environment steps to train for; K = total_timesteps / (num_steps * num_envs)
    preset: Literal["loaded-gae", "loaded", "minimal"] = "loaded-gae"  # the paper's variant; a flag given by hand wins
    cuda: bool = True  # use the GPU if there is one
    compile: bool = False  # compile the updates: half a minute the first time, a few seconds from the cache
    run_name: str = ""  # a run lives in runs/NAME; default: {env_id}__{exp_name}__{seed}__{unix time}
    checkpoint_interval: int = 100_000  # steps between checkpoints, the most that a crash loses, up to iterations
    resume: bool = False  # continue --run-name from its checkpoint if it has one; flags not given are that run's
    evaluate: bool = False  # play the deterministic policy of --run-name's checkpoint, print its returns, train nothing
    eval_episodes: int = 10  # episodes to play with --evaluate
    capture_video: bool = False  # record the episodes of --evaluate in runs/NAME/videos
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline: no account; `wandb sync` uploads later
    wandb_project: str = "mdpo"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    wandb_group: str | None = None  # W&B group; default: {exp_name}__{preset}__{env_id}
    exp_name: tyro.conf.Fixed[str] = Path(__file__).stem  # the algorithm, in the run's name and records

    num_envs: int = 1  # environments stepped side by side; 1 is the paper's
    async_envs: bool = False  # a worker process for each environment, for tasks that are slow to step
    num_steps: int = 2048  # T, steps of each environment in an iteration
    gamma: float = 0.99  # γ, the discount
    learning_rate: float = 3e-4  # η, Adam's rate for policy and critic
    critic_epochs: int = 5  # the critic's passes over a batch
    critic_minibatch_size: int = 128  # N, the critic's minibatch
    anneal_lr: bool = False  # bring Adam's rate linearly to 0, as in the paper's table of the loaded presets
    norm_obs: bool = True  # standardise observations by running statistics, part of the agent (minimal: off)
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return (minimal: off)
    orthogonal_init: bool = True  # initialise weights orthogonally (minimal: off)
    clip_value_loss: bool = True  # keep the critic within 0.2 of its old values (minimal: off)
    gae_lambda: float = 0.95  # λ of generalised advantage estimation (loaded and minimal: 1, Monte-Carlo returns)
    sgd_steps: int = 10  # m, gradient steps on Ψ in an iteration, each on the whole batch (minimal: 5)


LOADED = dict(anneal_lr=True, norm_obs=True, norm_reward=True, orthogonal_init=True, clip_value_loss=True)
PRESETS = {
    "loaded-gae": LOADED | dict(gae_lambda=0.95, sgd_steps=10, anneal_lr=False),
    "loaded": LOADED | dict(gae_lambda=1.0, sgd_steps=10, anneal_lr=False),
    "minimal": dict.fromkeys(LOADED, False) | dict(gae_lambda=1.0, sgd_steps=5),
}
compiled = partial(torch.compile, fullgraph=True, options={"cpp_wrapper": True})
# What --resume may change of a run; every other flag is part of what the run is.
CHANGEABLE = "run_name total_timesteps cuda compile checkpoint_interval resume evaluate eval_episodes capture_video"
CHANGEABLE += " wandb_mode wandb_project wandb_entity wandb_group async_envs"


class MLP(nn.Module):
    """Two tanh layers of 64. One flat vector of parameters: Adam is then a dozen operations, not a dozen a layer."""

    def __init__(self, inputs: int, outputs: int, orthogonal_init: bool, last_gain: float, extra: int = 0):
        super().__init__()
        layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
        if orthogonal_init:
            for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)
        parts = [p.detach() for layer in layers for p in layer.parameters()] + [torch.zeros(extra)]
        self.shapes = [p.shape for p in parts]
        self.flat = nn.Parameter(torch.cat([p.flatten() for p in parts]))

    def parts(self) -> list[Tensor]:
        """Views of the flat vector: weight and bias of each layer, then the extra parameters."""
        return [p.view(s) for p, s in zip(self.flat.split([s.numel() for s in self.shapes]), self.shapes, strict=True)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w1, b1, w2, b2, w3, b3, extra = self.parts()
        x = torch.tanh(F.linear(x, w1, b1))
        x = torch.tanh(F.linear(x, w2, b2))
        return F.linear(x, w3, b3), extra


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


class RunningMoments(nn.Module):
    """Mean and variance of all that was seen, a batch at a time (Chan, Golub & LeVeque, 1979), in double precision."""

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update(self, batch: Tensor) -> None:
        batch = batch.double()
        share = len(batch) / (self.count + len(batch))  # of the batch in all that was seen
        delta = batch.mean(0) - self.mean
        self.var += share * (batch.var(0, correction=0) - self.var + (1 - share) * delta**2)
        self.mean += share * delta
        self.count += len(batch)


class Agent(nn.Module):
    """All that is learnt: policy, critic, their optimisers, and the statistics that normalise what they see."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args):
        super().__init__()
        self.policy = MLP(obs_dim, action_dim, args.orthogonal_init, last_gain=0.01, extra=action_dim)
        self.critic = MLP(obs_dim, 1, args.orthogonal_init, last_gain=1.0)
        self.policy_optimizer, self.critic_optimizer = Adam(self.policy.flat), Adam(self.critic.flat)
        self.obs_moments, self.return_moments = RunningMoments(obs_dim), RunningMoments()
        self.norm_obs = args.norm_obs
        self.policy_step = compiled(policy_step) if args.compile else policy_step
        self.critic_step = compiled(critic_step) if args.compile else critic_step

    def normalize(self, obs: Tensor) -> Tensor:
        if self.norm_obs:
            obs = ((obs - self.obs_moments.mean) / (self.obs_moments.var + 1e-8).sqrt()).clamp(-10, 10)
        return obs.float()

    def actor(self):
        """The policy's mean as a function of numpy arrays: for a few observations five times faster than torch."""
        w1, b1, w2, b2, w3, b3, _ = (p.detach().cpu().numpy() for p in self.policy.parts())
        shift, scale = self.obs_moments.mean.cpu().numpy(), (self.obs_moments.var + 1e-8).sqrt().cpu().numpy()

        def mean_action(obs: np.ndarray) -> np.ndarray:
            if self.norm_obs:
                obs = ((obs - shift) / scale).clip(-10, 10)
            x = obs.astype(np.float32).dot(w1.T) + b1
            x = np.tanh(x).dot(w2.T) + b2
            return np.tanh(x).dot(w3.T) + b3

        return mean_action

    def noise(self, *shape: int) -> np.ndarray:
        """Exploration noise for a whole rollout at once."""
        std = self.policy.parts()[-1].detach().exp().cpu()
        return (torch.randn(*shape, len(std)) * std).numpy()

    def set_learning_rate(self, learning_rate: float) -> None:
        self.policy_optimizer.lr.fill_(learning_rate)
        self.critic_optimizer.lr.fill_(learning_rate)


def gaussian_log_prob(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(action; mean, diag(std^2)), one number a row."""
    z = (action - mean) * torch.exp(-log_std)
    return -0.5 * (z * z).sum(-1) - (log_std + 0.5 * np.log(2 * np.pi)).sum(-1)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """KL(p || q) of diagonal Gaussians, in closed form, one number a row."""
    z = (mean_p - mean_q) * torch.exp(-log_std_q)
    return (log_std_q - log_std_p + 0.5 * (torch.exp(2 * (log_std_p - log_std_q)) + z * z - 1)).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    return (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)


def gae(rewards, values, next_values, terminated, done, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al., 2016) of a rollout: arrays of steps x environments.

    next_values[t] is the value of the observation that step t led to, the true last one where an episode ended:
    a truncated episode is bootstrapped from it, a terminated one is not, and no sum runs across an episode's end.
    """
    deltas = rewards + gamma * (1 - terminated) * next_values - values
    decays = gamma * gae_lambda * (1 - done)
    advantages, advantage = np.empty_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = advantage = deltas[t] + decays[t] * advantage
    return advantages


def explained_variance(predictions: np.ndarray, targets: np.ndarray) -> float:
    """1 for a perfect critic, 0 for one no better than a constant."""
    return 1 - np.var(targets - predictions) / np.var(targets) if np.var(targets) > 0 else float("nan")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: bool) -> Tensor:
    """Half the squared error; clipped, the worse of it and that of values within 0.2 of the old ones."""
    error = F.mse_loss(values, returns, reduction="none")
    if clip:
        near = values.clamp(old_values - 0.2, old_values + 0.2)
        error = torch.maximum(error, F.mse_loss(near, returns, reduction="none"))
    return 0.5 * error.mean()


def critic_step(critic: MLP, optimizer: Adam, obs: Tensor, old_values: Tensor, returns: Tensor, clip: bool) -> Tensor:
    loss = value_loss(critic(obs)[0].squeeze(-1), old_values, returns, clip)
    optimizer.step(critic.flat, torch.autograd.grad(loss, critic.flat)[0])
    return loss.detach()


def update_critic(agent: Agent, batch: dict[str, Tensor], args: Args) -> dict[str, float]:
    """Policy evaluation: fit V to the returns in shuffled minibatches."""
    losses = []
    for _ in range(args.critic_epochs):
        order = torch.randperm(len(batch["obs"])).to(batch["obs"].device)
        shuffled = [batch[key][order].split(args.critic_minibatch_size) for key in ("obs", "values", "returns")]
        for minibatch in zip(*shuffled, strict=True):
            losses.append(agent.critic_step(agent.critic, agent.critic_optimizer, *minibatch, args.clip_value_loss))
    return {"losses/value_loss": torch.stack(losses).mean().item()}


def mdpo_objective(ratio: Tensor, advantages: Tensor, kl: Tensor, inverse_t: Tensor | float) -> Tensor:
    """Psi of Eq. 6 on samples of pi_k; its gradient is Eq. 7."""
    return (ratio * advantages).mean() - inverse_t * kl.mean()


def policy_step(policy: MLP, optimizer: Adam, batch: dict[str, Tensor], inverse_t: Tensor) -> tuple[Tensor, Tensor]:
    """One step of gradient ascent on Psi (Algorithm 1, line 11), on the whole batch."""
    mean, log_std = policy(batch["obs"])
    ratio = torch.exp(gaussian_log_prob(batch["actions"], mean, log_std) - batch["log_probs"])
    kl = gaussian_kl(mean, log_std, batch["means"], batch["log_std"])  # KL(pi_theta || pi_k): the new policy first
    loss = -mdpo_objective(ratio, batch["advantages"], kl, inverse_t)
    gradient = torch.autograd.grad(loss, policy.flat)[0]
    optimizer.step(policy.flat, gradient * (0.5 / (gradient.norm() + 1e-6)).clamp(max=1))  # norm at most 0.5 (release)
    return loss.detach(), kl.mean().detach()


def update_policy(agent: Agent, batch: dict[str, Tensor], args: Args, progress: float) -> dict[str, float]:
    """Algorithm 1, policy improvement: m steps on Psi from theta_k, with t_k = 1 - k/K."""
    inverse_t = torch.tensor(1 / (1 - progress), device=batch["obs"].device)
    for _ in range(args.sgd_steps):
        loss, _ = agent.policy_step(agent.policy, agent.policy_optimizer, batch, inverse_t)
    return {"losses/policy_loss": loss.item(), "charts/t_k": 1 - progress}


class SerialEnvs(gym.vector.SyncVectorEnv):
    """Gymnasium's in-process vector without batched infos and copies, which cost over half of a HalfCheetah step."""

    def step(self, actions: np.ndarray):
        for i, env in enumerate(self.envs):
            self._env_obs[i], self._rewards[i], self._terminations[i], self._truncations[i], _ = env.step(actions[i])
            self._observations[i] = self._env_obs[i]
        return self._observations, self._rewards, self._terminations, self._truncations, {}


def make_env(env_id: str) -> gym.Env:
    if multiprocessing.parent_process() is not None:  # a worker: when it stops is the main process's to say
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
    return gym.make(env_id)


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
    batch_size = args.num_steps * args.num_envs
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')}"
        if type(value) in (int, float) and name not in ("seed", "gae_lambda") and not 0 < value < float("inf"):
            refuse(f"{flag} must be a positive number, not {value}.")
        if checkpoint and args.resume and name not in CHANGEABLE.split() and value != saved[name]:
            refuse(f"{flag} is {saved[name]} in run {args.run_name}; it cannot become {value} when the run is resumed.")
        if name.endswith("minibatch_size") and value > batch_size:
            refuse(f"{flag} {value} is more than a rollout of {batch_size} steps.")
    folder = Path("runs", args.run_name)
    problems = {
        f"{folder} holds a run: --resume continues it, another --run-name starts one.": checkpoint and not goes_on,
        f"--evaluate needs {folder / 'checkpoint.pt'}, which is not there.": args.evaluate and not checkpoint,
        "--capture-video records the episodes of --evaluate: give both.": args.capture_video and not args.evaluate,
        f"--seed must not be negative, and {args.seed} is.": args.seed < 0,
        f"--gamma must lie in (0, 1], and {args.gamma} does not.": args.gamma > 1,
        f"--gae-lambda must lie in [0, 1], and {args.gae_lambda} does not.": not 0 <= args.gae_lambda <= 1,
        f"--total-timesteps must be at least one rollout, {batch_size} steps.": args.total_timesteps < batch_size,
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
    env.close()
    args.run_name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    return args


def evaluate(args: Args) -> int:
    """Play the policy's mean, normalised by the statistics that it was trained with."""
    env = gym.make(args.env_id)
    if args.capture_video:
        # Gymnasium's own tasks have a camera that follows the robot; by default it runs out of the picture.
        camera = {"camera_name": "track"} if "gymnasium.envs.mujoco" in str(env.spec.entry_point) else {}
        env = gym.make(args.env_id, render_mode="rgb_array", **camera)
        env = gym.wrappers.RecordVideo(env, f"runs/{args.run_name}/videos", episode_trigger=lambda episode: True)
    low, high = env.action_space.low, env.action_space.high
    agent = Agent(env.observation_space.shape[0], low.shape[0], args)
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
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    T, N, K = args.num_steps, args.num_envs, args.total_timesteps // (args.num_steps * args.num_envs)
    # Without autoreset, in one process or several, a step returns the true last observation of an episode.
    vector = gym.vector.AsyncVectorEnv if args.async_envs else SerialEnvs
    envs = vector([partial(make_env, args.env_id)] * N, copy=False, autoreset_mode="Disabled")
    atexit.register(envs.close)  # an error must not leave workers waiting
    obs_space, low, high = envs.single_observation_space, envs.single_action_space.low, envs.single_action_space.high
    args.compile = args.compile and can_compile(device)
    agent = Agent(obs_space.shape[0], low.shape[0], args).to(device)
    folder, checkpoint = Path("runs", args.run_name), load_checkpoint(args, agent)
    state = dict(iteration=0, wandb_id=secrets.token_hex(4), returns=[], points=[])
    if checkpoint:
        state = checkpoint["state"]
        torch.set_rng_state(checkpoint["rng"])
    if state["iteration"] >= K and (folder / "finished").exists():
        print(f"{folder} is finished: it has made its {state['iteration'] * T * N} steps.")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
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
    observations, next_observations = np.zeros((2, T, N, *obs_space.shape), obs_space.dtype)
    actions = np.zeros((T, N, *low.shape), np.float32)
    rewards, past_returns = np.zeros((2, T, N))
    terminated, truncated = np.zeros((2, T, N), bool)
    episode_return, episode_length, past_return = np.zeros((3, N))
    first = last_save = state["iteration"]
    obs, _ = envs.reset(seed=int(np.random.SeedSequence([args.seed, first]).generate_state(1)[0]))
    bar = tqdm(total=K * T * N, initial=first * T * N, unit=" steps", mininterval=0.5 if sys.stderr.isatty() else 60)
    start = time.time()
    for k in range(first, K):
        # Roll out pi_k. Values and log-probabilities follow in one batch: one by one they would cost more than MuJoCo.
        mean_action, noise = agent.actor(), agent.noise(T, N)
        for t in range(T):
            observations[t] = obs
            actions[t] = action = mean_action(obs) + noise[t]
            obs, rewards[t], terminated[t], truncated[t], _ = envs.step(action.clip(low, high))
            next_observations[t] = obs
            episode_return += rewards[t]
            episode_length += 1
            past_returns[t] = past_return = args.gamma * past_return + rewards[t]
            done = terminated[t] | truncated[t]
            if done.any():
                for i in np.flatnonzero(done).tolist():
                    total, length = episode_return[i], episode_length[i]
                    log((k * T + t) * N + i + 1, {"charts/episodic_return": total, "charts/episodic_length": length})
                    state["returns"] = [*state["returns"][-99:], float(total)]
                obs, _ = envs.reset(options={"reset_mask": done})
                episode_return[done] = episode_length[done] = past_return[done] = 0
        step = (k + 1) * T * N
        check_finite(step, observations=next_observations, rewards=rewards)

        # The batch: what pi_k saw and did, and its advantages and returns.
        def flat(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array.reshape(T * N, *array.shape[2:]), device=device)

        scale = 1.0
        if args.norm_reward:
            agent.return_moments.update(flat(past_returns))
            scale = (agent.return_moments.var.item() + 1e-8) ** 0.5
        with torch.no_grad():
            batch = dict(obs=agent.normalize(flat(observations)), actions=flat(actions))
            batch["means"], log_std = agent.policy(batch["obs"])
            batch["log_std"] = log_std.clone()  # a view of what the update will change
            batch["log_probs"] = gaussian_log_prob(batch["actions"], batch["means"], log_std)
            both = torch.cat([batch["obs"], agent.normalize(flat(next_observations))])
            values, next_values = agent.critic(both)[0].view(2, T, N).cpu().numpy().astype(np.float64)
        scaled, done = np.clip(rewards / scale, -10, 10) if args.norm_reward else rewards, terminated | truncated
        advantages = gae(scaled, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        standardized = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for key, array in dict(advantages=standardized, values=values, returns=advantages + values).items():
            batch[key] = flat(array).float()

        # The update: first the policy, then the critic.
        learning_rate = args.learning_rate * (1 - k / K if args.anneal_lr else 1)
        agent.set_learning_rate(learning_rate)
        point = update_policy(agent, batch, args, k / K) | update_critic(agent, batch, args)
        with torch.no_grad():
            mean, log_std = agent.policy(batch["obs"])
            point["losses/kl"] = gaussian_kl(mean, log_std, batch["means"], batch["log_std"]).mean().item()
            point["losses/entropy"] = gaussian_entropy(log_std).item()
        check_finite(step, **point, policy=agent.policy.flat, critic=agent.critic.flat)
        if args.norm_obs:  # only now, so that pi_k acts and is updated on the same inputs
            agent.obs_moments.update(flat(observations))
        point["losses/explained_variance"] = explained_variance(values, advantages + values)
        point["charts/learning_rate"] = learning_rate
        point["charts/SPS"] = (k + 1 - first) * T * N / (time.time() - start)
        log(step, point)
        bar.set_postfix({"return": f"{np.mean(state['returns'] or [np.nan]):.0f}"}, refresh=False)
        bar.update(T * N)
        state["iteration"] = k + 1
        if stop or k + 1 == K or (k + 1 - last_save) * T * N >= args.checkpoint_interval:
            save()
            last_save = k + 1
            if stop:
                break
    bar.close()
    envs.close()
    status = 128 + stop[0] if state["iteration"] < K else 0
    try:
        run.finish(exit_code=status)
    except ConnectionError:
        status = 128 + signal.SIGTERM  # also at the end of training: what W&B missed, a resume logs again
    if status == 0:
        (folder / "finished").write_text(f"{args.total_timesteps}\n")  # benchmark.sh skips runs that say so
    else:
        print(f"stopped after {state['iteration'] * T * N} steps: go on with --run-name {args.run_name} --resume")
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
