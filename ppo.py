# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.1", "mujoco>=3.2", "numpy>=2", "tyro>=1", "wandb>=0.31", "tqdm"]
# ///
"""Proximal Policy Optimization (PPO; Schulman, Wolski, Dhariwal, Radford & Klimov, 2017) in one file.

    python ppo.py --env-id Hopper-v4

PPO, like MDPO, takes gradient steps on samples from pi_k and differs in how it stays near pi_k. MDPO subtracts
(1 / t_k) KL(pi_theta || pi_k). PPO clips the ratio r = pi_theta(a|s) / pi_k(a|s) and maximizes (the MDPO paper's Eq. 9)

    mean[ min( r A_k, clip(r, 1 - eps, 1 + eps) A_k ) ].

Once r has moved by more than eps in the direction that A_k favors, the sample's gradient is zero. Other samples still
move the network, so the clip discourages large ratios but does not prevent them. The second objective of the PPO
paper, KL-PPO, has a penalty instead (--objective kl-fixed, or kl-adaptive with a coefficient that tracks --target-kl):

    mean[ r A_k ] - beta mean[ KL(pi_k || pi_theta) ].

KL-PPO differs from MDPO in three ways: minibatches, the schedule of beta, and the direction of the KL. Without them it
is mdpo_onpolicy.py bit for bit: --objective kl-annealed --kl-direction new-old --minibatch-size 2048 (the whole batch)
--update-epochs 10 (MDPO's m) --critic-epochs 5 --critic-minibatch-size 128 --no-anneal-lr.

- Policy and critic share no parameters, so each has its own loop over shuffled minibatches.
- As in MDPO, advantages are normalized over the batch and the norm of the policy gradient is clipped at 0.5.
- As in mdpo_onpolicy.py, truncated episodes and the batch's end bootstrap from the value of their last observation.

`diff ppo.py mdpo_onpolicy.py` shows how the algorithms differ.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
import wandb
from filelock import FileLock  # torch installs it
from gymnasium.wrappers.utils import RunningMeanStd
from torch import Tensor, nn
from torch.distributions import Normal
from tqdm import tqdm


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # any Gymnasium task with flat Box observations and Box actions
    seed: int = 1  # seeds the networks, exploration noise, minibatches and environments
    total_timesteps: int = 1_000_000  # environment steps, rounded down to K iterations of num_steps * num_envs
    preset: Literal["loaded-gae", "loaded", "minimal"] = "loaded-gae"  # the paper's variants; explicit flags win
    cuda: bool = True  # use the GPU if there is one
    compile: bool = False  # torch.compile losses and gradients; the first call takes about 30 seconds
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # offline needs no account; `wandb sync` uploads
    wandb_project: str = "mdpo"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    wandb_group: str | None = None  # W&B group; default: {exp_name}__{preset}__{env_id}
    run_name: str = ""  # the run's folder in RUNS_DIR; default: {env_id}__{exp_name}__{seed}__{unix time}
    runs_dir: str = "runs"  # folder that holds all runs
    checkpoint_interval: int = 100_000  # environment steps between checkpoints
    resume: bool = False  # continue --run-name, if it has a checkpoint, with its flags; explicit flags win if not fixed
    evaluate: bool = False  # play the mean action of --run-name's checkpoint and print the returns; no training
    eval_episodes: int = 10  # episodes to play with --evaluate
    capture_video: bool = False  # evaluate, and record the first episode in RUNS_DIR/RUN_NAME/videos
    exp_name: tyro.conf.Fixed[str] = Path(__file__).stem  # name of the algorithm in logs

    num_envs: int = 1  # N, environments, stepped one after another
    num_steps: int = 2048  # T, steps per environment per iteration (M in Algorithm 1)
    gamma: float = 0.99  # γ, discount
    gae_lambda: float = 0.95  # λ of generalized advantage estimation (loaded, minimal: 1)
    learning_rate: float = 3e-4  # η, Adam's learning rate for the policy
    critic_learning_rate: float = 3e-4  # Adam's learning rate for the critic
    anneal_lr: bool = True  # anneal both learning rates linearly to 0 (minimal: off)
    norm_obs: bool = True  # normalize observations with running statistics (minimal: off)
    norm_reward: bool = True  # divide rewards by the running std of the discounted return (minimal: off)
    orthogonal_init: bool = True  # orthogonal initial weights (minimal: off)
    clip_value_loss: bool = True  # PPO's value clipping, ±0.2 around the old values (minimal: off)
    critic_epochs: int = 10  # the critic's epochs per iteration
    critic_minibatch_size: int = 64  # the critic's minibatch
    objective: Literal["clip", "kl-fixed", "kl-adaptive", "kl-annealed"] = "clip"  # clipped ratio, or a KL penalty
    clip_coef: float = 0.2  # ε of --objective clip
    kl_coef: float = 1.0  # β of kl-fixed, initial β of kl-adaptive; kl-annealed divides it by t_k = 1 - k/K
    target_kl: float = 0.01  # mean KL per iteration that kl-adaptive aims at
    kl_direction: Literal["old-new", "new-old"] = "old-new"  # KL(π_k ‖ π_θ), or KL(π_θ ‖ π_k) as in MDPO
    update_epochs: int = 10  # the policy's passes over a batch
    minibatch_size: int = 64  # the policy's minibatch; no shuffle if it is the whole batch

    def __post_init__(self):  # tyro prints a ValueError as a sentence and exits with status 2
        for name, x in vars(self).items():
            sign = "nonnegative" if name in ("seed", "gae_lambda") else "positive"
            if type(x) in (int, float) and not (0 < x < np.inf or (x == 0 and sign == "nonnegative")):
                raise ValueError(f"--{name.replace('_', '-')} must be {sign} and finite, not {x}")
        if max(self.gamma, self.gae_lambda) > 1 or self.seed >= 2**32:
            raise ValueError("--gamma and --gae-lambda must be at most 1, --seed below 2**32")
        if self.run_name == ".." or self.run_name != Path(self.run_name).name or len(self.run_name) > 128:
            raise ValueError("--run-name must be one path component of at most 128 characters; see also --runs-dir")
        self.evaluate |= self.capture_video
        if (self.resume or self.evaluate) and not self.run_name:
            raise ValueError("--resume and --evaluate need a --run-name")


MINIMAL = dict(gae_lambda=1.0, norm_obs=False, norm_reward=False, orthogonal_init=False, clip_value_loss=False)
PRESETS = {"loaded-gae": {}, "loaded": dict(gae_lambda=1.0), "minimal": MINIMAL | dict(anneal_lr=False)}
FIXED = ("env_id", "seed", "preset", "num_envs", "num_steps")  # --resume cannot change these


def mlp(inputs: int, outputs: int, orthogonal_init: bool, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    if orthogonal_init:
        for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Policy(nn.Module):
    def __init__(self, obs_dim: int, action_dim: int, orthogonal_init: bool):
        super().__init__()
        self.mean = mlp(obs_dim, action_dim, orthogonal_init, last_gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(action_dim))  # state-independent

    def forward(self, obs: Tensor) -> Normal:
        return Normal(self.mean(obs), self.log_std.exp(), validate_args=False)

    def numpy_mean(self) -> Callable[[np.ndarray], np.ndarray]:
        """The mean network in numpy: several times faster than torch for a few observations."""
        w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in self.mean.parameters())
        return lambda obs: np.tanh(np.tanh(obs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3


def normalize(obs: np.ndarray, moments: RunningMeanStd, norm_obs: bool) -> np.ndarray:
    if norm_obs:
        obs = ((obs - moments.mean) / np.sqrt(moments.var + 1e-8)).clip(-10, 10)
    return obs.astype(np.float32)


def gaussian_kl(p: Normal, q: Normal) -> Tensor:
    """KL(p || q) of diagonal Gaussians. torch's kl_divergence does not compile."""
    std_ratio, z = p.scale / q.scale, (p.loc - q.loc) / q.scale
    return (0.5 * (std_ratio**2 + z**2 - 1) - torch.log(std_ratio)).sum(-1)


