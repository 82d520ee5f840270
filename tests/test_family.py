"""Within a family only the algorithm differs. Each script stands alone and works with both versions of the tasks."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, fields

import pytest
from conftest import ALL, OFF_POLICY, ON_POLICY, ROOT, contents

TASKS = ("Hopper", "Walker2d", "HalfCheetah", "Ant", "Humanoid", "HumanoidStandup")
# What belongs to the algorithm: whole blocks, flags, and the lines of shared functions that contain one of these words.
OWN_BLOCKS = {
    "mdpo_onpolicy": {"tsallis_divergence", "mdpo_loss", "policy_backward"},
    "trpo": {"surrogate_and_kl", "flat_gradient", "fisher_product", "conjugate_gradient", "line_search"}
    | {"natural_step"},
    "ppo": {"clip_loss", "kl_loss", "penalty_kl", "policy_backward"},
    "mdpo_offpolicy": {"BREGMAN_STEPSIZE", "mdpo_loss"},
    "mdpo_tsallis": {"BREGMAN_STEPSIZE", "TSALLIS_Q", "log_q", "log_q_density", "tsallis_loss"},
    "sac": {"sac_loss"},
}
OWN_FLAGS = {
    "mdpo_onpolicy": {"sgd_steps", "anneal_t", "tsallis_q"},
    "trpo": {"max_kl", "cg_iterations", "cg_damping", "natural_steps"},
    "ppo": {"objective", "clip_coef", "kl_coef", "target_kl", "kl_direction", "update_epochs", "minibatch_size"},
    "mdpo_offpolicy": {"old_policy_interval", "bregman_stepsize"},
    "mdpo_tsallis": {"old_policy_interval", "bregman_stepsize", "tsallis_q", "entropy_q", "log_q"},
    "sac": set(),
}
OTHER_DEFAULTS = {"learning_rate", "critic_learning_rate", "anneal_lr", "critic_epochs", "critic_minibatch_size"}
WORDS = {
    ON_POLICY: r"MINIMAL \||tsallis_q|tsallis-q|optimizer\.(param|step|zero)|optimizer = |fit = |parts = |policy_loss"
    r"|objective|kl_coef|kl_factor|penalty_kl|[^_]pi = policy\(batch",
    OFF_POLICY: r"old_policy|old_mean|self\.target_v = |One gradient step|log_prob|log_densities|v_target = |bregman"
    r"|tsallis_q|entropy_q|entropy-q|entropy = |    task = |# Learn|args\.gradient_steps",
}
LONGEST = {ON_POLICY: 40, OFF_POLICY: 30}  # lines of shared blocks that may differ


def family(name: str) -> tuple[str, ...]:
    return ON_POLICY if name in ON_POLICY else OFF_POLICY


def blocks(name: str) -> dict[str, list[str]]:
    """The top-level statements of a script in order, each with the comments and blank lines before it."""
    text = (ROOT / f"{name}.py").read_text()
    lines, parts, end = text.splitlines(), {}, 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            key = node.name
        elif isinstance(node, ast.Assign):
            key = node.targets[0].id
        else:
            key = "docstring" if end == 0 else ast.unparse(node).split("\n")[0]
        parts[key] = lines[end : node.end_lineno]
        end = node.end_lineno
    return parts


def without_own_flags(name: str, lines: list[str]) -> list[str]:
    """Args without the flags that belong to the algorithm or have another default."""
    field, kept = "", []
    for line in lines:
        field = match[1] if (match := re.match(r"    (\w+): ", line)) else field if line.strip() else ""
        if field not in OWN_FLAGS[name] | (OTHER_DEFAULTS if name in ON_POLICY else set()):
            kept.append(line)
    return kept


def shared(name: str) -> tuple[dict[str, list[str]], int]:
    """The blocks of a script without its algorithm, and the number of lines left out of shared blocks."""
    parts = {key: lines for key, lines in blocks(name).items() if key not in OWN_BLOCKS[name] | {"docstring"}}
    parts["Args"] = without_own_flags(name, parts["Args"])
    if name in ON_POLICY:
        text = "\n".join(parts["train"])
        parts["train"] = re.sub(r"# Policy improvement(.|\n)*# Policy evaluation", "", text).split("\n")
    kept = {key: [x for x in lines if not re.search(WORDS[family(name)], x)] for key, lines in parts.items()}
    return kept, sum(map(len, parts.values())) - sum(map(len, kept.values()))


@pytest.mark.parametrize("name", [*ON_POLICY[1:], *OFF_POLICY[1:]])
def test_all_but_the_algorithm_is_the_same_to_the_letter(name):
    (ours, left_out), (theirs, _) = shared(name), shared(family(name)[0])
    assert list(ours) == list(theirs)  # the same blocks in the same order
    for key in theirs:
        assert ours[key] == theirs[key], key
    assert left_out <= LONGEST[family(name)]


@pytest.mark.parametrize("name", ALL)
def test_what_is_listed_as_the_algorithms_own_exists(name):
    script = importlib.import_module(name)
    assert set(blocks(name)) >= OWN_BLOCKS[name]
    assert {field.name for field in fields(script.Args)} >= OWN_FLAGS[name]


def test_what_both_families_do_is_the_same_in_both():
    on_policy, off_policy = blocks("mdpo_onpolicy"), blocks("mdpo_offpolicy")
    different = {"make_env": "bounded|return ", "parse_args": "bregman|BREGMAN|task = |total.timesteps (<|must)"}
    different |= {"evaluate": r"returns = |returns, |low|policy|\bact\b|normalize"}
    for key in ("Run", "check_finite", "fail", "load_checkpoint", "main", *different):
        ours, theirs = (
            [x for x in p[key] if not re.search(different.get(key, "^$"), x)] for p in (on_policy, off_policy)
        )
        assert ours == theirs and len(ours) >= 2, key
    ours, theirs = (
        [x.strip() for x in p["Args"] if "run_name" in x or "run-name" in x] for p in (on_policy, off_policy)
    )
    assert ours == theirs and len(ours) >= 4


@pytest.mark.parametrize("name", ALL)
def test_no_script_imports_another(name):
    imported = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert not imported & {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("t*/*.py"))}


IMPORT = """
import gymnasium, json, numpy, os, random, signal, sys, torch, wandb

