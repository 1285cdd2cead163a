"""The global batch size as a pure function of consumed samples, so that a resumed run needs no state for it.

Steps are Megatron-LM's ``step_batch_size_schedule``: a size from some token on. A ramp is its older
``rampup_batch_size = (first size, increment, samples)``, which megatron-core 0.19.2 ignores with a warning: the size
grows by the increment at equal distances in samples and reaches ``global_batch_size`` when ``samples`` are consumed.
"""

import itertools
import math
import re
from dataclasses import dataclass

from training.config.divisibility import nearest

_NUMBER = r"(\d+(?:\.\d*)?(?:E\+?\d+)?)([KMBT]?)"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

type Steps = tuple[tuple[int, int], ...]
"""(where, size of the global batch from there on), ascending; the first is at 0."""


def read_steps(text: str) -> Steps:
    """Of "0:16 2.4B:320", where each size begins, in tokens. Raises ValueError that says what cannot be read."""
    steps = []
    for word in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(f"{_NUMBER}:{_NUMBER}", word.upper())
        if match is None:
            raise ValueError(f'expected "TOKENS:SIZE" as in 2.4B:320, found "{word}"')
        at, size = (int(float(match[one]) * _UNITS[match[one + 1]]) for one in (1, 3))
        steps.append((at, size))
    steps.sort()
    if steps[0][0] != 0 or not _ascend(steps) or any(size < 1 for _, size in steps):
        raise ValueError(
            f'expected sizes of 1 or more, from 0 tokens on and each from another token on, found "{text}"'
        )
    return tuple(steps)


def _ascend(steps: Steps | list[tuple[int, int]]) -> bool:
    return all(before < after for (before, _), (after, _) in itertools.pairwise(steps))


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchSchedule:
    """How many samples the next iteration takes, given how many were consumed before it."""

    global_batch_size: int
    """Samples per iteration once the ramp is over."""

    rampup_batch_size: tuple[int, int, int] | None = None
    """(samples per iteration at the start, increment, consumed samples at which the full size is reached)."""

    steps: Steps | None = None
    """In place of a ramp: (consumed samples, samples per iteration from there on)."""

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Samples of the iteration that starts after ``consumed_samples``."""
        if self.steps is not None:
            return next(size for begin, size in reversed(self.steps) if consumed_samples >= begin)
        if self.rampup_batch_size is None or consumed_samples >= self.rampup_batch_size[2]:
            return self.global_batch_size
        start, increment, samples = self.rampup_batch_size
        return start + increment * (consumed_samples * self._increments() // samples)

    def num_microbatches(self, consumed_samples: int, micro_batch_size: int, dp: int) -> int:
        """Microbatches per data-parallel replica of the iteration that starts after ``consumed_samples``."""
        return self.global_batch_size_at(consumed_samples) // (micro_batch_size * dp)

    def sizes(self) -> list[int]:
        """Every global batch size that occurs, ascending."""
        if self.steps is not None:
            return sorted({size for _, size in self.steps})
        if self.rampup_batch_size is None:
            return [self.global_batch_size]
        start, increment, _ = self.rampup_batch_size
        return list(range(start, self.global_batch_size + 1, increment))

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Samples that are consumed ``iterations`` iterations after ``consumed``; costs one step per size."""
        while iterations > 0:
            size, steps = self.global_batch_size_at(consumed), iterations
            if (threshold := self._next_threshold(consumed)) is not None:
                steps = min(iterations, math.ceil((threshold - consumed) / size))
            consumed += steps * size
            iterations -= steps
        return consumed

    def problems(self, micro_batch_size: int, dp: int) -> list[str]:
        """Sizes that cannot be dealt out in whole microbatches to ``dp`` replicas; the nearest that can."""
        if malformed := self._steps_problems() or self._ramp_problems():
            return malformed
        piece = micro_batch_size * dp
        uneven = [size for size in self.sizes() if size % piece]
        if not uneven:
            return []
        product = f"train.micro_batch_size {micro_batch_size} x DP {dp} = {piece}"
        if self.global_batch_size % piece:
            return [
                f"train.global_batch_size {self.global_batch_size} is not a multiple of {product} samples. "
                f"Use {nearest(self.global_batch_size, piece)}, or another train.micro_batch_size or layout."
            ]
        listed = ", ".join(map(str, uneven[:4])) + (", ..." if len(uneven) > 4 else "")
        if self.steps is not None:
            near = ", ".join(f"{size}: {nearest(size, piece)}" for size in uneven)
            return [f"train.step_batch_size_schedule: {listed} are not multiples of {product} samples. Use {near}."]
        return [
            f"train.rampup_batch_size: {len(uneven)} of {len(self.sizes())} batch sizes on the way "
            f"to {self.global_batch_size} ({listed}) are not multiples of {product} samples. "
            f"A near ramp that works: {self._working_ramp(piece)}."
        ]

    def _working_ramp(self, piece: int) -> list[int]:
        """The nearest ramp of multiples of ``piece``, of which ``global_batch_size`` must be one."""
        start, increment, samples = self.rampup_batch_size or (self.global_batch_size, piece, 1)
        start = min(max(round(start / piece), 1) * piece, self.global_batch_size)
        way = self.global_batch_size - start
        increments = [size for size in range(piece, way + 1, piece) if way % size == 0] or [piece]
        return [start, min(increments, key=lambda size: abs(size - increment)), samples]

    def _steps_problems(self) -> list[str]:
        if self.steps is None:
            return []
        if self.rampup_batch_size is not None:
            return ["train.step_batch_size_schedule and train.rampup_batch_size: can only specify one of them."]
        if not _ascend(self.steps) or not self.steps or self.steps[0][0] != 0:
            return [
                "train.step_batch_size_schedule: expected each size to begin with another sample, of "
                f"model.seq_length tokens, found the samples {[begin for begin, _ in self.steps]}."
            ]
        if self.steps[-1][1] != self.global_batch_size:
            return [
                f"train.step_batch_size_schedule ends with {self.steps[-1][1]} samples, which train.global_batch_size "
                f"must be, found {self.global_batch_size}."
            ]
        return []

    def _ramp_problems(self) -> list[str]:
        if self.rampup_batch_size is None:
            return []
        start, increment, samples = self.rampup_batch_size
        full = self.global_batch_size
        found = f"found ({start}, {increment}, {samples}) with train.global_batch_size {full}"
        if min(start, increment, samples) < 1 or start > full:
            return [
                "train.rampup_batch_size: expected (first size, increment, samples), each 1 or more and the "
                f"first size at most train.global_batch_size, {found}."
            ]
        if (full - start) % increment:
            return [
                "train.rampup_batch_size: the increment must divide the way from the first to the full size, "
                f"{full} - {start} = {full - start} samples, {found}."
            ]
        return []

    def _increments(self) -> int:
        """How often the size grows."""
        start, increment, _ = self.rampup_batch_size or (self.global_batch_size, 1, 0)
        return (self.global_batch_size - start) // increment

    def _next_threshold(self, consumed_samples: int) -> int | None:
        """Consumed samples from which the size is the next one; None when it stays."""
        if self.steps is not None:
            return next((begin for begin, _ in self.steps if begin > consumed_samples), None)
        if self.rampup_batch_size is None or consumed_samples >= self.rampup_batch_size[2]:
            return None
        increments, samples = self._increments(), self.rampup_batch_size[2]
        grown = consumed_samples * increments // samples
        return math.ceil((grown + 1) * samples / increments) if grown < increments else None
