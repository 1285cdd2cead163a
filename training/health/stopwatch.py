"""How long a rank's own computing takes, without the waiting for others: of some modules' forward passes."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel.ddp import Chunks, unwrap
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks


class Stopwatch:
    """Times modules in which no rank waits for another, in the first microbatch of each iteration.

    Whole chunks, where nothing is communicated within them; else their core attention, which every rank has on its
    own but for context parallelism; then ranks cannot be distinguished. By CUDA events on a GPU (read an iteration
    later, so that the host does not wait), by the clock on a CPU: two calls per module and iteration.
    """

    def __init__(self, chunks: Chunks, ranks: Ranks) -> None:
        layout = ranks.layout
        self.cuda = ranks.device.type == "cuda"
        apart = layout.tp == layout.ep == layout.cp == 1
        gathers = any(isinstance(one, FullyShardedChunk) or one.ddp_config.overlap_param_gather for one in chunks)
        self.whole_stage = apart and not gathers and layout.dp > 1
        """Else one attention takes as long on every rank, whatever its stage; a chunk, on ranks of its stage."""
        graphed = any(chunk.config.cuda_graph_impl != "none" for chunk in chunks)  # no hook runs within a layer
        alone = layout.cp == 1 and not graphed
        self.parts = _chunks(chunks) if self.whole_stage else _attention(chunks) if alone else []
        self.running = [False] * len(self.parts)
        self.started: list[Any] = [None] * len(self.parts)
        self.pairs: list[tuple[Any, Any]] = []
        self.times_s: list[float] = []
        start, end = self._start, self._end
        if self.cuda:  # train.compile would trace the events, and compile a layer again for each part's number
            start, end = torch.compiler.disable(start), torch.compiler.disable(end)
        for number, part in enumerate(self.parts):
            part.register_forward_pre_hook(lambda module, _inputs, number=number: start(number, module))
            part.register_forward_hook(lambda _module, _inputs, _output, number=number: end(number))

    def begin(self) -> None:
        """An iteration begins: what the last one measured is read, and each part is timed once more."""
        if self.pairs:
            spent = sum(_between(first, last) for first, last in self.pairs)
            self.times_s.append(spent if self.whole_stage else spent / len(self.pairs))
        self.pairs = []
        self.running = [True] * len(self.parts)

    def quartile_s(self) -> float:
        """The lower one of the iterations since the last call: of all chunks together, or of an attention; 0.0 without
        any."""
        times_s, self.times_s = self.times_s, []
        return statistics.quantiles(times_s, n=4, method="inclusive")[0] if len(times_s) > 1 else sum(times_s)

    def _start(self, number: int, module: nn.Module) -> None:
        if self.running[number] and module.training:
            self.started[number] = self._now()

    def _end(self, number: int) -> None:
        if self.running[number] and self.started[number] is not None:
            self.pairs.append((self.started[number], self._now()))
            self.running[number], self.started[number] = False, None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(first: Any, last: Any) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


def _chunks(chunks: Chunks) -> Sequence[nn.Module]:
    return [unwrap(chunk) for chunk in chunks]


def _attention(chunks: Chunks) -> Sequence[nn.Module]:
    return [
        module
        for chunk in chunks
        for path, module in unwrap(chunk).named_modules()
        if path.rpartition(".")[2] == "core_attention"
    ]