def state():
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    modes = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), numpy.geterr()
    return str((handlers, generators, modes, dict(os.environ), os.listdir(), len(gymnasium.registry), wandb.run))

before, sys.dont_write_bytecode = state(), True
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps(state() == before))
"""


def test_importing_a_script_has_no_side_effects(tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{IMPORT}", *ALL]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)
    assert not process.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ALL)
def test_every_flag_has_its_sentence_where_help_finds_it(name):
    text = (ROOT / f"{name}.py").read_text()
    lines = text.splitlines()
    arguments = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "Args")
    for node in (node for node in arguments.body if isinstance(node, ast.AnnAssign)):
        described = "\n".join(lines[node.lineno - 1 : node.end_lineno]).partition("  # ")[2]
        assert len(described) > 10, node.target.id


def test_scripts_and_pyproject_name_the_same_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ALL:
        header = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", (ROOT / f"{name}.py").read_text())[1]
        needs = tomllib.loads(re.sub("^# ", "", header, flags=re.MULTILINE))
        assert sorted(needs["dependencies"]) == sorted(project["dependencies"]), name
        assert needs["requires-python"] == project["requires-python"], name


@pytest.mark.parametrize("name", ALL)
def test_a_lone_copy_of_a_script_trains_in_an_empty_folder(name, finished_run):
    folder = finished_run(name).folder
    assert {path.name for path in folder.iterdir()} == {f"{name}.py", "runs"}
    assert {"checkpoint.pt", "args.json", "finished"} <= set(contents(folder / "runs/r"))


@pytest.mark.parametrize("task", [*TASKS, "Pendulum"])
def test_defaults_of_a_task_hold_for_all_of_its_versions(script, task):
    v4, v5 = (asdict(script.parse_args(["--env-id", f"{task}-{v}", "--run-name", "r"])) for v in ("v4", "v5"))
    assert v4.pop("env_id") != v5.pop("env_id") and v4 == v5


@pytest.mark.parametrize(
    ("name", "task"), [(names[i % 3], x) for names in (ON_POLICY, OFF_POLICY) for i, x in enumerate(TASKS)]
)
def test_every_v5_task_trains_for_an_update(name, task, in_process):
    small = ("--num-steps", 32, "--total-timesteps", 32) if name in ON_POLICY else ("--total-timesteps", 33)
    if name in OFF_POLICY:
        small += ("--learning-starts", 32, "--hidden-size", 16, "--batch-size", 16, "--buffer-size", 100)
    run = in_process(importlib.import_module(name), "--env-id", f"{task}-v5", "--run-name", "r", *small)
    assert run.status == 0
