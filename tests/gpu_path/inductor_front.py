"""A hook: train.compile on the emulated device, all of it but Inductor's kernels, for which Triton wants a GPU.

Dynamo, Inductor's decompositions and its partition of forward and backward run; the graphs run operator by operator.
Each graph counts as the launches that Inductor's kernels would be at least: one of each matrix product or attention,
and one of all that hangs together beside these. Inductor may split such a group, at reductions above all.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from models.layers import compiled

EXTERN = ("mm", "bmm", "addmm", "baddbmm")
"""Operators that Inductor leaves to libraries, as it does with attention."""
VIEWS = (
    "view", "permute", "alias", "getitem", "split", "split_with_sizes", "slice", "unsqueeze", "squeeze", "expand",
    "select", "control_deps",
)  # fmt: skip
"""Launch nothing."""


def launches(graph: fx.Graph) -> int:
    """Products and attention, and the groups into which the rest falls without them."""
    group: dict[fx.Node, int] = {}
    extern = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_extern(node):
            extern += 1
            continue
        joined = {group[one] for one in node.all_input_nodes if one in group}
        own = min(joined, default=len(group) + 1)
        group.update({one: own for one, number in group.items() if number in joined})
        group[node] = own
    return extern + len({number for node, number in group.items() if _operator(node) not in VIEWS})


def _is_extern(node: fx.Node) -> bool:
    return _operator(node) in EXTERN or "attention" in _operator(node)


def _operator(node: fx.Node) -> str:
    """``mm`` of ``aten.mm.default``."""
    target: Any = node.target
    return str(target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else target.__name__)


def as_kernels(module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph as it is, which counts as ``launches``."""
    meter = sys.modules.get("tests.gpu_path.launch_meter")
    run = meter.meter.at_most(launches(module.graph), module.forward) if meter else module.forward
    return make_boxed_func(run)


os.environ.pop("TORCHDYNAMO_DISABLE", None)
torch._dynamo.config.disable = False
compiled.Compiler = partial(  # type: ignore[misc, assignment]
    compiled.Compiler,
    backend=aot_autograd(
        fw_compiler=as_kernels,
        bw_compiler=as_kernels,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    ),
)
