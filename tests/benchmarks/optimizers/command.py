"""Train the debug recipe by AdamW and by Muon, and draw both sides' validation loss: docs/pictures/optimizers.svg.

    python -m tests.benchmarks optimizers [--iterations 1000]

Each side at several learning rates, all else the recipe's; the picture has each side's best and the table all.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program.errors import UserError
from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, keep
from tools.shared.chart import COLOURS, as_file
from tools.shared.plot import Curve, Plot, Point
from training.metrics.jsonl import read_jsonl

SIDES = {
    "AdamW": (),
    "Muon": ("--optimizer.optimizer", "muon", "--optimizer.muon_extra_scale_factor", "0.2"),
}
"""Muon's factor makes its updates the size of AdamW's, so that both are tried at the same rates."""
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
PICTURE = ROOT / "docs/pictures/optimizers.svg"

Losses = Mapping[str, float]
"""Iteration -> validation loss in nats per token; its keys are JSON's."""


@dataclass(kw_only=True)
class OptimizersBenchmark:
    """Train the debug recipe by AdamW and by Muon."""

    iterations: int = 1000
    """Of each of the eight runs; 8 samples of 64 tokens each."""

    output: Path = ROOT / "docs/benchmarks/optimizers.json"
    """JSON: of each side and learning rate the validation losses, every twentieth part of the iterations."""

    picture: Path = PICTURE
    """SVG of each side's best run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: measured, whichever side is better. Raises UserError for a run that failed."""
    job = parse_flags(OptimizersBenchmark, argv, "python -m tests.benchmarks optimizers", __doc__)
    found: dict[str, dict[str, Losses]] = {}
    for side, flags in SIDES.items():
        found[side] = {f"{rate:g}": trained(flags, rate, job.iterations) for rate in RATES}
        for rate, losses in found[side].items():
            print(f"{side} at {rate}: validation loss {last(losses):.4f}", flush=True)
    keep(job.output, circumstances() | {"iterations": job.iterations, "validation_losses": found})
    job.picture.write_text(drawn(found))
    return 0


def trained(flags: Sequence[str], rate: float, iterations: int) -> Losses:
    """One run's validation losses."""
    with tempfile.TemporaryDirectory(prefix="triplane-optimizers-") as folder:
        more: dict[str, Any] = {
            "run_dir": folder, "optimizer.lr": rate, "optimizer.min_lr": rate / 10, "train.train_iters": iterations,
            "optimizer.lr_warmup_iters": iterations // 20, "train.micro_batch_size": 8,
            "train.eval_interval": iterations // 20, "train.eval_iters": 8, "train.generate_tokens": 0,
            "train.sample_interval": None, "log.tensorboard": False, "log.log_interval": iterations // 20,
        }  # fmt: skip
        command = [sys.executable, "pretrain_gpt.py", "slurm/recipes/debug.toml", *flags]
        command += [word for name, value in more.items() for word in (f"--{name}", str(value))]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise UserError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        lines = read_jsonl(Path(folder) / "metrics.jsonl")
    return {str(line["iteration"]): line["validation_loss"] for line in lines if "validation_loss" in line}


def last(losses: Losses) -> float:
    """After the last iteration."""
    return losses[max(losses, key=int)]


def drawn(found: Mapping[str, Mapping[str, Losses]]) -> str:
    """An SVG file of each side's best run."""
    curves = []
    for (side, runs), colour in zip(found.items(), COLOURS, strict=False):
        rate = min(runs, key=lambda rate: last(runs[rate]))
        points = [Point(float(iteration), loss) for iteration, loss in runs[rate].items()]
        curves.append(Curve(name=f"{side}, learning rate {rate}", points=points, colour=colour, dots=True))
    values = [point.y for curve in curves for point in curve.points]
    plot = Plot(
        label="Validation loss of AdamW and Muon over iterations", unit="nats per token", low=min(values) - 0.05,
        high=max(values) + 0.05, left_x=0.0, right_x=max(point.x for curve in curves for point in curve.points),
    )  # fmt: skip
    return as_file(plot.draw(curves))
