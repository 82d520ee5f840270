"""The command line of all six scripts: what flags mean, input that cannot work, checkpoints to read, --evaluate."""

import importlib
import json
import os
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its tasks
from conftest import ON_POLICY, ROOT, contents, finish, short

import mdpo_onpolicy
import mdpo_tsallis
import ppo
import sac

sys.path.append(str(ROOT / "tools"))
import agents


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if not name.endswith("/lock")}


@pytest.fixture
def error_of(capsys, tmp_path):
    """Run main() with flags that cannot work: exit status 2, plain sentences, no run made or changed."""

    def words(script, *flags) -> str:
        before = files(tmp_path)
        with pytest.raises(SystemExit) as stop:
            script.main([str(flag) for flag in flags])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error and "Traceback" not in error
        assert files(tmp_path) == before
        return " ".join(error.replace("│", " ").split())

    return words


# ---------------------------------------------------------------------------------------------------------- flags

TASKS = ("Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "HumanoidStandup", "Pendulum")


@pytest.mark.parametrize("preset", ["minimal", "loaded", "loaded-gae"])
def test_on_policy_presets_are_the_papers(on_policy, preset):
    args = on_policy.parse_args(["--preset", preset])
    loaded = preset != "minimal"
    assert (args.norm_obs, args.norm_reward, args.orthogonal_init, args.clip_value_loss) == (loaded,) * 4
    assert args.gae_lambda == (0.95 if preset == "loaded-gae" else 1)
    assert args.anneal_lr == (loaded and on_policy is not mdpo_onpolicy)  # MDPO: as the authors' code
    assert on_policy is not mdpo_onpolicy or args.sgd_steps == (10 if loaded else 5)


@pytest.mark.parametrize("preset", ["minimal", "loaded"])
def test_off_policy_presets_and_defaults_of_a_task_are_the_papers(off_policy, preset):
    stepsizes = (0.8, 0.4, 0.3, 0.5, 0.5, 0.3, 0.5)
    best_q = {"loaded": (1.0, 2.0, 1.0, 2.0, 1.2, 1.4, 1.5), "minimal": (1.0, 1.8, 1.4, 2.0, 1.6, 1.2, 1.5)}[preset]
    for task, stepsize, q in zip(TASKS, stepsizes, best_q, strict=True):
        args = off_policy.parse_args(["--env-id", f"{task}-v4", "--preset", preset])
        assert (args.hidden_size, args.batch_size) == ((64, 64) if preset == "minimal" else (256, 256))
        assert off_policy is sac or args.bregman_stepsize == stepsize
        assert off_policy is not mdpo_tsallis or (args.tsallis_q, args.entropy_q) == (q, None)


def test_defaults_are_the_papers(script):
    args = script.parse_args([])
    common = dict(seed=1, total_timesteps=1_000_000, gamma=0.99, env_id="Hopper-v4", wandb_mode="offline", cuda=True)
    if script.__name__ in ON_POLICY:
        common |= dict(num_steps=2048, num_envs=1, preset="loaded-gae")
    else:
        common |= dict(tau=0.005, entropy_coef=0.2, learning_rate=3e-4, preset="loaded", gradient_steps=1)
        common |= dict(buffer_size=1_000_000, learning_starts=10_000)
    own = {
        "mdpo_onpolicy": dict(learning_rate=3e-4, critic_learning_rate=3e-4, critic_epochs=5, tsallis_q=1),
        "trpo": dict(max_kl=0.01, cg_iterations=10, cg_damping=0.1, natural_steps=1, learning_rate=1e-3),
        "ppo": dict(objective="clip", clip_coef=0.2, update_epochs=10, minibatch_size=64, learning_rate=3e-4),
        "mdpo_offpolicy": dict(old_policy_interval=1000),
        "mdpo_tsallis": dict(old_policy_interval=1000, log_q="per-dimension"),
        "sac": {},
    }[script.__name__]
    assert asdict(args) | common | own == asdict(args)
    assert args.run_name.startswith(f"Hopper-v4__{script.__name__}__1__")


def test_explicit_flags_win_over_the_preset(script):
    if script.__name__ in ON_POLICY:
        args = script.parse_args(["--norm-obs", "--preset", "minimal", "--gae-lambda", "0.5"])
        assert args.norm_obs and args.gae_lambda == 0.5 and not args.norm_reward
        args = script.parse_args(["--no-norm-obs", "--anneal-lr", "--gae-lambda", "0.95", "--preset", "loaded"])
        assert not args.norm_obs and args.anneal_lr and args.gae_lambda == 0.95 and args.norm_reward
    else:
        args = script.parse_args(["--preset", "minimal", "--hidden-size", "256"])  # the default, but explicit
        assert (args.hidden_size, args.batch_size) == (256, 64)


def test_explicit_flags_win_over_those_of_the_resumed_run_and_these_over_the_preset(script, copied_run):
    saved = json.loads((copied_run(script.__name__) / "args.json").read_text())
    args = asdict(script.parse_args(["--resume", "--run-name", "r"]))
    assert args == saved | dict(resume=True)
    more = ("--gamma", "0.5", "--total-timesteps", "2048", "--checkpoint-interval", "7")
    args = script.parse_args(["--resume", "--run-name", "r", *more])
    assert asdict(args) == saved | dict(resume=True, gamma=0.5, total_timesteps=2048, checkpoint_interval=7)
    args = script.parse_args(["--evaluate", "--run-name", "r", "--eval-episodes", "3"])
    assert asdict(args) == saved | dict(evaluate=True, eval_episodes=3)


def test_flags_that_are_fixed_for_a_run_cannot_change_on_resume(script, copied_run, error_of):
    copied_run(script.__name__)
    other = dict(env_id="Hopper-v4", seed=2, preset="minimal", num_envs=2, num_steps=64, hidden_size=8, buffer_size=9)
    assert {"env_id", "seed", "preset"} < set(script.FIXED)
    for name in script.FIXED:
        flag = f"--{name.replace('_', '-')}"
        message = error_of(script, "--resume", "--run-name", "r", flag, other[name], "--total-timesteps", 2048)
        assert f"runs/r has {name} " in message and "fixed" in message
    script.parse_args(["--resume", *short(script)])  # the same values are fine


def test_help_describes_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"--{f.name.replace('_', '-')}" in text for f in fields(script.Args) if f.name != "exp_name")
    assert script.__doc__.splitlines()[0][:40] in text


