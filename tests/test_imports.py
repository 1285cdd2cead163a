"""Who may import whom, and what must work without torch. Read from the sources; one fresh interpreter is started."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "program": {"program"},
    "parallel": {"program", "parallel"},
    "models": {"program", "parallel", "models"},
    "data": {"program", "parallel", "data"},
    "training": {"program", "parallel", "models", "data", "training"},
    "pretrain_gpt": {"program", "parallel", "models", "data", "training"},
    "tools": {"program", "parallel", "models", "data", "training", "tools"},
}
OURS = set(MAY_IMPORT)
MODULES = sorted([*(path for name in OURS for path in (ROOT / name).rglob("*.py")), ROOT / "pretrain_gpt.py"])

NO_TORCH = """
    program.errors parallel.config parallel.layout parallel.stages parallel.megatron_fields parallel.launch
    parallel.failures parallel.local_ranks parallel.output program.processes
    models.config models.owned_fields models.shape_fields models.shapes models.spans models.families models.frequencies
    models.costs.parameters models.sublayers models.costs.flops
    data.config
    training.config.run_config training.config.batch_schedule training.config.lr_schedule training.config.schedules
    training.config.divisibility training.config.small_sections training.config.recipe
    training.cli.flags training.cli.help training.cli.parse
    training.config.import_path training.custom.check
    models.costs.stage_parameters training.cli.warnings training.cli.dry_run pretrain_gpt
    training.watchdog.watchdog training.watchdog.rank_monitor training.profile.summarize
    models.costs.sizes models.costs.predict training.memory.planned training.memory.oom_advice
    tools.plan.run
"""
TORCH = """
    parallel: ddp fsdp fsdp_units groups mcore_patches metrics precision random_states regions
    parallel.cpu: adam cuda_redirect eager uneven
    models: gpt init rope
    models.layers: activation attention blockwise_attention chunked chunked_losses compiled cross_entropy cuda_graphs
        delta_rule documents experts fine_grained_offload gated_delta_net max_logits mixers whole_matrices
        fp8 fp8_weights kv_cache mamba mla mtp norm offload packed parallel_residual projection recomputed
        restarting_rope routing scaling self_attention spec ssd token_counts userbuffers wgrad
    data: loader
    training: averages batches forward_backward loop loss_weights optimizer optimizer_class optimizer_forms qk_clip
        step train
    training.custom: callbacks loss
    training.muon: build dealing matrices update
    training.parts: announcement checkpoints companions data determinism evaluation manual_gc
        measuring model run
    training.evaluation: asked generating scoring set_batches shared_model task_callback validation harness
    training.checkpoint: account agreement callback fit model_state optimizer_state plausible restoring rng
    save_interval saving storage stream_position weights    training.checkpoint.background: saver
    training.checkpoint.bucket: callback fetching
    training.generation: forward generate samples sampling texts
    training.health: finite_check fp8_shadow health memory_growth names nonfinite nonfinite_probe replay
    replica_check skipped_batches skipping stragglers update_policy
    training.memory: host_room measured out_of_memory
    training.metrics: compilation log_disk meters parameter_stats recorder
    training.profile: callback memory_snapshot ranges timeline waits
    training.run_dir: data_watch history_callback run_files resume_report shared_check
    training.watchdog: callbacks
    tools.doctor: worker    tools.parity: compare coordinates outputs probe    tools.reshard.megatron: blobs
    tools.plan.calibrate: collectives measure    tools.plan.trace: balance ledger meta spots
"""
"""Modules that import torch, directly or through another one, when they are imported. No other module may: it answers
on a login node, or before torch has loaded."""
STANDARD_LIBRARY_ONLY = "parallel.config models.config data.config training.config.run_config"


@functools.cache
def imports(path: Path) -> list[str]:
    """Dotted names that a file imports, wherever in it; ``from a import b`` gives a.b."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in found:
        assert not getattr(node, "level", 0), f"{path}:{node.lineno}: a relative import"
    return [name for node in found for name in imports_of(node)]


def imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Dotted names of one statement."""
    for alias in node.names:
        yield alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"


def test_the_walk_found_the_house() -> None:
    assert len(MODULES) > 50
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES} == OURS


def test_a_module_imports_only_what_is_below_it() -> None:
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path in MODULES for name in imported_from_above(path)]
    assert not wrong


def imported_from_above(path: Path) -> set[str]:
    """Our modules that this one may not import."""
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return {name for name in imports(path) if name.split(".")[0] in OURS - MAY_IMPORT[package]}


def test_only_groups_touches_parallel_state() -> None:
    users = {path for path in MODULES if any(".parallel_state" in name for name in imports(path))}
    assert {str(path.relative_to(ROOT)) for path in users} == {"parallel/groups.py"}


def test_megatron_training_is_not_imported() -> None:
    users = [path for path in MODULES if any(name.startswith("megatron.training") for name in imports(path))]
    assert users == []


def test_step_and_loop_know_no_sink_watcher_or_checkpoint_internals() -> None:
    forbidden = ("training.metrics", "training.health", "training.watchdog", "training.checkpoint")
    for name in ("step", "loop"):
        known = set(imports(ROOT / f"training/{name}.py"))
        assert not [module for module in known if module.startswith(forbidden)]


def test_every_package_begins_with_a_docstring() -> None:
    folders = {path.parent for path in MODULES} - {ROOT}
    for folder in folders:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert ast.get_docstring(tree), f"{folder.relative_to(ROOT)}/__init__.py"


def test_what_a_package_lists_is_there() -> None:
    """Its docstring's table: modules, or what it exports, and behind two blanks what they are for."""
    packages = [path for path in MODULES if path.stem == "__init__"]
    missing = [f"{path.relative_to(ROOT)}: {name}" for path in packages for name, there in listed(path) if not there]
    assert not missing and sum(len(list(listed(path))) for path in packages) > 50


