# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.1", "mujoco>=3.2", "numpy>=2", "tyro>=1", "wandb>=0.31", "tqdm"]
# ///
"""Off-policy Mirror Descent Policy Optimization (MDPO; Tomar, Shani, Efroni & Ghavamzadeh, 2020) in one file.

    python mdpo_offpolicy.py --env-id Hopper-v4

Mirror descent repeatedly maximizes a linearization of the objective minus 1 / t_k times a Bregman divergence to the
current point (Eq. 1). Off-policy, states come from a replay buffer D, and the next policy is (Eq. 10)

    theta_{k+1} = argmax_theta  E_{s ~ D} [ E_{a ~ pi_theta} A_k(s, a) - (1 / t_k) KL(pi_theta || pi_k) ].

V(s) does not depend on theta, so Q_k can replace A_k. With reparameterized actions this minimizes the mean of
log pi_theta - log pi_k - t_k Q_k (Eq. 11). In a soft MDP, where the reward includes lambda times the entropy, V fits
min(Q1, Q2) - lambda log pi, and linearizing the entropy at pi_k adds lambda t_k log pi_k to the loss. Multiplied by
1 / t_k, the paper's "Bregman stepsize", a constant for each task, the loss is

    mean[ (1 / t_k) log pi_theta(a) - (1 / t_k - lambda) log pi_k(a) - Q(s, a) ].

At 1 / t_k = lambda the old policy cancels and SAC remains (Eq. 14). `diff sac.py mdpo_offpolicy.py` shows what differs.

- pi_k is a copy of the policy, refreshed every --old-policy-interval = m updates. --gradient-steps m with
  --old-policy-interval m is Algorithm 2, except that each step draws its own batch and updates the critics too: Q is
  that of the current policy, not of pi_k.
- Q fits r + gamma V', with V' a Polyak average of V. The critics step first, so V fits the policy before its step (in
  Algorithm 2, after it), and the policy then ascends the new Q.
- Unlike the authors' code, we use min(Q1, Q2) in the policy loss, sample actions, and do not penalize mean and log std.
- Actions are in [-1, 1] and rescaled by a wrapper, so the entropy does not depend on a task's action bounds.
- Beyond the paper: values bootstrap at time limits, the first --learning-starts actions are uniformly random, and the
  policy's last layer starts small: pi_0 is nearly uniform.
"""

import copy
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from filelock import FileLock  # torch installs it
from torch import Tensor, nn
from tqdm import tqdm


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # any Gymnasium task with flat Box observations and bounded Box actions
    seed: int = 1  # seeds the networks, exploration noise, minibatches and environments
    total_timesteps: int = 1_000_000  # K, environment steps
    preset: Literal["loaded", "minimal"] = "loaded"  # the paper's variants; explicit flags win
    cuda: bool = True  # use the GPU if there is one
    compile: bool = False  # torch.compile the update; the first call takes about 30 seconds
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline needs no account; `wandb sync` uploads
    wandb_project: str = "mdpo"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    wandb_group: str | None = None  # W&B group; default: {exp_name}__{preset}__{env_id}
    run_name: str = ""  # the run's folder in RUNS_DIR; default: {env_id}__{exp_name}__{seed}__{unix time}
    runs_dir: str = "runs"  # folder that holds all runs
    checkpoint_interval: int = 25_000  # environment steps between checkpoints, at most 25,000
    resume: bool = False  # continue --run-name, if it has a checkpoint, with its flags; explicit flags win if not fixed
    evaluate: bool = False  # play the mean action of --run-name's checkpoint and print the returns; no training
    eval_episodes: int = 10  # episodes to play with --evaluate
    capture_video: bool = False  # evaluate, and record the first episode in RUNS_DIR/RUN_NAME/videos
    exp_name: tyro.conf.Fixed[str] = Path(__file__).stem  # name of the algorithm in logs

    learning_rate: float = 3e-4  # η, Adam's learning rate for all networks
    gamma: float = 0.99  # γ, discount
    tau: float = 0.005  # τ, rate of the Polyak average of V
    entropy_coef: float = 0.2  # λ, weight of the entropy in the soft MDP; 0 is the hard MDP
    hidden_size: int = 256  # units per hidden layer (minimal: 64)
    batch_size: int = 256  # N, transitions per update (minimal: 64)
    buffer_size: int = 1_000_000  # transitions in the replay buffer, a file that grows as it fills
    learning_starts: int = 10_000  # steps with uniformly random actions before the first update
    gradient_steps: int = 1  # updates per environment step, each with its own batch
    old_policy_interval: int = 1000  # m, updates between refreshes of π_k
    bregman_stepsize: float | None = None  # 1/t_k; default: the paper's value for the task, 0.5 for other tasks

    def __post_init__(self):  # tyro prints a ValueError as a sentence and exits with status 2
        for name, x in vars(self).items():
            sign = "nonnegative" if name in ("seed", "entropy_coef") else "positive"
            if type(x) in (int, float) and not (0 < x < np.inf or (x == 0 and sign == "nonnegative")):
                raise ValueError(f"--{name.replace('_', '-')} must be {sign} and finite, not {x}")
        if max(self.gamma, self.tau) > 1 or self.checkpoint_interval > HEADROOM or self.seed >= 2**32:
            raise ValueError("--gamma and --tau must be at most 1, --checkpoint-interval 25,000, --seed below 2**32")
        if self.run_name == ".." or self.run_name != Path(self.run_name).name or len(self.run_name) > 128:
            raise ValueError("--run-name must be one path component of at most 128 characters; see also --runs-dir")
        self.evaluate |= self.capture_video
        if (self.resume or self.evaluate) and not self.run_name:
            raise ValueError("--resume and --evaluate need a --run-name")