# ----------------------------------------------------------------------------------------- input that cannot work

BAD_INPUT = [  # flags, and words of the sentence
    ("--env-id Hoper-v4", ("Hoper", "Hopper")),
    ("--env-id NoSuchTask-v0", ("NoSuchTask",)),
    ("--env-id no_such_module:Task-v0", ("no_such_module",)),
    ("--env-id CartPole-v1", ("CartPole-v1", "Discrete(2)")),
    ("--env-id FrozenLake-v1", ("FrozenLake-v1", "Discrete(16)")),
    ("--env-id DictObs-v0", ("DictObs-v0", "Dict")),
    ("--total-timesteps 0", ("--total-timesteps", "positive")),
    ("--total-timesteps -1", ("--total-timesteps", "positive", "-1")),
    ("--checkpoint-interval 0", ("--checkpoint-interval", "positive")),
    ("--eval-episodes 0", ("--eval-episodes", "positive")),
    ("--gamma 0", ("--gamma",)),
    ("--gamma 1.5", ("--gamma", "at most 1")),
    ("--gamma nan", ("--gamma", "nan")),
    ("--learning-rate nan", ("--learning-rate", "nan")),
    ("--learning-rate inf", ("--learning-rate", "inf")),
    ("--learning-rate -1", ("--learning-rate", "-1")),
    ("--seed -1", ("--seed", "-1")),
    ("--seed 4294967296", ("--seed", "2**32")),
    ("--run-name ../../x", ("--run-name", "path component", "--runs-dir")),
    ("--run-name /abs", ("--run-name", "path component")),
    ("--run-name ..", ("--run-name", "path component")),
    ("--run-name .", ("--run-name", "path component")),
    ("--run-name a/b", ("--run-name", "path component")),
    ("--run-name a/", ("--run-name", "path component")),
    ("--run-name ../x --resume", ("--run-name", "path component")),
    ("--run-name ../x --evaluate", ("--run-name", "path component")),
    ("--evaluate", ("--evaluate", "--run-name")),
    ("--resume", ("--resume", "--run-name")),
    ("--evaluate --run-name absent", ("no checkpoint in runs/absent",)),
    ("--total-timestepz 2048", ("--total-timestepz", "--total-timesteps")),
    ("--preset lodaed", ("lodaed", "loaded")),
    ("--total-timesteps many", ("many",)),
]
ON_POLICY_BAD_INPUT = [
    ("--num-steps 0", ("--num-steps", "positive")),
    ("--num-envs 0", ("--num-envs", "positive")),
    ("--total-timesteps 2000", ("--total-timesteps", "2048")),
    ("--total-timesteps 3000 --num-envs 2", ("--total-timesteps", "4096")),
    ("--gae-lambda 1.5", ("--gae-lambda", "at most 1")),
    ("--gae-lambda -0.1", ("--gae-lambda", "-0.1")),
    ("--gae-lambda nan", ("--gae-lambda", "nan")),
    ("--critic-minibatch-size 0", ("--critic-minibatch-size",)),
]
OFF_POLICY_BAD_INPUT = [
    ("--env-id Unbounded-v0", ("Unbounded-v0", "bounded actions")),
    ("--total-timesteps 10000", ("--total-timesteps", "--learning-starts, 10000")),
    ("--checkpoint-interval 25001", ("--checkpoint-interval", "25,000")),
    ("--entropy-coef -0.1", ("--entropy-coef",)),
    ("--entropy-coef nan", ("--entropy-coef",)),
    ("--tau 1.5", ("--tau", "at most 1")),
    ("--tau 0", ("--tau",)),
    ("--gradient-steps 0", ("--gradient-steps",)),
    ("--hidden-size 0", ("--hidden-size",)),
    ("--preset loaded-gae", ("loaded-gae",)),
]
OWN_BAD_INPUT = [
    ("mdpo_onpolicy", "--sgd-steps 0"),
    *[("mdpo_onpolicy", f"--tsallis-q {q}") for q in (0, 2.1, "nan")],
    ("trpo", "--max-kl 0"),
    ("trpo", "--cg-iterations 0"),
    ("trpo", "--natural-steps 0"),
    ("ppo", "--clip-coef -0.1"),
    ("ppo", "--update-epochs 0"),
    ("ppo", "--objective kl"),
    *[(name, f"--bregman-stepsize {x}") for name in ("mdpo_offpolicy", "mdpo_tsallis") for x in (0, -1, "nan", "inf")],
    *[(name, "--old-policy-interval 0") for name in ("mdpo_offpolicy", "mdpo_tsallis")],
    *[("mdpo_tsallis", f"--{name}-q {q}") for name in ("tsallis", "entropy") for q in (0, -1, 2.01, "nan")],
    ("mdpo_tsallis", "--log-q sum"),
]