def gae(rewards, values, next_values, terminated, done, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al., 2016). next_values: of the observations before any reset."""
    deltas = rewards + gamma * (1 - terminated) * next_values - values
    decays = gamma * gae_lambda * (1 - done)
    advantages, advantage = np.empty_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = advantage = deltas[t] + decays[t] * advantage
    return advantages


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: bool) -> Tensor:
    error = (values - returns) ** 2
    if clip:
        error = torch.maximum(error, (values.clamp(old_values - 0.2, old_values + 0.2) - returns) ** 2)
    return 0.5 * error.mean()


def critic_backward(critic: nn.Module, batch: dict[str, Tensor], rows: Tensor, clip: bool) -> Tensor:
    obs, old_values, returns = (batch[name][rows] for name in ("obs", "values", "returns"))
    loss = value_loss(critic(obs).squeeze(-1), old_values, returns, clip)
    loss.backward()
    return loss.detach()


def clip_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Minus Eq. 9."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def kl_loss(ratio: Tensor, advantages: Tensor, kl: Tensor, kl_coef: Tensor) -> Tensor:
    """Minus the objective of KL-PPO."""
    return -(ratio * advantages).mean() + kl_coef * kl.mean()


def penalty_kl(pi: Normal, pi_k: Normal, direction: str) -> Tensor:
    return gaussian_kl(pi_k, pi) if direction == "old-new" else gaussian_kl(pi, pi_k)


def policy_backward(policy: Policy, batch: dict[str, Tensor], rows: Tensor, kl_coef: Tensor, args: Args) -> Tensor:
    """Backpropagate the loss of a minibatch and return it."""
    batch = {name: batch[name][rows] for name in ("obs", "actions", "means", "std", "log_probs", "advantages")}
    pi, pi_k = policy(batch["obs"]), Normal(batch["means"], batch["std"], validate_args=False)
    ratio = torch.exp(pi.log_prob(batch["actions"]).sum(-1) - batch["log_probs"])
    if args.objective == "clip":
        loss = clip_loss(ratio, batch["advantages"], args.clip_coef)
    else:
        loss = kl_loss(ratio, batch["advantages"], penalty_kl(pi, pi_k, args.kl_direction), kl_coef)
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5, foreach=False)  # foreach would not fuse under --compile
    return loss.detach()


def train(args: Args) -> int:
    """Returns the exit status: 0, or 128 + the signal that stopped training."""
    T, N, K = args.num_steps, args.num_envs, args.total_timesteps // (args.num_steps * args.num_envs)
    envs = [make_env(args.env_id) for _ in range(N)]
    obs_dim, low, high = envs[0].observation_space.shape[0], envs[0].action_space.low, envs[0].action_space.high
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 1)  # 1 is fastest
    torch.manual_seed(args.seed)
    policy = Policy(obs_dim, len(low), args.orthogonal_init).to(device)
    critic = mlp(obs_dim, 1, args.orthogonal_init, last_gain=1.0).to(device)
    obs_moments, return_moments = RunningMoments(shape=obs_dim), RunningMoments()
    policy_optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5, fused=True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), eps=1e-5, fused=True)
    improve, fit = policy_backward, critic_backward
    if args.compile:  # cpp_wrapper: kernels are launched from C++ instead of Python
        torch._dynamo.config.trace_autograd_ops = True  # loss and gradient in one graph
        improve, fit = (torch.compile(f, fullgraph=True, options={"cpp_wrapper": True}) for f in (improve, fit))
    parts = dict(policy=policy, critic=critic, policy_optimizer=policy_optimizer, critic_optimizer=critic_optimizer)
    kl_coef = torch.tensor(args.kl_coef, device=device)
    parts["kl_coef"] = nn.ParameterDict(dict(kl_coef=kl_coef))  # saves kl_coef, whose memory it shares
    run = Run(args, parts | dict(obs_moments=obs_moments, return_moments=return_moments), total=K * T * N)

    def flat(array: np.ndarray) -> Tensor:  # (T, N, ...) to (N * T, ...): trpo.py's every fifth sample covers all envs
        return torch.as_tensor(array, device=device).transpose(0, 1).flatten(0, 1)

    observations, next_observations = np.zeros((2, T, N, obs_dim))
    actions, return_so_far = np.zeros((T, N, len(low)), np.float32), np.zeros(N)
    rewards, discounted_returns = np.zeros((2, T, N))  # R_t = gamma R_{t-1} + r_t per episode, for --norm-reward
    terminated, truncated = np.zeros((2, T, N), bool)
    seeds = np.random.SeedSequence([args.seed, run.step]).generate_state(N)
    obs = np.stack([env.reset(seed=int(seed))[0] for env, seed in zip(envs, seeds, strict=True)])
    for k in range(run.step // (T * N), K):
        # Roll out pi_k. Values and log-probabilities are computed afterwards, in one batch.
        mean_action = policy.numpy_mean()
        noise = (torch.randn(T, N, len(low)) * policy.log_std.detach().cpu().exp()).numpy()
        for t in range(T):
            observations[t] = obs
            actions[t] = mean_action(normalize(obs, obs_moments, args.norm_obs)) + noise[t]
            for i, env in enumerate(envs):
                obs[i], rewards[t, i], terminated[t, i], truncated[t, i], info = env.step(actions[t, i].clip(low, high))
                next_observations[t, i] = obs[i]
                discounted_returns[t, i] = return_so_far[i] = args.gamma * return_so_far[i] + rewards[t, i]
                step = (k * T + t) * N + i + 1
                if episode := info.get("episode"):
                    run.log(step, {"charts/episodic_return": episode["r"], "charts/episodic_length": episode["l"]})
                    obs[i], return_so_far[i] = env.reset()[0], 0
        done = terminated | truncated
        check_finite(step, observations=next_observations, rewards=rewards)

        # Advantages and returns of the batch, under pi_k and the old critic.
        scaled_rewards = rewards
        if args.norm_reward:
            return_moments.update(discounted_returns.ravel())
            scaled_rewards = np.clip(rewards / np.sqrt(return_moments.var + 1e-8), -10, 10)
        with torch.no_grad():
            inputs = normalize(np.stack([observations, next_observations]), obs_moments, args.norm_obs)
            batch = dict(obs=flat(inputs[0]), actions=flat(actions))
            pi_k = policy(batch["obs"])
            batch |= dict(means=pi_k.loc, std=pi_k.scale, log_probs=pi_k.log_prob(batch["actions"]).sum(-1))
            values, next_values = (critic(flat(x)).view(N, T).T.cpu().double().numpy() for x in inputs)
        advantages = gae(scaled_rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        batch["advantages"] = flat((advantages - advantages.mean()) / (advantages.std() + 1e-8)).float()
        batch["values"], batch["returns"] = flat(values).float(), flat(advantages + values).float()

        # Policy improvement: passes over shuffled minibatches.
        anneal = 1 - k / K if args.anneal_lr else 1
        policy_optimizer.param_groups[0]["lr"] = args.learning_rate * anneal
        if args.objective != "kl-adaptive":
            kl_coef.fill_(args.kl_coef / (1 - k / K if args.objective == "kl-annealed" else 1))
        for _ in range(args.update_epochs):
            order = torch.randperm(T * N) if args.minibatch_size < T * N else torch.arange(T * N)
            for rows in order.to(device).split(args.minibatch_size):
                policy_loss = improve(policy, batch, rows, kl_coef, args)
                policy_optimizer.step()
                policy_optimizer.zero_grad()

        # Policy evaluation: fit the critic on shuffled minibatches.
        critic_optimizer.param_groups[0]["lr"] = args.critic_learning_rate * anneal
        for _ in range(args.critic_epochs):
            for rows in torch.randperm(T * N).to(device).split(args.critic_minibatch_size):
                v_loss = fit(critic, batch, rows, args.clip_value_loss)
                critic_optimizer.step()
                critic_optimizer.zero_grad()
        with torch.no_grad():
            pi = policy(batch["obs"])
        if args.norm_obs:  # after the update, so that pi_k acts and learns on the same inputs
            obs_moments.update(observations.reshape(T * N, obs_dim))
        metrics = {"losses/policy_loss": policy_loss, "charts/kl_coef": kl_coef.item()}
        if args.objective == "kl-adaptive":  # double or halve beta for the next iteration
            kl = penalty_kl(pi, pi_k, args.kl_direction).mean()
            kl_coef.mul_(2 if kl > 1.5 * args.target_kl else 0.5 if kl < args.target_kl / 1.5 else 1).clamp_(1e-6, 1e6)
        metrics |= {"losses/kl": gaussian_kl(pi, pi_k).mean(), "losses/entropy": pi.entropy()[0].sum()}
        metrics |= {"losses/value_loss": v_loss, "charts/learning_rate": args.learning_rate * anneal}
        metrics["losses/explained_variance"] = 1 - advantages.var() / ((advantages + values).var() + 1e-8)
        metrics["charts/SPS"] = (step - run.start_step) / (time.time() - run.start_time)
        run.log(step, metrics)
        if run.checkpoint(step):
            break
    return run.finish()


class RunningMoments(RunningMeanStd):  # Gymnasium's mean and variance of all samples, with a state for the checkpoint
    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = (state[name].numpy() for name in ("mean", "var", "count"))


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
    return env


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
    if args.total_timesteps < args.num_steps * args.num_envs:
        fail(f"--total-timesteps must be at least one iteration, {args.num_steps * args.num_envs} steps")
    args.run_name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.0f}".replace("/", "-")
    return args


def evaluate(args: Args) -> int:
    if args.capture_video and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # headless rendering
    env = make_env(args.env_id, Path(args.runs_dir, args.run_name, "videos") if args.capture_video else None)
    low, high, returns = env.action_space.low, env.action_space.high, []
    policy, obs_moments = Policy(env.observation_space.shape[0], len(low), args.orthogonal_init), RunningMoments()
    load_checkpoint(args, dict(policy=policy, obs_moments=obs_moments))
    mean_action = policy.numpy_mean()
    for number in range(args.eval_episodes):
        obs, info = env.reset(seed=args.seed + number)
        while "episode" not in info:
            action = mean_action(normalize(obs, obs_moments, args.norm_obs))
            obs, _, _, _, info = env.step(action.clip(low, high))
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
