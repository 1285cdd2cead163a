"""Who may import whom, and what must work without torch. Read from the sources; one fresh interpreter is started."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "parallel": {"parallel"},
    "models": {"parallel", "models"},
    "data": {"parallel", "data"},
    "training": {"parallel", "models", "data", "training"},
    "pretrain_gpt": {"parallel", "models", "data", "training"},
    "tools": {"parallel", "models", "data", "training", "tools"},
}
OURS = set(MAY_IMPORT)
MODULES = sorted([*(path for name in OURS for path in (ROOT / name).rglob("*.py")), ROOT / "pretrain_gpt.py"])

NO_TORCH = """
    parallel.errors parallel.config parallel.layout parallel.stages parallel.hatch parallel.launch
    parallel.local_ranks parallel.output
    models.config models.shapes models.families models.frequencies models.parameters models.sublayers models.flops
    data.config
    training.config training.batch_size training.schedule training.divisions training.recipe training.flags
    training.help training.cli training.footprint training.advice training.describe pretrain_gpt
    training.watch.watchdog training.watch.watched
    models.sizes training.memory.predicted training.memory.changes training.memory.way_out
    tools.plan.run tools.plan.backtest.command
"""
STANDARD_LIBRARY_ONLY = "parallel.config models.config data.config training.config"


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_walk_found_the_house() -> None:
    assert len(MODULES) > 50
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES} == OURS


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_is_below_it(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours = {name for name in imports(path) if name.split(".")[0] in OURS}
    wrong = {name for name in ours if name.split(".")[0] not in MAY_IMPORT[package]}
    assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_only_groups_touches_parallel_state() -> None:
    users = {path for path in MODULES if any(".parallel_state" in name for name in imports(path))}
    assert {str(path.relative_to(ROOT)) for path in users} == {"parallel/groups.py"}


def test_nobody_imports_megatron_training() -> None:
    users = [path for path in MODULES if any(name.startswith("megatron.training") for name in imports(path))]
    assert users == []


def test_step_and_loop_know_no_sink_watcher_or_checkpoint_internals() -> None:
    forbidden = ("training.metrics", "training.watch", "training.checkpoint")
    for name in ("step", "loop"):
        known = set(imports(ROOT / f"training/{name}.py")) - {"training.checkpoint.progress.Progress"}
        assert not [module for module in known if module.startswith(forbidden)]


def test_every_package_begins_with_a_docstring() -> None:
    folders = {path.parent for path in MODULES} - {ROOT}
    for folder in folders:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert ast.get_docstring(tree), f"{folder.relative_to(ROOT)}/__init__.py"


def test_no_module_in_tools_has_a_name_of_the_standard_library() -> None:
    names = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert not names & sys.stdlib_module_names


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_answers_on_a_login_node_imports_no_torch() -> None:
    run(
        "import importlib, sys\n"
        f"for name in {NO_TORCH.split()}:\n"
        "    importlib.import_module(name)\n"
        "    found = {'torch', 'megatron', 'transformer_engine'} & {module.split('.')[0] for module in sys.modules}\n"
        "    assert not found, f'{name} imports {found}'\n"
    )


def test_help_and_dry_run_import_no_torch() -> None:
    for flags in (["--help"], ["slurm/recipes/demo.toml", "--dry_run"]):
        run(
            "import contextlib, sys\n"
            f"sys.argv = ['pretrain_gpt.py', *{flags}]\n"
            "import pretrain_gpt\n"
            "with contextlib.suppress(SystemExit):\n"
            "    pretrain_gpt.main()\n"
            "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules), sys.modules.keys()\n"
        )


def test_configuration_needs_the_standard_library_only() -> None:
    ours_or_standard = OURS | sys.stdlib_module_names
    text = run(
        f"import sys; before = set(sys.modules); import {', '.join(STANDARD_LIBRARY_ONLY.split())}\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    assert set(text.split()) <= ours_or_standard
