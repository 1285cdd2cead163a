"""Which of a checkpoint's weights a tool takes: those that were trained, or an average of them."""

from pathlib import Path
from typing import Literal, get_args

from program.errors import UserError
from training.checkpoint.state import read_state

ChosenWeights = Literal["trained", "ema", "average_last"]
"""trained: as training left them; others: training/averages.py."""
AVERAGES: tuple[str, ...] = get_args(ChosenWeights)[1:]

PREFIX = "optimizer.state."


def prefix_of(weights: ChosenWeights, folder: Path) -> str:
    """What their keys begin with. Raises UserError where the checkpoint has no such average."""
    if weights == "trained":
        return f"{PREFIX}param."
    counts = read_state(folder).optimizer.get("averaged")
    kept = counts if isinstance(counts, dict) else {}
    found = [name for name in AVERAGES if kept.get(name)]
    if weights not in found:
        raise UserError(
            f"--weights {weights}: {folder} has {' and '.join(found) or 'none'}. train.ema_decay and "
            "train.average_last keep them."
        )
    return f"{PREFIX}{weights}."