@pytest.mark.parametrize(("flags", "said"), BAD_INPUT)
def test_input_that_cannot_work_gets_a_sentence(script, flags, said, error_of, tmp_path):
    beside = set(tmp_path.parent.iterdir())
    message = error_of(script, *flags.split())
    assert all(word in message for word in said), message
    assert set(tmp_path.parent.iterdir()) == beside and not Path("/abs").exists()


@pytest.mark.parametrize(("flags", "said"), ON_POLICY_BAD_INPUT)
def test_on_policy_input_that_cannot_work_gets_a_sentence(on_policy, flags, said, error_of):
    message = error_of(on_policy, *flags.split())
    assert all(word in message for word in said), message


@pytest.mark.parametrize(("flags", "said"), OFF_POLICY_BAD_INPUT)
def test_off_policy_input_that_cannot_work_gets_a_sentence(off_policy, flags, said, error_of):
    message = error_of(off_policy, *flags.split())
    assert all(word in message for word in said), message


@pytest.mark.parametrize(("name", "flags"), OWN_BAD_INPUT)
def test_an_algorithms_own_flags_are_checked_too(name, flags, error_of):
    assert flags.split()[0] in error_of(importlib.import_module(name), *flags.split())


def test_a_mistyped_task_leaves_no_folder_behind(script, error_of):
    error_of(script, "--env-id", "Hoper-v4")
    assert not os.listdir()


