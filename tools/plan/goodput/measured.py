"""Times that were measured: of a run's saves, and of the faults that ``make faults`` injected."""

import statistics
from pathlib import Path

from parallel.errors import UserError
from parallel.untrusted import read_text
from training.metrics.jsonl import read_jsonl

VERDICT, AGAIN = "To verdict, s", "To training, s"
"""Columns of docs/faults.md, as tests/faults/jobs.py writes them."""


def stall_s(run_dir: Path) -> float:
    """The median stall of a run's saves. Raises UserError where it tells of none."""
    path = run_dir / "metrics.jsonl"
    try:
        stalls = [float(line["checkpoint_stall_s"]) for line in read_jsonl(path) if "checkpoint_stall_s" in line]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Give a run's folder as --run_dir, or --stall_s.") from None
    if not stalls:
        raise UserError(f"{path}: no iteration with checkpoint_stall_s. Give --stall_s, or a run that has saved.")
    return statistics.median(stalls)


def faults(document: Path) -> tuple[float, float]:
    """Medians, in seconds, of what transient faults took until they were reported and until the job trained again.

    Raises UserError where ``document``, the docs/faults.md of a cluster, has no such table.
    """
    try:
        lines = read_text(document).splitlines()
    except OSError as error:
        raise UserError(f"--faults {document}: {error.strerror}.") from None
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    head = next((row for row in rows if {VERDICT, AGAIN} <= set(row)), None)
    medians = []
    for name in (VERDICT, AGAIN):
        at = head.index(name) if head else 0
        found = [row[at] for row in rows if head and len(row) == len(head) and row[0].startswith("transient: ")]
        numbers = [float(text) for text in found if text.replace(".", "", 1).isdigit()]
        if not numbers:
            raise UserError(
                f'--faults {document}: no transient fault with "{name}". python -m tests.faults --only jobs writes it.'
            )
        medians.append(statistics.median(numbers))
    return medians[0], medians[1]
