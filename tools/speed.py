"""Training speed of the scripts beside the bare environment and the peers, in steps per second on one thread.

    python tools/speed.py                        # on-policy, HalfCheetah-v4
    python tools/speed.py --off-policy Hopper-v4
    python tools/speed.py --against OLD          # the scripts beside their versions in the checkout OLD
    python tools/speed.py --blas libopenblas.so.0   # with another BLAS (LD_PRELOAD) beside torch's own

All contenders run in turns, once per round, so that a slow minute of the machine hits them all; a figure is the median
of the rounds. Whole training is timed, W&B offline, after a warm-up that includes compilation. Only the ratios carry
over to other machines. SBX (`pip install sbx-rl`) and RLtools (`pip install rltools mkl mkl-include`) take part where
they are installed.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["WANDB_SILENT"] = "true"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import gymnasium as gym
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
Contenders = dict[str, Callable[[], float]]


def bare_environment(env_id: str, steps: int = 20_000) -> float:
    env = gym.make(env_id)
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, *env.action_space.shape)).astype(np.float32)
    start = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return steps / (time.perf_counter() - start)


def our_script(path: Path, env_id: str, warm_up: int, steps: int, *flags: str) -> float:
    """A whole run, timed from the end of the warm-up by the updates of its progress bar."""
    name = f"{path.stem}_{abs(hash(path))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    script, times = sys.modules[name], {}

    class Clock(script.tqdm):
        def update(self, n: int = 1) -> None:
            times[self.n + n] = time.perf_counter()
            super().update(n)

    original, script.tqdm = script.tqdm, Clock
    arguments = ["--env-id", env_id, "--total-timesteps", str(warm_up + steps), "--no-cuda", *flags]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        script.main([*arguments, "--run-name", f"speed-{time.time_ns()}"])
    script.tqdm = original
    return steps / (times[warm_up + steps] - times[warm_up])


def peer(algorithm, env_id: str, warm_up: int, steps: int, **settings) -> float:
    model = algorithm("MlpPolicy", env_id, **settings)
    model.learn(warm_up)
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return steps / (time.perf_counter() - start)


def rltools_in_this_process(env_id: str, size: int, warm_up: int, steps: int) -> float:
    from rltools import SAC

    sizes = dict(ACTOR_BATCH_SIZE=size, CRITIC_BATCH_SIZE=size, ACTOR_HIDDEN_DIM=size, CRITIC_HIDDEN_DIM=size)
    settings = dict(ALPHA=0.2, ADAPTIVE_ALPHA=False, OPTIMIZER_ALPHA=3e-4, N_WARMUP_STEPS=500, EPISODE_STEP_LIMIT=1000)
    make = lambda: gym.wrappers.RescaleAction(gym.make(env_id), -1, 1)  # noqa: E731
    name = f"{env_id.split('-')[0].lower()}{size}"
    module = SAC(make, enable_evaluation=False, interface_name=name, STEP_LIMIT=warm_up + steps, **sizes, **settings)
    state = module.State(1)
    for _ in range(warm_up):
        state.step()
    start = time.perf_counter()
    for _ in range(steps):
        state.step()
    return steps / (time.perf_counter() - start)


def rltools(*arguments: str | int) -> float:
    """In its own process, since its MKL must not meet torch's."""
    command = [sys.executable, __file__, "--rltools", *map(str, arguments)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def on_policy(env_id: str) -> tuple[Contenders, list[str]]:
    """Ours and stable-baselines3's with their defaults: one environment, 2048 steps, two layers of 64."""
    from sb3_contrib import TRPO
    from stable_baselines3 import PPO

    contenders = {
        "bare environment": partial(bare_environment, env_id),
        "stable-baselines3 PPO": partial(peer, PPO, env_id, 2048, 4 * 2048, device="cpu"),
        "sb3-contrib TRPO": partial(peer, TRPO, env_id, 2048, 4 * 2048, device="cpu"),
    }
    references = list(contenders)
    for name in ("mdpo_onpolicy", "trpo", "ppo"):
        for flags in ((), ("--compile",)):
            run = partial(our_script, ROOT / f"{name}.py", env_id, 2 * 2048, 8 * 2048, *flags)
            contenders[" ".join((name, *flags))] = run
    return contenders, references


def off_policy(env_id: str) -> tuple[Contenders, list[str]]:
    """Both presets, beside SAC of the same size with the same fixed entropy coefficient."""
    from stable_baselines3 import SAC

    peers = {"stable-baselines3 SAC": partial(SAC, device="cpu")}
    with contextlib.suppress(ImportError):
        from sbx import SAC as SBX

        peers["SBX SAC"] = SBX
    contenders = {"bare environment": partial(bare_environment, env_id)}
    for preset, size, steps in (("minimal", 64, 2000), ("loaded", 256, 1000)):
        settings = dict(batch_size=size, ent_coef=0.2, learning_starts=500, policy_kwargs=dict(net_arch=[size, size]))
        for name, algorithm in peers.items():
            contenders[f"{name}, {size}"] = partial(peer, algorithm, env_id, 1000, steps, **settings)
        if importlib.util.find_spec("rltools"):
            contenders[f"RLtools SAC, {size}"] = partial(rltools, env_id, size, 1000, steps)
        for name in ("mdpo_offpolicy", "mdpo_tsallis", "sac"):
            for compiled in ((), ("--compile",)):
                flags = ("--preset", preset, "--learning-starts", "500", *compiled)
                run = partial(our_script, ROOT / f"{name}.py", env_id, 1000, steps, *flags)
                contenders[f"{' '.join((name, *compiled))}, {size}"] = run
    return contenders, [name for name in contenders if "SAC" in name]


def against(old: Path, env_id: str) -> tuple[Contenders, list[str]]:
    """Each script and its old version, on the same work."""
    rows = [(name, 2 * 2048, 8 * 2048, ()) for name in ("mdpo_onpolicy", "trpo", "ppo")]
    rows += [("ppo", 2 * 2048, 8 * 2048, ("--compile",))]
    minimal, loaded = (("--preset", preset, "--learning-starts", "500") for preset in ("minimal", "loaded"))
    rows += [("mdpo_offpolicy", 1000, 2000, minimal), ("sac", 1000, 4000, (*minimal, "--compile"))]
    rows += [("mdpo_offpolicy", 1000, 1000, (*loaded, "--compile"))]
    contenders = {}
    for name, warm_up, steps, flags in rows:
        for label, folder in (("old ", old), ("", ROOT)):
            run = partial(our_script, folder.resolve() / f"{name}.py", env_id, warm_up, steps, *flags)
            contenders[f"{label}{' '.join((name, *flags))}"] = run
    return contenders, []


def with_blas(library: str, name: str, *arguments: str) -> float:
    """A contender in its own process, in which the functions of `library` replace those of torch's MKL."""
    command = [sys.executable, __file__, *arguments, "--rounds", "1", "--only", f"^{re.escape(name)}$"]
    environment = os.environ | {"LD_PRELOAD": library}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(process.stdout.splitlines()[-1].split("|")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["HalfCheetah-v4"], help="default: HalfCheetah-v4")
    parser.add_argument("--off-policy", action="store_true", help="the off-policy scripts, not the on-policy ones")
    parser.add_argument("--against", type=Path, help="a checkout of an older version to compare with")
    parser.add_argument("--blas", help="a BLAS library to compare with torch's own, for example OpenBLAS")
    parser.add_argument("--only", default="", help="a regular expression: the contenders to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rltools", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.against and options.blas:
        parser.error("--against and --blas do not go together")
    warnings.filterwarnings("ignore")
    if options.rltools:
        return print(rltools_in_this_process(options.rltools[0], *map(int, options.rltools[1:])))
    before = "MKL:" if options.blas else "old"
    for env_id in options.tasks:
        if options.against:
            contenders, references = against(options.against, env_id)
        else:
            contenders, references = (off_policy if options.off_policy else on_policy)(env_id)
        contenders = {name: run for name, run in contenders.items() if re.search(options.only, name)}
        references = [name for name in references if name in contenders]
        if options.blas:
            flags, references = [env_id, *["--off-policy"] * options.off_policy], []
            for name in list(contenders):
                contenders[f"{before} {name}"] = contenders.pop(name)
                contenders[name] = partial(with_blas, options.blas, name, *flags)
        speeds = {name: [] for name in contenders}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for _ in range(options.rounds):
                for name, run in contenders.items():
                    speeds[name].append(run())
        median = {name: statistics.median(values) for name, values in speeds.items()}
        columns = references or [before.strip(":")]
        print(f"\n{env_id}: steps/s, median and range of {options.rounds} rounds, and the ratio to\n")
        print("| | steps/s | range | " + " | ".join(columns) + " |\n|---|---|---|" + "---|" * len(columns))
        for name, value in median.items():
            others = [median[reference] for reference in references] or [median.get(f"{before} {name}")]
            ratios = " | ".join(f"{value / other:.2f}" if other else "" for other in others)
            print(f"| {name} | {value:.0f} | {min(speeds[name]):.0f} to {max(speeds[name]):.0f} | {ratios} |")


if __name__ == "__main__":
    main()