def test_a_run_name_that_is_too_long_for_wandb_gets_a_sentence(script, error_of):
    assert "128 characters" in error_of(script, "--run-name", 129 * "a")
    assert script.Args(run_name=128 * "a")


def test_capture_video_evaluates(script, error_of):
    assert script.Args(run_name="r", capture_video=True).evaluate
    assert "need a --run-name" in error_of(script, "--capture-video")


def test_a_run_is_not_started_over_another(script, copied_run, error_of):
    copied_run(script.__name__)
    message = error_of(script, *short(script))
    assert "runs/r already holds a run" in message and "--resume" in message


def test_runs_being_a_file_gets_a_sentence(script, error_of):
    Path("runs").write_text("")
    assert "runs/r" in error_of(script, *short(script))
    assert Path("runs").is_file()


@pytest.mark.parametrize("runs_dir", ["/proc/runs", "runs"])
def test_a_folder_that_cannot_be_written_to_gets_a_sentence(script, runs_dir, error_of):
    if runs_dir == "runs":  # permissions do not stop root, this does
        Path("runs/r/lock").mkdir(parents=True)
    assert f"{runs_dir}/r" in error_of(script, *short(script), "--runs-dir", runs_dir)


def test_a_resume_to_fewer_steps_than_are_done_gets_a_sentence(script, copied_run, error_of):
    run = copied_run(script.__name__)
    flags = ("--resume", "--run-name", "r", "--total-timesteps", 1023)
    assert "runs/r has already trained for 1024 steps" in error_of(script, *flags)
    (run / "finished").unlink()
    assert "1024 steps" in error_of(script, *flags)


