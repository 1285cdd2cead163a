"""Ranks that compute slower than their peers: which, how much; or that it is not computing that holds all up.

A stopwatch times some modules' forward passes: a rank's own computing, without the waiting for others.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel.ddp import Chunks, unwrap
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.layout import Layout
from training.checkpoint.agreement import gathered_rows
from training.health.names import host_of
from training.loop import Callback
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import StepResult


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


RATIO = 1.3
"""How many times as long as its peers a rank must compute to be named. Healthy cards of one kind differ by a few
percent (clocks, temperature), and experts by their load; a card that throttles takes 1.5 times as long or more."""
RECOVERED = 1.1
"""A named rank that is no slower than this is as fast as its peers again, and can be named again."""
DELAYED = 1.5
"""How many times as long as its fastest window an iteration must take, with no rank slow, to be said."""
MOST_NAMED = 4
"""Ranks that a comparison names with their hosts, the slowest ones; of more, the number is said."""
LEAST_S = 5e-4
"""Shorter times are noise: a rank is not slow by less than that."""


class Stragglers(Callback):
    """Compares the ranks every ``interval`` iterations: one gathering of 16 bytes from each.

    What two comparisons in a row find is said, once. A rank's time is the lower quartile of its iterations', so that
    what disturbs some of them (another program, a save) does not count, but a slow card, or processor, does.
    """

    def __init__(self, watch: Stopwatch, interval: int, ranks: Ranks, note: Note = unnoted) -> None:
        self.watch, self.interval, self.ranks, self.note = watch, interval, ranks, note
        self.named, self.suspected, self.iteration = set[int](), set[int](), 0
        self.groups = peers(ranks.layout, watch.whole_stage)
        self.steps_s: list[float] = []
        self.fastest_s, self.delays, self.began_s = math.inf, 0, 0.0

    def before_step(self, progress: Progress) -> None:
        self.began_s = time.perf_counter()
        self.watch.begin()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.steps_s.append(time.perf_counter() - self.began_s)
        self.iteration = progress.iteration
        if progress.iteration % self.interval:
            return
        count, step_s = len(self.steps_s), statistics.median(self.steps_s)
        self.steps_s = []
        table = gathered_rows([self.watch.quartile_s(), step_s], self.ranks)
        slow = slowness([row[0] for row in table], self.groups)
        self._tell_slow(slow, count)
        explained = max(slow.values()) >= RATIO
        self._tell_delay(statistics.median(row[1] for row in table), explained)

    def _tell_slow(self, slow: Mapping[int, float], count: int) -> None:
        self.named = {rank for rank in self.named if slow[rank] > RECOVERED}
        now = {rank for rank in slow if slow[rank] >= RATIO}
        confirmed, self.suspected = now & self.suspected, now
        new = sorted(confirmed - self.named, key=lambda rank: (-slow[rank], rank))
        self.named |= confirmed
        for rank in new[:MOST_NAMED]:
            others = next(len(group) - 1 for group in self.groups if rank in group)
            text = (
                f"rank {rank} ({host_of(rank, self.ranks)}) computes {slow[rank]:.1f}x slower than its {others} "
                f"peer(s) (lower quartile of {count} iterations), and all wait for it. Communication is not the cause"
            )
            self.ranks.say(text)
            self.note("straggler", self.iteration, rank=rank, text=text)
        if rest := new[MOST_NAMED:]:
            self.ranks.say(f"{len(rest)} more rank(s) compute slower than their peers, by up to {slow[rest[0]]:.1f}x")

    def _tell_delay(self, step_s: float, explained: bool) -> None:
        """All ranks know the same times, so they decide alike."""
        late = step_s > DELAYED * self.fastest_s + LEAST_S and not explained
        self.delays = self.delays + 1 if late else 0
        if self.delays == 2 and self.watch.parts:
            text = (
                f"iterations take {step_s / self.fastest_s:.1f}x as long as they did ({step_s:.3g} s), and no rank "
                "computes slower than its peers: communication, data or the whole machine is the cause"
            )
            self.ranks.say(text)
            self.note("slow", self.iteration, text=text)
        self.fastest_s = min(self.fastest_s, step_s)


def peers(layout: Layout, same_stage: bool) -> list[list[int]]:
    """The ranks in groups whose computing should take as long on each: those of a stage, or all."""
    stages = [layout.coordinates(rank).pp if same_stage else 0 for rank in range(layout.world_size)]
    return [[rank for rank, other in enumerate(stages) if other == stage] for stage in sorted(set(stages))]


def slowness(times_s: Sequence[float], groups: Sequence[Sequence[int]]) -> dict[int, float]:
    """Rank -> how many times as long as usual in its group it takes: as the median, or of two ranks the faster one."""
    found = dict[int, float]()
    for group in groups:
        usual = statistics.median_low(times_s[rank] for rank in group)
        for rank in group:
            beyond = usual > 0 and times_s[rank] > usual + LEAST_S
            found[rank] = times_s[rank] / usual if beyond else 1.0
    return found
