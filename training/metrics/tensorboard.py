"""TensorBoard curves in the run's folder."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardSink:
    """One scalar curve per key of metrics.jsonl, over iterations.

    TensorBoard keeps float32: the exact numbers are those of metrics.jsonl.
    """

    def __init__(self, folder: Path, resumed_iteration: int) -> None:
        """Open an event file in ``folder``; ``resumed_iteration`` is the last one restored, or 0.

        Points after it, which an earlier attempt left in ``folder``, are purged: else the curves would run
        back and double. This holds at 0 too, for a run that died before its first checkpoint.
        """
        from torch.utils.tensorboard import SummaryWriter  # imports torch; it costs about a second

        attempted_before = folder.is_dir() and any(folder.iterdir())
        purge_step = resumed_iteration + 1 if attempted_before else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def write(self, iteration: int, values: Mapping[str, float | int]) -> None:
        """Queue one point per value; the writer flushes every 30 s."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
