"""What each rank's own work came to, noted before others' is mixed into it: one sum of every output and gradient.

When a step ends without a number, NaN has spread to all ranks; these sums, taken on the device and read only then,
tell where it was first. They cost a pass over each chunk's output per microbatch, and one over the gradients per
iteration, before they are reduced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel.ddp import Chunks, unwrap
from parallel.fsdp import FullyShardedChunk


class NonfiniteProbe:
    """Notes sums while gradients are computed. Hooks stay on the chunks for the model's life."""

    def __init__(self, chunks: Chunks) -> None:
        self.outputs: list[list[Tensor]] = [[] for _ in chunks]
        self.gradients: list[list[Tensor]] = [[] for _ in chunks]
        for number, chunk in enumerate(chunks):
            unwrap(chunk).register_forward_hook(partial(self._note_output, number))
            if isinstance(chunk, FullyShardedChunk):
                chunk.observe_reductions(partial(self._note_reduced, number))
                continue
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.start_grad_sync = partial(self._note_gradients, number, group, group.start_grad_sync)

    def forget(self) -> None:
        """What was noted before: another iteration begins, or the same one again."""
        for noted in (*self.outputs, *self.gradients):
            noted.clear()

    def bad_output(self) -> tuple[int, int] | None:
        """(microbatch, chunk) of the first output that was not finite."""
        found = [
            (microbatch, number)
            for number, sums in enumerate(self.outputs)
            for microbatch, total in enumerate(sums)
            if not bool(total.isfinite())
        ]
        return min(found, default=None)

    def bad_gradients(self) -> list[int]:
        """The chunks for whose parameters this rank's own gradients, not yet reduced, were not finite."""
        return [number for number, sums in enumerate(self.gradients) if any(not bool(s.isfinite()) for s in sums)]

    def _note_output(self, number: int, module: nn.Module, _inputs: object, output: Any) -> None:
        if module.training and torch.is_grad_enabled() and isinstance(output, Tensor):
            self.outputs[number].append(output.detach().sum(dtype=torch.float32))

    def _note_gradients(self, number: int, group: Any, reduce: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if group.grad_reduce_handle is None:  # else it is under way, and no longer ours alone
            self.gradients[number] += [bucket.grad_data.sum(dtype=torch.float32) for bucket in group.buckets]
        reduce(*args, **kwargs)

    def _note_reduced(self, number: int, own: Tensor) -> None:
        """Of a unit and a microbatch: one running sum, as there are many of them."""
        total = own.sum(dtype=torch.float32)
        if self.gradients[number]:
            self.gradients[number][0] += total
        else:
            self.gradients[number].append(total)