HEADROOM = 25_000  # extra rows of the replay file, and the most steps between checkpoints
PRESETS = {"loaded": {}, "minimal": dict(hidden_size=64, batch_size=64)}
FIXED = ("env_id", "seed", "preset", "hidden_size", "buffer_size")  # --resume cannot change these
BREGMAN_STEPSIZE = dict(Hopper=0.8, Walker2d=0.4, HalfCheetah=0.3, Ant=0.5, Humanoid=0.5, HumanoidStandup=0.3)


def mlp(inputs: int, size: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, outputs))


class Adam(nn.Module):
    """Adam (Kingma & Ba, 2015). torch.compile fuses it with the loss, unlike torch.optim: updates are twice as fast."""

    def __init__(self, params: list[nn.Parameter]):
        super().__init__()
        self.params, self.sizes = params, [p.numel() for p in params]
        self.mean, self.square, self.count = (nn.Buffer(torch.zeros(n)) for n in (sum(self.sizes), sum(self.sizes), ()))

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], learning_rate: float) -> None:
        gradient = torch.cat([g.flatten() for g in gradients])  # one flat vector: fewer kernels
        self.count.add_(1)
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient**2, 0.001)
        mean, square = self.mean / (1 - 0.9**self.count), self.square / (1 - 0.999**self.count)
        steps = learning_rate * mean / (square.sqrt() + 1e-8)
        for p, step in zip(self.params, steps.split(self.sizes), strict=True):
            p.sub_(step.view_as(p))


class Agent(nn.Module):
    def __init__(self, obs_dim: int, action_dim: int, hidden: int):
        super().__init__()
        self.policy = mlp(obs_dim, hidden, 2 * action_dim)  # mean and log std of u, for actions tanh(u)
        self.q1, self.q2 = mlp(obs_dim + action_dim, hidden, 1), mlp(obs_dim + action_dim, hidden, 1)
        self.v = mlp(obs_dim, hidden, 1)
        for parameter in self.policy[-1].parameters():  # else large observations make pi_0 nearly deterministic
            parameter.data *= 0.01
        self.old_policy, self.target_v = copy.deepcopy(self.policy), copy.deepcopy(self.v)
        self.policy_params = list(self.policy.parameters())
        self.critic_params = [*self.q1.parameters(), *self.q2.parameters(), *self.v.parameters()]
        self.policy_optimizer, self.critic_optimizer = Adam(self.policy_params), Adam(self.critic_params)

    def min_q(self, obs: Tensor, action: Tensor) -> Tensor:
        inputs = torch.cat([obs, action], -1)
        return torch.minimum(self.q1(inputs), self.q2(inputs))  # against overestimation (Fujimoto et al., 2018)


def act(params: list[nn.Parameter], obs: np.ndarray, noise: np.ndarray | float = 0.0) -> np.ndarray:
    """The policy in numpy, which is faster than torch for one observation. Without noise it is the mean action."""
    w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in params)
    x = np.maximum(obs.astype(np.float32) @ w1.T + b1, 0)
    mean, log_std = np.split(np.maximum(x @ w2.T + b2, 0) @ w3.T + b3, 2)
    return np.tanh(mean + np.exp(log_std.clip(-20, 2)) * noise)