def listed(path: Path) -> Iterator[tuple[str, bool]]:
    """Each name, and whether it is there. Other tables, of files that a program writes, have capitals or dots."""
    tree = ast.parse(path.read_text())
    name = r"[a-z_]+(?:\.py|/)?"
    rows = re.findall(rf"^ *({name}(?:, {name})*)  +\S", ast.get_docstring(tree) or "", flags=re.MULTILINE)
    exported = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for name in filter(None, ", ".join(rows).split(", ")):
        yield name, name in exported or any(path.parent.glob(f"{name.removesuffix('.py').rstrip('/')}*"))


def test_no_module_in_tools_has_a_name_of_the_standard_library() -> None:
    names = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert not names & sys.stdlib_module_names


def test_no_file_imports_itself_through_others() -> None:
    """Imports within functions and for types alone count, too."""
    circles = in_circles(imported_files())
    assert not circles, f"each of these imports another one of them: {circles}"


def test_no_room_of_training_imports_itself_through_others() -> None:
    """A room is a folder of training, or a file beside them: between any two, imports go one way."""
    rooms = defaultdict[str, set[str]](set)
    for name, targets in imported_files().items():
        if name.startswith("training."):
            rooms[room_of(name)] |= {room_of(target) for target in targets if target.startswith("training.")}
    circles = in_circles(rooms)
    assert len(rooms) > 15 and not circles, f"each of these imports another one of them: {circles}"


def room_of(name: str) -> str:
    """``training.checkpoint.format.index`` -> ``training.checkpoint``."""
    return ".".join(name.split(".")[:2])


def imported_files() -> dict[str, set[str]]:
    """For each file what it imports of ours, wherever in it."""
    names = {name_of(path): path for path in MODULES}
    return {
        name: {
            target for each in imports(path) if (target := each if each in names else each.rpartition(".")[0]) in names
        }
        for name, path in names.items()
    }


def in_circles(graph: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """What remains of a graph without all that imports none of the rest, or is imported by none of it."""
    left, size = dict(graph), len(graph) + 1
    while len(left) < size:
        size = len(left)
        imported = {target for name, targets in left.items() for target in targets - {name}}
        left = {name: targets & left.keys() for name, targets in left.items() if targets & left.keys() - {name}}
        left = {name: targets for name, targets in left.items() if name in imported}
    return {name: sorted(targets & left.keys()) for name, targets in left.items()}


def test_torch_is_imported_where_it_is_listed_and_nowhere_else() -> None:
    listed, package = set[str](), ""
    for word in TORCH.split():
        package = word[:-1] if word.endswith(":") else package
        listed |= set() if word.endswith(":") else {f"{package}.{word}"}
    paths = {name_of(path): path for path in MODULES}
    needs = {name: set(at_import(ast.parse(path.read_text()))) for name, path in paths.items()}
    found = {"torch", "megatron", "transformer_engine"}
    while more := {name for name, modules in needs.items() if modules & found} - found:
        found |= more
    found = {name for name in found if "." in name}
    assert not found - listed, f"{found - listed} must not import torch, or belong into TORCH"
    assert not listed - found, f"{listed - found} import no torch: remove them from TORCH"


def name_of(path: Path) -> str:
    """``training.run_lock`` for its ``__init__.py``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def at_import(node: ast.AST) -> Iterator[str]:
    """Modules, and the packages that they are in, that are imported as soon as the file is; classes' bodies count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for name in imports_of(child):
                parts = name.split(".")
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from at_import(ast.Module(child.orelse, []))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_import(child)


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
    """A dry run takes numpy's 0.1 s, for the planner's formulas of memory."""
    heavy = {"torch", "megatron", "numpy"}
    for flags, without in (["--help"], heavy), (["slurm/recipes/demo.toml", "--dry_run"], heavy - {"numpy"}):
        run(
            "import contextlib, sys\n"
            f"sys.argv = ['pretrain_gpt.py', *{flags}]\n"
            "import pretrain_gpt\n"
            "with contextlib.suppress(SystemExit):\n"
            "    pretrain_gpt.main()\n"
            f"assert not {without} & set(sys.modules), sys.modules.keys()\n"
        )


def test_configuration_needs_the_standard_library_only() -> None:
    ours_or_standard = OURS | sys.stdlib_module_names
    text = run(
        f"import sys; before = set(sys.modules); import {', '.join(STANDARD_LIBRARY_ONLY.split())}\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    assert set(text.split()) <= ours_or_standard
