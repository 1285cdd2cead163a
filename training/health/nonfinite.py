"""A NaN or Inf in loss or gradient: found before the update, run again, explained, and not trained on.

The second run of the same microbatches, from the same weights and random numbers, tells a passing fault of the
hardware (it gives numbers) from software or data (it does not). Weights were not touched in between, so a passing
fault costs two steps' time and leaves no trace in the training.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer

from data.gaps import NO_GAPS, Gaps
from data.loader import Batch
from parallel.ddp import Chunks
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.launch import node_name
from program.errors import SharedFault
from training.checkpoint import folders
from training.checkpoint.agreement import gathered, on_first_rank
from training.health.names import non_finite, parameter_names
from training.health.nonfinite_locate import Evidence, NonfiniteOrigin, NonfinitePlace, locate
from training.health.nonfinite_probe import NonfiniteProbe
from training.health.replay import Before, Trace
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import GradientResult, StepAgain, StepResult, UpdateDecision, skip_overflows

MOST_SKIPS = 10
"""Updates skipped in a row, after which something is wrong with more than the data."""


NONFINITE = "nonfinite"
"""RUN_DIR/nonfinite/iter_0000003: what was found at iteration 3, and its batch."""
FILES_PER_FOLDER = 1000


class NonFinite:
    """Decides about non-finite gradients. All ranks call it at the same moments, and decide alike."""

    def __init__(
        self,
        policy: str,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        ranks: Ranks,
        run_dir: Path,
        gaps: Gaps = NO_GAPS,
        note: Note = unnoted,
    ) -> None:
        self.policy, self.chunks, self.ranks, self.run_dir, self.note = policy, chunks, ranks, run_dir, note
        self.gaps = gaps
        self.before, self.probe = Before(chunks, optimizer, ranks), NonfiniteProbe(chunks)
        self.skips = 0

    def begin(self) -> None:
        """Before the first microbatch of an iteration."""
        self.before.keep()
        self.probe.forget()

    def replay(
        self, step: StepAgain, first: StepResult, microbatches: Sequence[Batch | None], progress: Progress
    ) -> StepResult:
        """The same step once more: it updates if it is finite now. Raises SharedFault where training cannot go on.

        step: runs the microbatches of ``first`` again, by a decision.
        """
        evidence = gathered([self._evidence()], self.ranks)
        trace = Trace(self.chunks, self.ranks)
        self.before.restore()
        with trace.attached():
            second = step(update_if_finite)
        found = evidence if second.finite else gathered([self._traced(trace)], self.ranks)
        folder = self.run_dir / NONFINITE / folders.name_of(progress.iteration + 1)
        self._leave(folder, first, second, found, microbatches, progress)
        said = f"iteration {progress.iteration + 1}: loss {first.loss:g}, gradient norm {_text(first)}"
        if second.finite:
            self.skips = 0
            text = (
                f"{said}, but the same microbatches give loss {second.loss:g} and norm {_text(second)} when they run "
                f"again: a passing fault of the hardware; first in {_named(locate(found))}. Weights were not touched, "
                f"the second result counts, training goes on. Details: {folder}"
            )
            self.ranks.say(text)
            self.note("replayed", progress.iteration + 1, text=text)
        else:
            self._stop_or_skip(said, found, folder, progress)
        return second

    def _stop_or_skip(self, said: str, found: list[Evidence], folder: Path, progress: Progress) -> None:
        self.skips += 1
        cause = f"{said}, and the same again when the microbatches ran again: no passing fault, but software or data"
        origin = locate(found)
        rank = origin.ranks[0].rank if origin else None
        text = f"{cause}; first in {_named(origin)}. No weight was changed. Batch and details: {folder}."
        broken = any(one.weights for one in found)
        if self.policy == "skip" and not broken and self.skips <= MOST_SKIPS:
            self.before.restore_buffers()
            self.ranks.say(f"{text} The update is skipped (fault.nonfinite)")
            self.note("nonfinite", progress.iteration + 1, skipped=True, text=text)
            return
        newest = on_first_rank(lambda: folders.latest(folders.checkpoints(self.run_dir)), self.ranks)
        good = f" The newest good checkpoint is {newest}." if newest else ""
        if self.policy == "skip":
            reason = "weights are broken" if broken else f"{MOST_SKIPS} updates in a row were skipped"
            raise SharedFault(f"{text} Stopped, though fault.nonfinite is skip: {reason}.{good}", rank=rank)
        raise SharedFault(f'{text}{good} To skip such batches, set fault.nonfinite = "skip".', rank=rank)

    def _own(self) -> Evidence:
        at = self.ranks.at
        return Evidence(rank=self.ranks.rank, host=node_name(os.environ), stage=at.pp, data_rank=at.dp)

    def _evidence(self) -> Evidence:
        """Of the first run: in which chunk, and where only gradients are bad, in which of them."""
        evidence, layout, stage = self._own(), self.ranks.layout, self.ranks.at.pp
        if (output := self.probe.bad_output()) is not None:
            microbatch, number = output
            evidence.forward = NonfinitePlace(microbatch, number * layout.pp + stage, 0, "the forward pass")
        found = self._broken_gradients()
        if bad := self.probe.bad_gradients():
            depth = layout.chunks - 1 - (max(bad) * layout.pp + stage)
            broken = found[max(bad)]
            evidence.backward = NonfinitePlace(
                -1, depth, 0, f"the gradient of {(broken or ['an unknown parameter'])[-1]}"
            )
        return evidence

    def _broken_gradients(self) -> list[list[str]]:
        """By chunk, parameters whose gradient is not finite; of shards, after their reduction, on any data rank.

        Collective where weights are sharded: what this rank made may lie in another one's shard.
        """
        named: list[list[tuple[Any, str]]] = [list(parameter_names([chunk]).items()) for chunk in self.chunks]
        found = [non_finite([(name, param.main_grad) for param, name in chunk]) for chunk in named]
        if not isinstance(self.chunks[0], FullyShardedChunk):
            return found
        broken = set(gathered([name for chunk in found for name in chunk], self.ranks))
        return [[name for _, name in chunk if name in broken] for chunk in named]

    def _traced(self, trace: Trace) -> Evidence:
        """Of the second run: in which module or parameter."""
        evidence = self._own()
        evidence.weights = non_finite([(name, param) for param, name in parameter_names(self.chunks).items()])
        evidence.forward, evidence.backward = trace.forward, trace.backward
        return evidence

    def _leave(
        self,
        folder: Path,
        first: GradientResult,
        second: GradientResult,
        found: list[Evidence],
        microbatches: Sequence[Batch | None],
        progress: Progress,
    ) -> None:
        """The batch, by the ranks that hold it, and ``found.json``. A disk that is full too hides nothing."""
        try:
            if self.ranks.at.tp == 0 and self.ranks.is_first_stage:
                _write_batch(folder, microbatches, self.ranks)
            if self.ranks.rank == 0:
                sample = self.gaps.behind(progress.consumed_samples + 1) - 1
                _write_found(folder, first, second, found, progress.iteration + 1, sample)
        except OSError as error:
            self.ranks.say(f"{folder} could not be written: {error}")


def update_if_finite(gradients: GradientResult) -> UpdateDecision:
    """Of a replay: there is no third run."""
    return skip_overflows(gradients) if gradients.finite else UpdateDecision.SKIP


def _write_batch(folder: Path, microbatches: Sequence[Batch | None], ranks: Ranks) -> None:
    """One file from each data rank and part of the sequence, in folders of no more than ``FILES_PER_FOLDER``."""
    held = [batch for batch in microbatches if batch is not None]
    number, files = ranks.at.dp * ranks.layout.cp + ranks.at.cp, ranks.layout.dp * ranks.layout.cp
    if files > FILES_PER_FOLDER:
        folder = folder / f"{number // FILES_PER_FOLDER:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    which = f"data-{ranks.at.dp:05d}" + (f"-context-{ranks.at.cp:03d}" if ranks.layout.cp > 1 else "")
    arrays = {
        name: torch.stack([getattr(batch, name) for batch in held]).cpu().numpy().astype(np.int32)
        for name in ("tokens", "labels")
    }
    np.savez(folder / f"{which}.npz", allow_pickle=False, **arrays)


def _write_found(
    folder: Path, first: GradientResult, second: GradientResult, found: list[Evidence], iteration: int, sample: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    origin = locate(found)
    content = {
        "what": "Loss or gradient of this iteration were NaN or Inf. data-*.npz are its batch, by data rank: "
        "tokens and labels, int32 [microbatches, samples, tokens]; microbatches run in this order.",
        "iteration": iteration,
        "first_sample": sample,
        "passing": second.finite,
        "origin": origin.as_json() if origin else None,
        "first_run": {"loss": str(first.loss), "grad_norm": _text(first), "tokens": first.tokens},
        "second_run": {"loss": str(second.loss), "grad_norm": _text(second), "tokens": second.tokens},
        "ranks": [asdict(one) for one in found if one.weights or one.forward or one.backward],
    }
    (folder / "found.json").write_text(json.dumps(content, indent=2) + "\n")


def _text(gradients: GradientResult) -> str:
    own = gradients.grad_norm
    norm = gradients.mean_norm if own is None or math.isfinite(own) else own
    return f"{norm:g}"


def _named(origin: NonfiniteOrigin | None) -> str:
    return str(origin) if origin else "an unknown place: no rank's own results were bad, only the reduced ones"