def test_compile_without_a_compiler_gets_a_sentence(tmp_path):
    """Of the script with the least to compile: it takes seconds to get to the compiler."""
    environment = dict(CXX="/nonexistent", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    process = finish("trpo", *short("trpo"), "--compile", "--wandb-mode", "disabled", cwd=tmp_path, **environment)
    assert process.returncode == 2
    (sentence,) = re.findall("error: .*", process.stderr)
    assert "--compile" in sentence and "C++ compiler" in sentence and "Traceback" not in process.stderr
    assert not (tmp_path / "runs/r/finished").exists()


def test_online_without_an_account_gets_a_sentence(script, error_of, monkeypatch, tmp_path_factory, capsys):
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(SystemExit) as stop:
        script.main([*short(script), "--wandb-mode", "online"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "W&B cannot start" in error and "wandb login" in error


# ---------------------------------------------------------------------------------------------------- checkpoints


class Payload:
    """Leaves a file behind if it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def damage(checkpoint: Path, how: str) -> None:
    whole, content = checkpoint.read_bytes(), torch.load(checkpoint)
    if how == "empty":
        checkpoint.write_bytes(b"")
    elif how == "half":
        checkpoint.write_bytes(whole[: len(whole) // 2])
    elif how == "foreign":
        checkpoint.write_text("not a checkpoint")
    elif how == "a tensor":
        torch.save(torch.zeros(3), checkpoint)
    elif how == "payload":
        torch.save(content | dict(extra=Payload()), checkpoint)
    elif how == "no policy":
        torch.save({key: value for key, value in content.items() if key != "policy"}, checkpoint)
    elif how == "unknown flag":
        torch.save(content | dict(args=content["args"] | dict(unknown=1)), checkpoint)
    elif how == "other task":  # whose observations have another size
        torch.save(content | dict(args=content["args"] | dict(env_id="Pendulum-v1")), checkpoint)


DAMAGES = ("empty", "half", "foreign", "a tensor", "payload", "no policy", "unknown flag", "other task")


@pytest.mark.parametrize("action", ["--resume", "--evaluate"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_that_cannot_be_used_gets_a_sentence_runs_no_code_and_stays_as_it_is(
    script, how, action, copied_run, error_of
):
    damage(copied_run(script.__name__) / "checkpoint.pt", how)
    message = error_of(script, action, "--run-name", "r", "--total-timesteps", 2048)
    assert "cannot use runs/r/checkpoint.pt" in message or (how == "other task" and "runs/r/replay.bin" in message)
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("action", ["--resume", "--evaluate"])
def test_a_checkpoint_of_another_script_gets_a_sentence(script, action, copied_run, error_of):
    other = "ppo" if script is not ppo else "trpo"
    copied_run(other)
    assert other in error_of(script, action, "--run-name", "r")


@pytest.mark.parametrize("action", ["--resume", "--evaluate"])
def test_a_checkpoint_imports_the_module_of_its_task_only_if_the_command_line_names_it(
    script, action, copied_run, error_of, monkeypatch
):
    path = copied_run(script.__name__) / "checkpoint.pt"
    content = torch.load(path)
    env_id = "beside:InvertedPendulum-v4"
    torch.save(content | dict(args=content["args"] | dict(env_id=env_id)), path)
    Path("beside.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    flags = (action, "--run-name", "r", "--total-timesteps", 1024)
    for more in ((), ("--env-id", "InvertedPendulum-v4"), ("--env-id", "other:InvertedPendulum-v4")):
        message = error_of(script, *flags, *more)
        assert "import a module" in message and env_id in message
    assert not Path("imported").exists()
    if action == "--evaluate":
        assert script.main([*map(str, flags), "--env-id", env_id, "--eval-episodes", "1"]) == 0
        assert Path("imported").exists()


# ------------------------------------------------------------------------------------------------------ --evaluate


def test_evaluate_reproduces_the_policy_with_its_saved_normalization(script, copied_run, capsys):
    path = copied_run(script.__name__) / "checkpoint.pt"
    checkpoint = torch.load(path)
    policy = checkpoint["policy"]
    for name in policy:
        if name.endswith("4.weight"):
            policy[name] *= 5  # so that a policy this young acts at all
    torch.save(checkpoint, path)
    before = contents(path.parent)
    flags = ["--evaluate", "--run-name", "r", "--eval-episodes", "3"]
    assert script.main(flags) == 0
    printed = capsys.readouterr().out
    assert contents(path.parent) == before  # it trains nothing
    assert script.main(flags) == 0 and capsys.readouterr().out == printed

    def act(obs: np.ndarray) -> np.ndarray:
        """The mean action by torch alone, from the saved numbers."""
        x = torch.as_tensor(obs, dtype=torch.float64)
        prefix = ""
        if script.__name__ in ON_POLICY:
            mean, var = checkpoint["obs_moments"]["mean"], checkpoint["obs_moments"]["var"]
            x, prefix = ((x - mean) / (var + 1e-8).sqrt()).clamp(-10, 10), "mean."
        squash = torch.tanh if script.__name__ in ON_POLICY else torch.relu
        for layer in (0, 2, 4):
            x = policy[f"{prefix}{layer}.weight"].double() @ x + policy[f"{prefix}{layer}.bias"].double()
            x = squash(x) if layer < 4 else x
        return x.clamp(-3, 3).numpy() if script.__name__ in ON_POLICY else 3 * torch.tanh(x[:1]).numpy()

    env, returns = gym.make("InvertedPendulum-v4"), []
    for number in range(3):
        (obs, _), done, rewards = env.reset(seed=1 + number), False, []
        while not done:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            rewards.append(reward)
            done = terminated or truncated
        returns.append(sum(rewards))
        assert f"episode {number + 1}: return {returns[-1]:.1f} in {len(rewards)} steps" in printed
    assert f"mean {np.mean(returns):.1f} ± {np.std(returns):.1f}" in printed and "over 3 episodes" in printed


def test_evaluate_depends_on_the_saved_normalization(on_policy, copied_run, capsys):
    path, printed = copied_run(on_policy.__name__) / "checkpoint.pt", []
    checkpoint = torch.load(path)
    checkpoint["policy"]["mean.4.weight"] *= 20
    for factor in (1, 1, 100):
        checkpoint["obs_moments"]["var"] *= factor
        torch.save(checkpoint, path)
        on_policy.main(["--evaluate", "--run-name", "r", "--eval-episodes", "3"])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def test_a_checkpoint_reduced_to_args_and_policy_evaluates_and_does_not_resume(script, copied_run, capsys, error_of):
    path = copied_run(script.__name__) / "checkpoint.pt"
    checkpoint, printed = torch.load(path), []
    for keys in (checkpoint, ("args", "policy", "obs_moments")):
        torch.save({key: checkpoint[key] for key in keys if key in checkpoint}, path)
        assert script.main(["--evaluate", "--run-name", "r", "--eval-episodes", "2"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].count("episode") == 3
    assert "cannot use runs/r/checkpoint.pt" in error_of(
        script, "--resume", "--run-name", "r", "--total-timesteps", 2048
    )


def test_evaluating_on_a_task_that_does_not_fit_gets_a_sentence(script, copied_run, error_of):
    copied_run(script.__name__)
    message = error_of(script, "--evaluate", "--run-name", "r", "--env-id", "Pendulum-v1")
    assert "runs/r/checkpoint.pt" in message and "size mismatch" in message


def test_capture_video_without_moviepy_names_our_extra(script, copied_run, error_of, monkeypatch):
    copied_run(script.__name__)
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert "pip install '.[video]'" in error_of(script, "--evaluate", "--run-name", "r", "--capture-video")


def test_a_video_is_of_the_first_episode_by_the_camera_that_follows_the_robot(script, monkeypatch):
    made, recorded, make = [], [], gym.make

    def record(env, folder, episode_trigger):
        recorded.append((folder, [number for number in range(10) if episode_trigger(number)]))
        return env

    monkeypatch.setattr(gym, "make", lambda env_id, **options: made.append(options) or make(env_id))
    monkeypatch.setattr(gym.wrappers, "RecordVideo", record)
    for env_id in ("HalfCheetah-v4", "Pendulum-v1"):
        script.make_env(env_id, Path("videos"))
    plain, tracking = dict(render_mode="rgb_array"), dict(render_mode="rgb_array", camera_name="track")
    assert made == [plain, tracking, plain]  # Gymnasium tells what a task is only once it is made
    assert recorded == [("videos", [0])] * 2


def test_capture_video_writes_a_video_of_one_episode(script, in_process):
    pytest.importorskip("moviepy")
    small = (
        ("--num-steps", "64") if script.__name__ in ON_POLICY else ("--buffer-size", "100", "--learning-starts", "60")
    )
    flags = ("--env-id", "Drawn-v0", "--total-timesteps", "64", "--wandb-mode", "disabled", "--run-name", "r")
    assert in_process(script, *flags, *small).status == 0
    assert in_process(script, "--evaluate", "--run-name", "r", "--eval-episodes", 2, "--capture-video").status == 0
    (video,) = Path("runs/r/videos").glob("*.mp4")
    assert video.stat().st_size > 100


def test_committed_agents_are_small():
    sizes = [path.stat().st_size for path in (ROOT / "results/agents").glob("*/checkpoint.pt")]
    assert max(sizes) < 100_000 and sum(sizes) < 5_000_000


def test_the_table_of_agents_has_the_scores_and_ranks_of_runs_csv():
    assert agents.page([]) == (ROOT / "results/agents/README.md").read_text(), "run python tools/agents.py"
    names = [path.parent.name for path in (ROOT / "results/agents").glob("*/checkpoint.pt")]
    assert sorted(re.findall(r"^\| (\S+__\S+) ", agents.page([]), flags=re.M)) == sorted(names)


def test_each_committed_agent_is_the_median_of_its_seeds():
    ranks = re.findall(r" (\d+) of (\d+) ", (ROOT / "results/agents/README.md").read_text())
    assert len(ranks) > 20 and all(2 * int(rank) == int(seeds) + 1 for rank, seeds in ranks)


def test_a_committed_agent_plays_within_its_stated_spread(capsys):
    """The table says mean ± std of 100 episodes; the mean of 3 is within 4 of their standard errors, plus rounding."""
    table = (ROOT / "results/agents/README.md").read_text()
    name, algo, mean, std = re.search(r"\| (Half\S+) \| (\w+) \| .* \| ([\d.]+) ± ([\d.]+) \|", table).groups()
    flags = ["--evaluate", "--runs-dir", str(ROOT / "results/agents"), "--run-name", name, "--eval-episodes", "3"]
    assert importlib.import_module(algo).main(flags) == 0
    played = float(re.search(r"mean (\S+) ±", capsys.readouterr().out)[1])
    assert abs(played - float(mean)) < 4 * float(std) / 3**0.5 + 1
