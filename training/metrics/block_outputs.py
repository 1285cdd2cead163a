"""How large activations become: of what each block hands on to the next one, on demand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.shapes import GPTShape
from models.sublayers import block_of, sublayers_per_block
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from training.loop import Callback
from training.metrics.values import Value
from training.progress import Progress


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
