"""Within a family every line that is not the algorithm is the same line, in the same order."""

import ast
import json
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import ON_POLICY, ROOT

# What belongs to the algorithm. All else, comments included, is to be the same to the letter.
OWN_NAMES = {
    "mdpo_onpolicy": {"mdpo_objective", "policy_step"},
    "trpo": {"surrogate_and_kl", "fisher_vector_product", "conjugate_gradient", "line_search"},
    "ppo": {"ppo_objective", "policy_step"},
}
DIFFERING = {"docstring", "PRESETS", "update_policy"}
OWN_FLAGS = {  # fields of Args, some of them only with another default or description
    "mdpo_onpolicy": {"sgd_steps"},
    "trpo": {"max_kl", "cg_iterations", "cg_damping", "natural_steps"},
    "ppo": {"clip_coef", "update_epochs", "minibatch_size"},
}
DIFFERING_FLAGS = {"learning_rate", "anneal_lr", "critic_epochs", "critic_minibatch_size"}
OWN_IMPORTS = {"from collections.abc import Callable"}
POLICY_OPTIMISER = ("policy_optimizer", "critic_optimizer = Adam", "policy_step")  # lines of Agent that name these


def blocks(name: str) -> dict[str, list[str]]:
    """The file's top-level statements in order, each with the comments and blank lines before it."""
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


def shared(name: str) -> dict[str, list[str]]:
    """The blocks of a script without what belongs to its algorithm."""
    parts = {k: v for k, v in blocks(name).items() if k not in OWN_NAMES[name] | DIFFERING | OWN_IMPORTS}
    flags = OWN_FLAGS[name] | DIFFERING_FLAGS
    parts["Args"] = [line for line in parts["Args"] if line.split(":")[0].strip() not in flags]
    parts["Agent"] = [line for line in parts["Agent"] if not any(word in line for word in POLICY_OPTIMISER)]
    return parts


@pytest.mark.parametrize("name", ON_POLICY[1:])
def test_all_but_the_algorithm_is_the_same_to_the_letter(name):
    ours, theirs = shared(name), shared(ON_POLICY[0])
    assert list(ours) == list(theirs)  # the same blocks in the same order
    for key in theirs:
        assert ours[key] == theirs[key], key


def test_what_is_listed_as_the_algorithms_own_exists(script):
    name = script.__name__
    assert OWN_NAMES[name] | DIFFERING <= set(blocks(name))
    assert OWN_FLAGS[name] | DIFFERING_FLAGS <= {field.name for field in fields(script.Args)}
    differing = [line for line in blocks(name)["Agent"] if any(word in line for word in POLICY_OPTIMISER)]
    assert len(differing) <= 3


@pytest.mark.parametrize("name", ON_POLICY)
def test_no_script_imports_another(name):
    imported = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert not imported & {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"))}


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
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{IMPORT}", *ON_POLICY]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)
    assert not process.stderr and not list(tmp_path.iterdir())


def test_what_both_families_do_is_the_same_in_both():
    names = ("Adam", "refuse", "load_checkpoint", "provenance", "can_compile", "check_finite", "main")
    on_policy, off_policy = blocks("mdpo_onpolicy"), blocks("mdpo_offpolicy")
    assert all(on_policy[name] == off_policy[name] for name in names)


@pytest.mark.parametrize("name", [*ON_POLICY, "mdpo_offpolicy", "mdpo_tsallis", "sac"])
def test_every_flag_has_its_sentence_on_its_own_line_where_help_finds_it(name):
    text = (ROOT / f"{name}.py").read_text()
    arguments = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "Args")
    lines = [text.splitlines()[node.lineno - 1] for node in arguments.body]
    assert len(lines) > 25 and all(len(line.partition("  # ")[2]) > 10 for line in lines)
