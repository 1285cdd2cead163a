"""How many ranks a launcher starts."""

from collections.abc import Sequence

from tools.from_megatron.script import Launch

_PER_NODE = ("nproc-per-node", "nproc_per_node")
_NODES = ("nnodes",)


def ranks(launch: Launch) -> int | None:
    """Of torchrun its nodes x processes, of srun its tasks; None where that is not known."""
    per_node, nodes = _option(launch.launcher, _PER_NODE), _option(launch.launcher, _NODES)
    if per_node is not None:
        return _product("1" if nodes is None else nodes.rpartition(":")[2], per_node)
    if not any(word.endswith(("srun", "mpirun")) for word in launch.launcher):
        return None
    if (tasks := _option(launch.launcher, ("ntasks", "n", "np"))) is not None:
        return _whole(tasks)
    count = _option(launch.launcher, ("nodes", "N")) or launch.slurm.get("SLURM_NNODES")
    each = _option(launch.launcher, ("ntasks-per-node",)) or launch.slurm.get("SLURM_NTASKS_PER_NODE")
    if "SLURM_NTASKS" in launch.slurm:
        return _whole(launch.slurm["SLURM_NTASKS"])
    return _product(count, each)


def _option(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of ``--name value`` or ``--name=value``."""
    for number, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names:
            return value if equals else next(iter(words[number + 1 :]), None)
    return None


def _product(nodes: str | None, per_node: str | None) -> int | None:
    counts = _whole(nodes or ""), _whole(per_node or "")
    return None if counts[0] is None or counts[1] is None else counts[0] * counts[1]


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
