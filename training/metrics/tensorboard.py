"""TensorBoard curves in the run's folder."""

from pathlib import Path

from training.metrics.megatron_names import Names, named_curves
from training.metrics.values import Values

MAX_EXPERTS = 64
"""More experts than these get no curve each: their block's fullest has one, metrics.jsonl has all."""


class TensorBoardSink:
    """One scalar curve per number of metrics.jsonl, over iterations.

    TensorBoard keeps float32: the exact numbers are those of metrics.jsonl.
    """

    def __init__(self, folder: Path, resumed_iteration: int, names: Names = "triplane") -> None:
        """Open an event file in ``folder``; ``resumed_iteration`` is the last one restored, or 0.

        Points after it, which an earlier attempt left in ``folder``, are purged: else the curves would run
        back and double. This holds at 0 too, for a run that died before its first checkpoint.
        """
        from torch.utils.tensorboard import SummaryWriter  # imports torch; it costs about a second

        attempted_before = folder.is_dir() and any(folder.iterdir())
        purge_step = resumed_iteration + 1 if attempted_before else None
        self._names = names
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def write(self, iteration: int, values: Values) -> None:
        """Queue one point per value; the writer flushes every 30 s."""
        for name, value in named_curves(values, MAX_EXPERTS, self._names):
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
