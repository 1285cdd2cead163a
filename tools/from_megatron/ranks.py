"""How many ranks a command starts: of torchrun its nodes x processes, of srun and mpirun its tasks."""

from collections.abc import Sequence

from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.unknown import OpenText, ScriptWord, Unknown

_PER_NODE = ("nproc-per-node", "nproc_per_node", "num_gpus", "gpus-per-node", "num-gpus")
_NODES = ("nnodes", "num_nodes", "num_machines", "num-nodes")
_ALL = ("num_processes",)
_TASKS = ("ntasks", "n", "np")
_STARTERS = ("srun", "mpirun", "mpiexec", "aprun", "jsrun", "yhrun")


def ranks(launch: Launch) -> int | None:
    """None where that is not known."""
    words = [str(word) for word in launch.launcher]
    if (total := _option(words, _ALL)) is not None:
        return _whole(total)
    per_node, nodes = _option(words, _PER_NODE), _option(words, _NODES)
    if per_node is not None:
        return _product("1" if nodes is None else nodes.rpartition(":")[2], per_node)
    if not any(word.rpartition("/")[2] in _STARTERS for word in words):
        return None
    if (tasks := _option(words, _TASKS)) is not None:
        return _whole(tasks)
    count = _option(words, ("nodes", "N")) or launch.slurm.get("SLURM_NNODES")
    each = _option(words, ("ntasks-per-node",)) or launch.slurm.get("SLURM_NTASKS_PER_NODE")
    if "SLURM_NTASKS" in launch.slurm and _option(words, ("nodes", "N", "ntasks-per-node")) is None:
        return _whole(launch.slurm["SLURM_NTASKS"])
    return _product(count, each)


def rank_unknowns(launch: Launch) -> list[Unknown]:
    """What the number of ranks depends on and is not known."""
    found: list[Unknown] = []
    names = (*_PER_NODE, *_NODES, *_ALL, *_TASKS, "nodes", "N", "ntasks-per-node")
    for before, word in zip(["", *launch.launcher], launch.launcher, strict=False):
        name = str(word).lstrip("-").partition("=")[0] if "=" in str(word) else str(before).lstrip("-")
        if isinstance(word, OpenText) and name in names:
            found += word.unknowns
    return found


def _option(words: Sequence[ScriptWord], names: Sequence[str]) -> str | None:
    """The value of ``--name value`` or ``--name=value``."""
    for number, word in enumerate(map(str, words)):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names:
            return value if equals else next((str(each) for each in words[number + 1 :]), None)
    return None


def _product(nodes: str | None, per_node: str | None) -> int | None:
    counts = _whole(nodes or ""), _whole(per_node or "")
    return None if counts[0] is None or counts[1] is None else counts[0] * counts[1]


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
