"""The on-policy scripts' command line: what flags mean, what is refused and how, and --evaluate."""

import importlib
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import ON_POLICY, ROOT, SHORT, contents

PRESETS = {  # the paper's table
    "minimal": (False, False, False, False, False, 1.0),
    "loaded": (True, True, True, True, True, 1.0),
    "loaded-gae": (True, True, True, True, True, 0.95),
}
PRESET_FLAGS = ("anneal_lr", "norm_obs", "norm_reward", "orthogonal_init", "clip_value_loss", "gae_lambda")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refusal(capsys, tmp_path):
    """main() with flags that it must refuse: exit status 2, plain sentences, nothing written. Returns its words."""

    def words(script, *flags) -> str:
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as stop:
            script.main([str(flag) for flag in flags])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error and "Traceback" not in error
        assert contents(tmp_path) == before
        return " ".join(error.replace("│", " ").split())

    return words


# ---------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_papers_variant(script, preset):
    args = script.parse_args(["--preset", preset])
    assert tuple(getattr(args, name) for name in PRESET_FLAGS)[1:] == PRESETS[preset][1:]
    if script.__name__ != "mdpo_onpolicy":
        assert args.anneal_lr == PRESETS[preset][0]
    else:
        assert not args.anneal_lr  # the release's choice: it trains better
        assert args.sgd_steps == (5 if preset == "minimal" else 10)


def test_a_flag_given_by_hand_wins_over_the_preset(script):
    args = script.parse_args(["--norm-obs", "--preset", "minimal", "--gae-lambda", "0.5"])
    assert args.norm_obs and args.gae_lambda == 0.5 and not args.norm_reward
    args = script.parse_args(["--no-norm-obs", "--anneal-lr", "--gae-lambda", "0.95", "--preset", "loaded"])
    assert not args.norm_obs and args.anneal_lr and args.gae_lambda == 0.95 and args.norm_reward


def test_the_defaults_are_the_papers(script):
    args = script.parse_args([])
    common = args.num_steps, args.num_envs, args.gamma, args.preset, args.wandb_mode
    assert common == (2048, 1, 0.99, "loaded-gae", "offline")
    own = {
        "mdpo_onpolicy": dict(learning_rate=3e-4, sgd_steps=10, critic_epochs=5, critic_minibatch_size=128),
        "trpo": dict(max_kl=0.01, cg_iterations=10, cg_damping=0.1, natural_steps=1, learning_rate=1e-3),
        "ppo": dict(clip_coef=0.2, update_epochs=10, minibatch_size=64, learning_rate=3e-4),
    }[script.__name__]
    assert {name: getattr(args, name) for name in own} == own
    assert args.run_name.startswith(f"Hopper-v4__{script.__name__}__1__")


def test_a_resumed_run_keeps_its_flags(script, copied_run, refusal):
    copied_run(script.__name__)
    args = script.parse_args(["--resume", "--run-name", "r", "--total-timesteps", "1024"])
    assert (args.env_id, args.num_steps, args.total_timesteps) == ("InvertedPendulum-v4", 256, 1024)
    message = refusal(script, "--resume", "--run-name", "r", "--gamma", 0.5)
    assert "--gamma is 0.99 in run r" in message and "0.5" in message


def test_help_describes_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"--{field.name.replace('_', '-')}" in text for field in fields(script.Args))


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--env-id Hoper-v4", ("Hoper", "Hopper")),
        ("--env-id NoSuchTask-v0", ("NoSuchTask",)),
        ("--env-id no_such_module:Task-v0", ("no_such_module",)),
        ("--env-id CartPole-v1", ("CartPole-v1", "actions", "Discrete(2)")),
        ("--env-id FrozenLake-v1", ("FrozenLake-v1", "observations", "Discrete(16)")),
        ("--env-id toy_envs:DictObs-v0", ("observations", "Dict")),
        ("--num-steps 0", ("--num-steps", "positive", "0")),
        ("--num-steps -5", ("--num-steps", "positive", "-5")),
        ("--num-envs 0", ("--num-envs", "positive")),
        ("--total-timesteps 0", ("--total-timesteps", "positive")),
        ("--total-timesteps -1", ("--total-timesteps", "positive")),
        ("--total-timesteps 2000", ("--total-timesteps", "2048")),
        ("--total-timesteps 3000 --num-envs 2", ("--total-timesteps", "4096")),
        ("--critic-minibatch-size 4096", ("--critic-minibatch-size", "4096", "2048")),
        ("--checkpoint-interval 0", ("--checkpoint-interval", "positive")),
        ("--eval-episodes 0", ("--eval-episodes", "positive")),
        ("--gamma 0", ("--gamma", "0.0")),
        ("--gamma 1.5", ("--gamma", "1.5")),
        ("--gamma nan", ("--gamma", "nan")),
        ("--learning-rate nan", ("--learning-rate", "nan")),
        ("--learning-rate inf", ("--learning-rate", "inf")),
        ("--learning-rate -1", ("--learning-rate", "-1")),
        ("--gae-lambda 1.5", ("--gae-lambda", "1.5")),
        ("--gae-lambda -0.1", ("--gae-lambda", "-0.1")),
        ("--gae-lambda nan", ("--gae-lambda", "nan")),
        ("--seed -1", ("--seed", "-1")),
        ("--evaluate", ("--evaluate", "checkpoint")),
        ("--evaluate --run-name absent", ("--evaluate", "runs/absent/checkpoint.pt")),
        ("--capture-video", ("--capture-video", "--evaluate")),
        ("--num-stepz 2048", ("--num-stepz", "--num-steps")),
        ("--preset lodaed", ("lodaed", "loaded")),
        ("--num-steps many", ("many",)),
    ],
)
def test_input_that_cannot_work_is_refused_in_plain_words(script, flags, said, refusal):
    message = refusal(script, *flags.split())
    assert all(word in message for word in said), message


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("mdpo_onpolicy", "--sgd-steps 0"),
        ("trpo", "--max-kl 0"),
        ("trpo", "--cg-iterations 0"),
        ("trpo", "--natural-steps 0"),
        ("ppo", "--clip-coef -0.1"),
        ("ppo", "--update-epochs 0"),
        ("ppo", "--minibatch-size 4096"),
    ],
)
def test_an_algorithms_own_flags_are_checked_too(name, flags, refusal):
    assert flags.split()[0] in refusal(importlib.import_module(name), *flags.split())