def mean_and_log_std(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = outputs.chunk(2, -1)
    return mean, log_std.clamp(-20, 2)


def log_density(z: Tensor, log_std: Tensor, u: Tensor) -> Tensor:
    """Log-density of tanh(u) per dimension, u = mean + std z. The softplus form is accurate where tanh saturates."""
    log_det_tanh = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi) - log_det_tanh


def mdpo_loss(log_prob: Tensor, old_log_prob: Tensor, q: Tensor, inverse_t: float, entropy_coef: float) -> Tensor:
    """Eq. 11 for a soft MDP, times 1 / t_k. Not factored, so that mdpo_tsallis.py at q = 1 equals it bit for bit."""
    return (inverse_t * log_prob - (inverse_t * old_log_prob - entropy_coef * old_log_prob) - q).mean()


def update(agent: Agent, batch: Tensor, noise: Tensor, args: Args) -> dict[str, Tensor]:
    """One gradient step on both Q networks and V, then one on the policy (Algorithm 2, lines 12 and 8)."""
    obs_dim, action_dim = agent.policy[0].in_features, noise.shape[-1]
    obs, action, next_obs, reward, terminated = batch.split([obs_dim, action_dim, obs_dim, 1, 1], -1)
    mean, log_std = mean_and_log_std(agent.policy(obs))
    u = mean + torch.exp(log_std) * noise
    log_prob = log_density(noise, log_std, u).sum(-1, keepdim=True)

    # Policy evaluation.
    with torch.no_grad():
        v_target = agent.min_q(obs, torch.tanh(u)) - args.entropy_coef * log_prob
        q_target = reward + args.gamma * (1 - terminated) * agent.target_v(next_obs)
    q1, q2 = (q(torch.cat([obs, action], -1)) for q in (agent.q1, agent.q2))
    qf1_loss, qf2_loss = 0.5 * F.mse_loss(q1, q_target), 0.5 * F.mse_loss(q2, q_target)
    vf_loss = 0.5 * F.mse_loss(agent.v(obs), v_target)
    critic_gradients = torch.autograd.grad(qf1_loss + qf2_loss + vf_loss, agent.critic_params)
    agent.critic_optimizer.step(critic_gradients, args.learning_rate)

    # Policy improvement.
    old_mean, old_log_std = mean_and_log_std(agent.old_policy(obs))
    old_log_prob = log_density((u - old_mean) * torch.exp(-old_log_std), old_log_std, u).sum(-1, keepdim=True)
    q = agent.min_q(obs, torch.tanh(u))
    actor_loss = mdpo_loss(log_prob, old_log_prob, q, args.bregman_stepsize, args.entropy_coef)
    policy_gradients = torch.autograd.grad(actor_loss, agent.policy_params)
    agent.policy_optimizer.step(policy_gradients, args.learning_rate)

    with torch.no_grad():
        for target, parameter in zip(agent.target_v.parameters(), agent.v.parameters(), strict=True):
            target.lerp_(parameter, args.tau)
    metrics = dict(actor_loss=actor_loss, qf1_loss=qf1_loss, qf2_loss=qf2_loss, vf_loss=vf_loss, qf1_values=q1.mean())
    metrics |= dict(entropy=-log_prob.mean(), kl_to_old=(log_prob - old_log_prob).mean())
    return {f"losses/{name}": value.detach() for name, value in metrics.items()}


