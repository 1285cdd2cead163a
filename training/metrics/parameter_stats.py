"""Norms of weights and gradients, and zeros in gradients: of the whole model, and block by block. On demand, how large
activations become: of what each block hands on to the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from models.names import canonical
from models.shapes import GPTShape
from models.sublayers import block_of, sublayers_per_block
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from training.checkpoint.model_state import enumerated
from training.checkpoint.optimizer_state import MainParam, main_params, owns
from training.loop import Callback
from training.metrics.values import Value
from training.progress import Progress


@dataclass(kw_only=True, slots=True, frozen=True)
class Due:
    """What is measured in an iteration; ``wanted`` of ParameterStats answers it."""

    total: bool = False
    """Of the whole model."""
    blocks: bool = False
    """Of each block."""


class ParameterStats(Callback):
    """Measures fp32 weights and gradients between their reduction and their update.

    Every element counts once, on the rank that would save it. Costs a pass over this rank's share of weights and
    gradients in an iteration that is due, and one all-reduce of blocks x 3 numbers when it is reported; the device
    is waited for there. Nothing in other iterations, and nothing where the update is skipped.
    """

    def __init__(
        self,
        shape: GPTShape,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        ranks: Ranks,
        wanted: Callable[[int], Due],
        *,
        params_norm: bool,
        num_zeros: bool,
    ) -> None:
        """wanted: what is due in an iteration, by its number. params_norm, num_zeros: what ``Due.total`` means."""
        self.ranks, self.wanted = ranks, wanted
        self.params_norm, self.num_zeros = params_norm, num_zeros
        self.rows = rows(shape)
        self.owned = owned_params(chunks, optimizer, ranks)
        self.due = Due()
        self.sums: Tensor | None = None

    def before_step(self, progress: Progress) -> None:
        self.due, self.sums = self.wanted(progress.iteration + 1), None

    @torch.no_grad()
    def before_update(self) -> None:
        """Gradients are reduced and unscaled, not clipped; weights are those that they were computed with."""
        if not (self.due.total or self.due.blocks):
            return
        # fp64 [blocks, 3]: squares of weights, squares of gradients, zeros in gradients
        self.sums = torch.zeros(len(self.rows), 3, dtype=torch.float64, device=self.ranks.device)
        numbers = {name: number for number, name in enumerate(self.rows)}
        for name, param in self.owned:
            row = self.sums[numbers[name]]
            row[0] += torch.linalg.vector_norm(param.tensor, dtype=torch.float32).double() ** 2
            if (gradient := param.gradient) is not None:
                row[1] += torch.linalg.vector_norm(gradient, dtype=torch.float32).double() ** 2
                row[2] += gradient.numel() - torch.count_nonzero(gradient)

    def report(self) -> dict[str, Value]:
        """What ``before_update`` measured in this iteration, the same on every rank; nothing where it did not."""
        if self.sums is None:
            return {}
        dist.all_reduce(self.sums)
        weights, gradients, zeros = self.sums.T.tolist()
        values: dict[str, Value] = {}
        if self.due.total and self.params_norm:
            values["param_norm"] = sum(weights) ** 0.5
        if self.due.total and self.num_zeros:
            values["zeros_in_grad"] = int(sum(zeros))
        if self.due.blocks:
            values["layer_param_norm"] = {name: one**0.5 for name, one in zip(self.rows, weights, strict=True)}
            values["layer_grad_norm"] = {name: one**0.5 for name, one in zip(self.rows, gradients, strict=True)}
        self.sums = None
        return values


def rows(shape: GPTShape) -> list[str]:
    """Embeddings, blocks by their global number, depths of multi-token prediction, and what comes after the blocks."""
    blocks = [str(number) for number in range(shape.num_layers)]
    return ["embedding", *blocks, *(f"mtp.{depth}" for depth in range(shape.mtp_num_layers)), "output"]


def row_of(name: str) -> str:
    """The row of a parameter, by its canonical name."""
    kind, number, *_ = name.split(".")
    if kind in ("layers", "mtp"):
        return number if kind == "layers" else f"mtp.{number}"
    return "embedding" if kind.endswith("embeddings") else "output"


def owned_params(chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> list[tuple[str, MainParam]]:
    """The weights that this rank updates and that no other rank counts, with their row."""
    mains = dict(main_params(optimizer))
    return [
        (row_of(canonical(one.regions[0].key)), mains[one.tensor])
        for number, one in enumerated(chunks)
        if one.tensor in mains and owns(number, one, mains[one.tensor], ranks)
    ]


class BlockOutputs(Callback):
    """Root mean square and largest absolute value of the residual stream after each block, in forward passes that
    have gradients: neither evaluation nor the first of the two passes of recomputed activations.

    Costs two reductions of [s, b, h] per block and microbatch in an iteration that is due, and two all-reduces of a
    few numbers per block when it is reported. In other iterations, one Python call per block and microbatch.
    """

    def __init__(self, shape: GPTShape, chunks: Chunks, ranks: Ranks, wanted: Callable[[int], bool]) -> None:
        """wanted: whether an iteration is due, by its number. Hooks stay for the model's life."""
        self.ranks, self.wanted, self.due = ranks, wanted, False
        # fp64 [blocks, 2]: squares and their number; [blocks]: the largest
        self.sums = torch.zeros(shape.num_layers, 2, dtype=torch.float64, device=ranks.device)
        self.largest = torch.zeros(shape.num_layers, dtype=torch.float64, device=ranks.device)
        for chunk in chunks:
            for block, module in block_ends(shape, unwrap(chunk)):
                module.register_forward_hook(partial(self._measure, block))

    def before_step(self, progress: Progress) -> None:
        self.due = self.wanted(progress.iteration + 1)
        if self.due:
            self.sums.zero_()
            self.largest.zero_()

    def report(self) -> dict[str, Value]:
        """Over all ranks; nothing in an iteration that was not due. Collective."""
        if not self.due:
            return {}
        dist.all_reduce(self.sums)
        dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        rms = (self.sums[:, 0] / self.sums[:, 1].clamp(min=1)).sqrt().tolist()
        return {
            "layer_output_rms": {str(block): value for block, value in enumerate(rms)},
            "layer_output_max": {str(block): value for block, value in enumerate(self.largest.tolist())},
        }

    def _measure(self, block: int, module: nn.Module, _inputs: object, output: Any) -> None:
        if not (self.due and module.training and torch.is_grad_enabled()):
            return
        hidden: Tensor = (output[0] if isinstance(output, tuple) else output).detach()
        self.sums[block, 0] += torch.linalg.vector_norm(hidden, dtype=torch.float32).double() ** 2
        self.sums[block, 1] += hidden.numel()
        self.largest[block] = torch.maximum(self.largest[block], hidden.abs().max().double())


def block_ends(shape: GPTShape, chunk: nn.Module) -> list[tuple[int, nn.Module]]:
    """The last sublayer of each block of an unwrapped chunk, by the block's global number."""
    decoder: Any = getattr(chunk, "decoder", None)
    found = []
    for layer in decoder.layers if decoder is not None else ():
        if layer.layer_number % sublayers_per_block(shape) == 0:
            found.append((block_of(shape, layer.layer_number)[0], layer))
    return found