@pytest.mark.parametrize("name", ON_POLICY)
def test_a_lone_copy_of_the_file_refuses_a_mistyped_task_without_a_traceback(name, tmp_path):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, "-P", f"{name}.py", "--env-id", "Hoper-v4"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert "Hopper" in process.stderr and "Traceback" not in process.stderr
    assert len(process.stderr.strip().splitlines()) <= 2
    assert list(contents(tmp_path)) == [f"{name}.py"]


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_a_run_is_not_started_over_another(script, copied_run, refusal):
    copied_run(script.__name__)
    assert "--resume" in refusal(script, *SHORT)


class Unsafe:
    """Would leave a file behind if it were unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def damage(checkpoint: Path, how: str) -> None:
    whole = checkpoint.read_bytes()
    content = torch.load(checkpoint)
    if how == "empty":
        checkpoint.write_bytes(b"")
    elif how == "half":
        checkpoint.write_bytes(whole[: len(whole) // 2])
    elif how == "foreign":
        checkpoint.write_text("not a checkpoint")
    elif how == "a tensor":
        torch.save(torch.zeros(3), checkpoint)
    elif how == "unsafe":
        torch.save(content | dict(extra=Unsafe()), checkpoint)
    elif how == "no agent":
        torch.save({key: value for key, value in content.items() if key != "agent"}, checkpoint)
    elif how == "unknown flag":
        torch.save(content | dict(args=content["args"] | dict(unknown=1)), checkpoint)
    elif how == "other task":  # whose observations have another size
        torch.save(content | dict(args=content["args"] | dict(env_id="Hopper-v4")), checkpoint)


@pytest.mark.parametrize("action", ["--resume", "--evaluate"])
@pytest.mark.parametrize(
    "how", ["empty", "half", "foreign", "a tensor", "unsafe", "no agent", "unknown flag", "other task"]
)
def test_a_checkpoint_that_cannot_be_used_is_refused_and_left_as_it_is(
    script, how, action, copied_run, refusal, tmp_path
):
    damage(copied_run(script.__name__) / "checkpoint.pt", how)
    message = refusal(script, action, "--run-name", "r", *(["--total-timesteps", 1024] if action == "--resume" else []))
    assert "runs/r/checkpoint.pt" in message
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("action", ["--resume", "--evaluate"])
def test_a_checkpoint_of_another_script_is_refused(script, action, copied_run, refusal):
    other = "ppo" if script.__name__ != "ppo" else "trpo"
    copied_run(other)
    message = refusal(script, action, "--run-name", "r")
    assert other in message and script.__name__ in message


def test_evaluation_repeats_itself_and_uses_the_agents_own_statistics(script, copied_run, capsys):
    path = copied_run(script.__name__) / "checkpoint.pt"
    checkpoint = torch.load(path)
    checkpoint["agent"]["policy.flat"] *= 5  # so that a policy this young acts at all

    def evaluate(**moments) -> str:
        agent = checkpoint["agent"] | {f"obs_moments.{name}": torch.tensor(value) for name, value in moments.items()}
        torch.save(checkpoint | dict(agent=agent), path)
        before = contents(path.parent)
        assert script.main(["--evaluate", "--run-name", "r", "--eval-episodes", "3"]) == 0
        assert contents(path.parent) == before  # it trains nothing
        return capsys.readouterr().out

    printed = evaluate()
    assert printed.count("episode") == 4 and "±" in printed and "over 3 episodes" in printed
    assert evaluate() == printed
    assert evaluate(mean=[5.0, 5, 5, 5]) != printed
    assert evaluate(var=[1e-6] * 4) != printed