def train(args: Args) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped training."""
    env = make_env(args.env_id)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 1)  # 1 is fastest
    torch.set_flush_denormal(True)  # dead units' Adam means decay to denormals, which are slow on CPUs
    torch.manual_seed(args.seed)
    agent = Agent(obs_dim, action_dim, args.hidden_size).to(device)
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # losses, gradients and steps in one graph
    learn = torch.compile(update, fullgraph=True, options={"cpp_wrapper": True}) if args.compile else update
    width, folder = 2 * obs_dim + action_dim + 2, Path(args.runs_dir, args.run_name)
    resume = args.resume and (folder / "checkpoint.pt").exists()
    buffer = ReplayBuffer(folder / "replay.bin", width, args.buffer_size, args.total_timesteps, resume)
    run = Run(args, dict(agent.named_children()), total=args.total_timesteps)  # networks and Adam
    run.parts["replay"] = buffer  # added after loading: its state_dict() only flushes the file
    metrics = {}
    obs, _ = env.reset(seed=int(np.random.SeedSequence([args.seed, run.step]).generate_state(1)[0]))
    for k in range(run.step, args.total_timesteps):
        # Act: uniformly at first, then with the policy.
        if k < args.learning_starts:
            action = 2 * torch.rand(action_dim).numpy() - 1
        else:
            action = act(agent.policy_params, obs, torch.randn(action_dim).numpy())
        next_obs, reward, terminated, _, info = env.step(action)
        step, row = k + 1, buffer.add(k, obs, action, next_obs, (reward, terminated))
        if not np.isfinite(row).all():  # the slower check names the bad field
            check_finite(step, actions=action, observations=next_obs, rewards=reward, transition=row)
        obs = next_obs
        if episode := info.get("episode"):
            run.log(step, {"charts/episodic_return": episode["r"], "charts/episodic_length": episode["l"]})
            obs, _ = env.reset()

        # Learn: each update has its own batch. pi_k is refreshed every m updates.
        for n in range(args.gradient_steps if k >= args.learning_starts else 0):
            updates = (k - args.learning_starts) * args.gradient_steps + n
            if updates % args.old_policy_interval == 0:
                agent.old_policy.load_state_dict(agent.policy.state_dict())
            batch, noise = buffer.sample(step, args.batch_size), torch.randn(args.batch_size, action_dim)
            metrics = learn(agent, batch.to(device), noise.to(device), args)
        if step % 1000 == 0:
            sps = (step - run.start_step) / (time.time() - run.start_time)
            run.log(step, metrics | {"charts/learning_rate": args.learning_rate, "charts/SPS": sps})
        if run.checkpoint(step):
            break
    return run.finish()


class ReplayBuffer:
    """The last `size` transitions, in a memory-mapped file with HEADROOM extra rows. Checkpoints are at most HEADROOM
    steps apart, so a killed run has overwritten nothing that its checkpoint can sample."""

    def __init__(self, path: Path, width: int, size: int, total: int, resume: bool):
        shape = (size + HEADROOM, width)
        if resume and (not path.exists() or path.stat().st_size != 4 * math.prod(shape)):
            fail(f"{path}, the replay buffer of the checkpoint, is missing or of another size")
        self.file, self.size = np.memmap(path, np.float32, "r+" if resume else "w+", shape=shape), size
        self.rows = np.asarray(self.file)  # faster to index than a memmap
        growth = 4 * width * min(total, len(self.rows)) - 512 * getattr(os.stat(path), "st_blocks", 0)  # it is sparse
        if growth > shutil.disk_usage(path.parent).free:
            fail(f"{path} will grow by {growth / 1e9:.1f} GB, more than the disk has left")

    def add(self, k: int, *transition: np.ndarray | tuple) -> np.ndarray:
        return np.concatenate(transition, out=self.rows[k % len(self.rows)], casting="same_kind")

    def sample(self, step: int, batch_size: int) -> Tensor:
        """Uniformly, with replacement, from the last `size` of the first `step` transitions."""
        age = torch.randint(1, min(step, self.size) + 1, (batch_size,)).numpy()
        return torch.from_numpy(self.rows[(step - age) % len(self.rows)])

    def state_dict(self) -> dict:  # the rows are in the file already
        self.file.flush()
        return {}


class Run:  # folder, checkpoints, W&B log, progress bar and signals of a training run
    def __init__(self, args: Args, parts: dict[str, Any], total: int):
        self.args, self.parts, self.total, self.folder = args, parts, total, Path(args.runs_dir, args.run_name)
        new = dict(step=0, wandb_id=os.urandom(4).hex(), points=[], rng=torch.get_rng_state())
        saved = (load_checkpoint(args, parts) if args.resume else None) or new
        self.step, self.wandb_id, self.points, self.stop = saved["step"], saved["wandb_id"], [], []  # step: last saved
        torch.set_rng_state(saved["rng"])
        (self.folder / "finished").unlink(missing_ok=True)
        (self.folder / "args.json").write_text(json.dumps(asdict(args), indent=2))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        self.wandb = wandb.init(
            project=args.wandb_project, entity=args.wandb_entity, mode=args.wandb_mode, id=self.wandb_id,
            name=args.run_name, group=args.wandb_group or f"{args.exp_name}__{args.preset}__{args.env_id}",
            job_type=args.exp_name, tags=[args.exp_name, args.preset, args.env_id[:64]], config=asdict(args),
            dir=self.folder.resolve(), resume="allow" if args.wandb_mode == "online" else None, save_code=True,
            settings=wandb.Settings(silent=True, x_transaction_log_flush_interval=1),  # write the log every second
        )  # fmt: skip
        self.start_step, self.start_time = self.step, time.time()
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", mininterval=0.5 if sys.stderr.isatty() else 60)
        for step, metrics in saved["points"]:  # a kill may have lost points that W&B had not written yet
            self.log(step, metrics)

    def on_signal(self, number: int, _) -> None:
        self.stop.append(number)  # the loop saves and stops
        signal.signal(number, signal.SIG_DFL)  # a second one kills

    def log(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {name: float(value) for name, value in metrics.items()}
        check_finite(step, **metrics)
        self.points.append((step, metrics))
        if "charts/episodic_return" in metrics:
            self.bar.set_postfix({"return": f"{metrics['charts/episodic_return']:.0f}"}, refresh=False)
        self.bar.update(max(step - self.bar.n, 0))  # points of a checkpoint are behind the bar
        try:
            self.wandb.log(metrics | {"global_step": step}, step=step)
        except ConnectionError:  # W&B's process is gone: SLURM sends SIGTERM to all processes at once
            self.stop.append(signal.SIGTERM)

    def checkpoint(self, step: int) -> bool:
        """Save if due. Returns whether a signal asked to stop."""
        if self.stop or step == self.total or step - self.step >= self.args.checkpoint_interval:
            self.step, self.points = step, self.points[-2000:]
            state = {name: part.state_dict() for name, part in self.parts.items()}
            check_finite(step, **{f"{n}.{key}": x for n in state for key, x in state[n].items() if torch.is_tensor(x)})
            state |= dict(args=asdict(self.args), step=step, wandb_id=self.wandb_id, points=self.points)
            with open(self.folder / "checkpoint.tmp", "wb") as file:
                torch.save(state | dict(rng=torch.get_rng_state()), file)
                os.fsync(file.fileno())
            os.replace(file.name, self.folder / "checkpoint.pt")  # atomic: a kill leaves the old one or the new one
            if shutil.disk_usage(self.folder).free < 2e8:
                raise OSError(f"less than 200 MB of disk space left at step {step}")
        return bool(self.stop)

    def finish(self) -> int:
        self.bar.close()
        status = 0 if self.step == self.total else 128 + self.stop[0]
        try:
            self.wandb.finish(exit_code=status)
        except Exception as error:  # many kinds, if its process is gone; --resume logs the points that it missed
            print(f"W&B did not finish: {type(error).__name__}", file=sys.stderr)
            status = 128 + signal.SIGTERM
        if status == 0:
            (self.folder / "finished").write_text(f"{self.args.total_timesteps}\n")  # benchmark.sh skips finished runs
        flags = ["--runs-dir", self.args.runs_dir, "--run-name", self.args.run_name]
        command = shlex.join(["python", f"{self.args.exp_name}.py", *flags])
        print(f"stopped at step {self.step}: {command} --resume" if status else f"finished: {command} --evaluate")
        return status


def check_finite(step: int, **named: Tensor | np.ndarray | float) -> None:
    for name, values in named.items():
        if not torch.as_tensor(values).isfinite().all():
            raise FloatingPointError(f"{name} not finite at step {step}")


def fail(message: str) -> NoReturn:
    print("error:", " ".join(message.split())[:500], file=sys.stderr)
    sys.exit(2)


def make_env(env_id: str, video_folder: Path | None = None) -> gym.Env:
    options = dict(render_mode="rgb_array") if video_folder else {}
    try:
        env = gym.make(env_id, **options)
        if video_folder:
            if "envs.mujoco" in str(env.spec.entry_point):
                env = gym.make(env_id, camera_name="track", **options)  # the camera that follows the robot
            env = gym.wrappers.RecordVideo(env, str(video_folder), episode_trigger=lambda episode: episode == 0)
        env = gym.wrappers.RecordEpisodeStatistics(env)
    except Exception as error:  # an unknown id, a missing package, or whatever a third-party task raises
        hint = " (videos need: pip install '.[video]')" if video_folder else ""
        fail(f"Gymnasium cannot make {env_id}: {error}{hint}")
    for space in (env.observation_space, env.action_space):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            fail(f"{env_id} has a space {space}; only 1-D Box spaces are supported")
    if not env.action_space.is_bounded():
        fail(f"{env_id} has actions {env.action_space}; a squashed policy needs bounded actions")
    return gym.wrappers.RescaleAction(env, -1, 1)


def load_checkpoint(args: Args, parts: dict[str, Any]) -> dict | None:
    """Load --run-name's checkpoint, if there is one, into parts. weights_only: an untrusted file cannot run code."""
    path = Path(args.runs_dir, args.run_name, "checkpoint.pt")
    if not args.run_name or not path.exists():
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["args"]["exp_name"] != args.exp_name:
            raise ValueError(f"it is a run of {checkpoint['args']['exp_name']}.py")
        Args(**checkpoint["args"])  # raises if a flag is unknown or out of range
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    except Exception as error:  # a damaged or foreign file fails in many ways
        fail(f"cannot use {path}: {type(error).__name__}, {error}")
    return checkpoint


