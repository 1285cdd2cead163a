"""When the loop asks for a checkpoint: written in the background or waited for, reported, and survived if it fails."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from program.errors import SharedFault, SharedMistake
from training.checkpoint import Contents, folders, room, save, settled
from training.checkpoint.agreement import gathered, on_every_rank, on_first_rank
from training.checkpoint.background.messages import Commit, Outcome, mark_failed
from training.checkpoint.background.saver import BackgroundWriter
from training.checkpoint.saving import begin_save, filled, saved_boxes, state_of
from training.checkpoint.state import JSON
from training.checkpoint.storage import file_name
from training.loop import Callback
from training.progress import Progress
from training.run_lock.lock import LockLost, RunLock
from training.step import RankParts, StepRequests, StepResult

MEBIBYTE = 2**20
TABLE_BYTES = 1 << 20
"""More than the table at the end of a rank's file takes."""
COSTLY = 0.05
"""Share of training time above which saving is worth a warning."""
SETTLED_S = 600.0
"""How long a run must have gone on before that share means anything."""


class SaveCallback(Callback):
    """Saves when called, by all ranks. One that fails is reported, and tried again once room was made for it.

    Training ends over it only where there is no good checkpoint at all.
    """

    def __init__(
        self,
        root: Path,
        contents: Contents,
        parts: RankParts,
        *,
        lock: RunLock | None = None,
        beat: Callable[[], None] = lambda: None,
        before_save: Callable[[Progress], Mapping[str, JSON]] = lambda _: {},
        note: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """note: keeps, on rank 0, that a checkpoint was committed, or failed: ``run_dir.history.Note``."""
        self.root, self.contents, self.ranks = root, contents, parts.ranks
        self.chunks, self.optimizer = parts.chunks, parts.optimizer
        self.lock, self.beat, self.before_save, self.note = lock, beat, before_save, note
        self.timeout_s = 60 * parts.config.parallel.distributed_timeout_minutes
        self.writer = BackgroundWriter(parts.ranks.rank) if parts.config.checkpoint.async_save else None
        self.began_s, self.stalled_s, self.stall_s, self.warned = time.monotonic(), 0.0, 0.0, False
        self.retry, self.retried = False, False
        self.folder, self.saved = root, False
        self.committed, self.failed, self.waits = "", "", False

    def start(self, progress: Progress) -> None:
        """Save in small, on every node: before step 1, not hours into the run. Raises SharedMistake where it fails."""
        boxes = saved_boxes(self.chunks, self.optimizer, self.ranks)
        self.own_bytes = sum(box.data.nbytes for box in boxes if box.writes)
        self.needed_bytes = self._over_all_ranks(self.own_bytes)
        if (text := on_first_rank(self._problem, self.ranks)) is not None:
            raise SharedMistake(text)
        if problems := gathered(self._own_problems(), self.ranks):
            raise SharedMistake(problems[0])
        if self.writer is not None and self._has_memory(self.writer):
            self._reserve(self.writer)

    def requests(self) -> StepRequests:
        """A save once more, where the last one failed and room was made."""
        return StepRequests(save=self.retry)

    def __call__(self, progress: Progress) -> tuple[Path, float]:
        """Save; returns where it will be, and for how many seconds training stood still."""
        began = time.monotonic()
        self.retried, self.retry = self.retry, False
        noted = self.before_save(progress)
        self.contents = dataclasses.replace(self.contents, entries={**self.contents.entries, **noted})
        path = self.root / folders.name_of(progress.iteration)
        try:
            self._hear(self.timeout_s)  # one at a time: the memory of the last one is still being written
            if (text := on_first_rank(self._problem, self.ranks)) is not None:
                raise OSError(text)
            if self.writer is not None and self._has_memory(self.writer):
                self._hand_over(progress, self.writer)
            else:
                self._save(progress)
            self.saved = True
        except OSError as error:
            self._failed(path.name, str(error))
        stall_s = time.monotonic() - began
        self.stalled_s += stall_s
        self.stall_s = stall_s
        if self.committed != path.name and not self.retry:
            self.ranks.say(f"checkpoint {path.name} scheduled")
        self._warn_of_cost()
        return path, stall_s

    def before_update(self) -> None:
        """Weights and optimizer are about to change: what is being saved must be copied by now."""
        if self.writer is None or not self.writer.is_busy:
            return
        began = time.monotonic()
        self.writer.finish_copy()
        waited_s = time.monotonic() - began
        self.stall_s, self.stalled_s = self.stall_s + waited_s, self.stalled_s + waited_s

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self._hear(0.0)

    def stop(self, progress: Progress, reason: str) -> None:
        """Wait for what is under way: a run that has ended has its last checkpoint.

        One that failed is made once more, while the run waits. Raises SharedFault where that fails, too: a run whose
        last state is not saved is not done, and is started again from the checkpoint before.
        """
        self._hear(self.timeout_s)
        if self.writer is not None and self.writer.is_busy:
            self.ranks.say(f"a checkpoint is still being written after {self.timeout_s:.0f} s; it goes on without us")
        is_lost = self.ranks.rank == 0 and self.failed == folders.name_of(progress.iteration) != self.committed
        if self._over_all_ranks(int(is_lost)):
            try:
                self._save(progress)
            except OSError as error:
                name = folders.name_of(progress.iteration)
                raise SharedFault(f"checkpoint {name} FAILED twice, and the run is at its end: {error}") from error
        if self.writer is not None:
            self.writer.close()
        dist.barrier()

    def _has_memory(self, writer: BackgroundWriter) -> bool:
        """Whether all hosts can hold their ranks' copies; says where one cannot. Asked before step 1, and each time."""
        lack = writer.lacks_memory(self.own_bytes, self.ranks.identity.local_world_size)
        lacking = gathered([lack] if lack else [], self.ranks)
        if lacking and not self.waits:
            self.ranks.say(f"warning: {lacking[0]}: training waits for its checkpoints (checkpoint.async_save)")
        self.waits = bool(lacking)
        return not lacking

    def _own_problems(self) -> list[str]:
        """What stands in the way of this rank's part; one rank of each node also tries the folder."""
        tried = room.save_problem(self.root) if self.ranks.identity.local_rank == 0 else None
        found = (tried, room.file_size_problem(self.own_bytes + TABLE_BYTES))
        return [f"{text} (on {os.uname().nodename})" for text in found if text]

    def _reserve(self, writer: BackgroundWriter) -> None:
        """Take the memory of the copies now: where it turns out to be missing, training waits for its checkpoints."""
        lack, pinned = "", self.ranks.device.type == "cuda"
        try:
            writer.reserve(self.own_bytes, pinned=pinned)
        except OSError as error:
            lack = f"{self.own_bytes:,} bytes of shared memory on {os.uname().nodename}: {error.strerror}"
        if lacking := gathered([lack] if lack else [], self.ranks):
            self.ranks.say(f"warning: {lacking[0]}: training waits for its checkpoints (checkpoint.async_save)")
            writer.close()
            self.writer = None
        elif slow := gathered([os.uname().nodename] if pinned and not writer.is_pinned else [], self.ranks):
            self.ranks.say(f"warning: memory cannot be pinned on {slow[0]} (cudaHostRegister): checkpoints copy slowly")

    def _save(self, progress: Progress) -> None:
        began = time.monotonic()
        path = save(self.root, progress, self.chunks, self.optimizer, self.ranks, self.contents, self.lock)
        seconds = time.monotonic() - began
        self._committed(path.name, self.needed_bytes, seconds, stall_s=seconds)

    def _hand_over(self, progress: Progress, writer: BackgroundWriter) -> None:
        folder = self.folder = begin_save(self.root, progress, self.ranks)
        state = state_of(progress, self.optimizer, self.ranks, self.contents)
        with settled(self.chunks), torch.no_grad():
            boxes = saved_boxes(self.chunks, self.optimizer, self.ranks)
            on_every_rank(partial(writer.hand_over, folder, boxes), self.ranks)
        if self.ranks.rank == 0:
            writer.commit(
                Commit(
                    filled=filled(folder.absolute(), state, self.contents, self.ranks),
                    timeout_s=self.timeout_s,
                    run_dir=str(self.lock.folder.absolute()) if self.lock else None,
                    attempt=self.lock.attempt if self.lock else None,
                )
            )

    def _hear(self, timeout_s: float) -> None:
        """Report what came of earlier saves. Rank 0 hears of the commit, and of any writer that failed."""
        if self.writer is None:
            return
        try:
            for outcome in self.writer.outcomes(timeout_s, self.beat):
                if outcome.what == "Commit":
                    self._report(outcome)
        except ChildProcessError as error:  # killed, say for its memory: the committer must not wait for it
            mark_failed(self.folder, file_name(self.ranks.rank), str(error))
            self.writer = BackgroundWriter(self.ranks.rank)
            if self.ranks.rank == 0:
                self._failed(self.folder.name.partition(folders.TEMPORARY)[0], str(error))

    def _report(self, outcome: Outcome) -> None:
        name = Path(outcome.folder).name.partition(folders.TEMPORARY)[0]
        if outcome.lost:
            raise LockLost(f"checkpoint {name} was not committed: {outcome.error}")
        if outcome.error is None:
            self._committed(name, outcome.bytes, outcome.seconds, stall_s=self.stall_s)
        else:
            self._failed(name, outcome.error)

    def _committed(self, name: str, size: int, seconds: float, *, stall_s: float) -> None:
        self.committed = name
        self.contents = dataclasses.replace(self.contents, parent=name)
        self.ranks.say(
            f"checkpoint {name} COMMITTED ({size / MEBIBYTE:,.1f} MiB in {seconds:.1f} s; "
            f"training stood still for {stall_s:.2f} s)"
        )
        facts = {"bytes": size, "seconds": round(seconds, 3), "stall_s": round(stall_s, 3)}
        self.note("commit", folders.iteration_of(Path(name)), **facts)

    def _failed(self, name: str, text: str) -> None:
        """Say so, and go on as long as there is something to come back to, to another attempt.

        Older checkpoints go only where they are in its way, and never ``latest``: what was restored or committed last.
        """
        self.failed = name
        if self.lock is not None:
            self.lock.check()  # a run that was taken for dead finds its temporary folder gone: no room is made then
        if not folders.complete(self.root):
            raise SharedFault(f"checkpoint {name} FAILED, and there is no other one: {text}")
        if self.ranks.rank == 0 and (good := folders.latest(self.root)) is not None:
            said = f"checkpoint {name} FAILED: {text.rstrip('.')}. Training goes on; the newest good one is {good.name}"
            self.ranks.say(said)
            self.note("save_failed", folders.iteration_of(Path(name)), text=said)
        if self.ranks.rank == 0 and not self.retried:
            if room.is_full(self.root, self.needed_bytes, self._needed_files, text):
                for damaged in self.root.glob(f"*{folders.DAMAGED}*"):
                    folders.remove(damaged)
                folders.prune(self.root, 1, self.contents.retain_interval, self.contents.milestones)
            self.retry = True

    def _problem(self) -> str | None:
        if self.lock is not None:
            self.lock.check()
        if self.saved and not self.root.is_dir():
            self.ranks.say(f"warning: {self.root} is gone, and the checkpoints in it; it is created again")
        return room.problem(self.root, self.needed_bytes, self._needed_files)

    @property
    def _needed_files(self) -> int:
        return 2 * self.ranks.identity.world_size + 8

    def _over_all_ranks(self, count: int) -> int:
        total = torch.tensor([count], dtype=torch.int64, device=self.ranks.device)
        dist.all_reduce(total)
        return int(total)

    def _warn_of_cost(self) -> None:
        elapsed_s = time.monotonic() - self.began_s
        if not self.warned and self.stalled_s > COSTLY * elapsed_s and elapsed_s > SETTLED_S:
            self.warned = True
            self.ranks.say(
                f"warning: saving took {self.stalled_s / elapsed_s:.0%} of the time so far; raise "
                "checkpoint.save_interval or .save_interval_minutes"
            )
