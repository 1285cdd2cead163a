"""Norms of weights and gradients, and zeros in gradients: of the whole model, and block by block."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from models.names import canonical
from models.shapes import GPTShape
from parallel.ddp import Chunks
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