def parse_args(argv: list[str] | None = None) -> Args:
    """Precedence: explicit flags, then those of the run to resume or evaluate, then the preset's. Hence two passes."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    folder, checkpoint = Path(args.runs_dir, args.run_name), load_checkpoint(args, {})
    defaults = PRESETS[args.preset] | dict(preset=args.preset)
    if checkpoint and (args.resume or args.evaluate):
        defaults = checkpoint["args"] | dict(runs_dir="runs", resume=False, evaluate=False, capture_video=False)
        if ":" in defaults["env_id"] and args.env_id != defaults["env_id"]:  # Gymnasium would import a module
            fail(f"{folder} asks to import a module: pass --env-id {defaults['env_id']} if you trust it")
    elif checkpoint:
        fail(f"{folder} already holds a run: add --resume to continue it, or choose another --run-name")
    elif args.evaluate:
        fail(f"no checkpoint in {folder}")
    elif args.resume:
        print(f"no checkpoint in {folder}, starting a new run")
    args = tyro.cli(Args, args=argv, default=Args(**defaults))
    if checkpoint and args.resume:
        if changed := [name for name in FIXED if getattr(args, name) != defaults[name]]:
            fail(f"{folder} has {changed[0]} {defaults[changed[0]]}, which is fixed for a run")
        if args.total_timesteps < checkpoint.get("step", 0):
            fail(f"{folder} has already trained for {checkpoint['step']} steps, more than --total-timesteps")
    if args.total_timesteps <= args.learning_starts:
        fail(f"--total-timesteps must be more than --learning-starts, {args.learning_starts} steps")
    task = args.env_id.replace(":", "/").split("/")[-1].split("-v")[0]
    args.bregman_stepsize = args.bregman_stepsize or BREGMAN_STEPSIZE.get(task, 0.5)
    args.run_name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.0f}".replace("/", "-")
    return args


def evaluate(args: Args) -> int:
    if args.capture_video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # headless rendering
    env = make_env(args.env_id, Path(args.runs_dir, args.run_name, "videos") if args.capture_video else None)
    policy = mlp(env.observation_space.shape[0], args.hidden_size, 2 * env.action_space.shape[0])
    load_checkpoint(args, dict(policy=policy))
    params, returns = list(policy.parameters()), []
    for number in range(args.eval_episodes):
        obs, info = env.reset(seed=args.seed + number)
        while "episode" not in info:
            obs, _, _, _, info = env.step(act(params, obs))
        returns.append(info["episode"]["r"])
        print(f"episode {number + 1}: return {returns[-1]:.1f} in {info['episode']['l']} steps", flush=True)
    env.close()
    print(f"mean {np.mean(returns):.1f} ± {np.std(returns):.1f} (std) over {len(returns)} episodes of {args.env_id}")
    return 0


def main(argv: list[str] | None = None) -> int:
    warnings.filterwarnings("ignore", message=".*out of date.*")  # v4 tasks are closest to the paper's v2
    args = parse_args(argv)
    if args.evaluate:
        return evaluate(args)
    make_env(args.env_id).close()  # a mistyped task leaves no folder behind
    folder = Path(args.runs_dir, args.run_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock", timeout=1).acquire()
    except OSError as error:
        fail(f"{folder} is in use by another process, or not writable: {error}")
    try:
        with lock:
            return train(args)
    except wandb.Error as error:
        fail(f"W&B cannot start: {error}")
    except torch._dynamo.exc.TorchDynamoException as error:  # no C++ compiler, no Python headers, ...
        fail(f"--compile does not work here: {str(error)[:200]}")
    except (FloatingPointError, OSError) as error:
        print(f"\nerror: {error}. The last checkpoint in {folder}, if any, is kept", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
