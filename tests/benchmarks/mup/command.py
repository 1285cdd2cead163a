"""Try learning rates at two widths, with muP and without, and draw the losses: docs/pictures/mup.svg.

    python -m tests.benchmarks mup [--iterations 100]

The debug recipe with 2 blocks, a constant rate and the built-in corpus. At the narrow width muP changes nothing: its
base is that width, and its heads' scores are those without it.
"""

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, keep
from tools.parity.coordinate_check import at_width, measured
from tools.shared.chart import COLOURS, as_file
from tools.shared.plot import Curve, Plot, Point
from training.cli import parse
from training.config.run_config import RunConfig

NARROW, WIDE = 64, 256
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
LAST = 10
"""Iterations whose mean loss is a run's."""
PICTURE = ROOT / "docs/pictures/mup.svg"

Losses = Mapping[str, float]
"""Learning rate -> mean loss of the last iterations, in nats per token; its keys are JSON's."""


@dataclass(kw_only=True)
class MupBenchmark:
    """Try learning rates at two widths, with muP and without."""

    iterations: int = 100
    """Of each of the 21 runs; 8 samples of 64 tokens each."""

    output: Path = ROOT / "docs/benchmarks/mup.json"
    """JSON: of each side the losses by learning rate."""

    picture: Path = PICTURE
    """SVG of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: measured, wherever the best rates are. Raises UserError for a run that cannot start."""
    job = parse_flags(MupBenchmark, argv, "python -m tests.benchmarks mup", __doc__)
    plain = parse.load(ROOT / "slurm/recipes/debug.toml")
    mup = dataclasses.replace(plain, model=dataclasses.replace(plain.model, use_mup=True, mup_base_head_dim=16.0))
    sides = {f"width {NARROW}": (plain, NARROW), f"width {WIDE}": (plain, WIDE), f"width {WIDE}, muP": (mup, WIDE)}
    found: dict[str, Losses] = {}
    for side, (recipe, width) in sides.items():
        found[side] = {f"{rate:g}": loss_of(recipe, width, rate, job.iterations) for rate in RATES}
        print(f"{side}: best at {best(found[side])}, {found[side]}", flush=True)
    keep(job.output, circumstances() | {"iterations": job.iterations, "losses": found})
    job.picture.write_text(drawn(found))
    return 0


def loss_of(recipe: RunConfig, width: int, rate: float, iterations: int) -> float:
    """Of one run."""
    with tempfile.TemporaryDirectory(prefix="triplane-mup-") as folder:
        losses, _ = measured(at_width(recipe, width, NARROW, iterations, rate), Path(folder))
    return math.fsum(losses[-LAST:]) / len(losses[-LAST:])


def best(losses: Losses) -> str:
    """The learning rate with the least loss."""
    return min(losses, key=lambda rate: losses[rate])


def drawn(found: Mapping[str, Losses]) -> str:
    """An SVG file."""
    curves = [
        Curve(
            name=f"{side}: best at {best(losses)}", colour=colour, dots=True,
            points=[Point(math.log2(float(rate)), loss) for rate, loss in losses.items()],
        )
        for (side, losses), colour in zip(found.items(), COLOURS, strict=False)
    ]  # fmt: skip
    values = [point.y for curve in curves for point in curve.points]
    plot = Plot(
        label="Loss over learning rate at two widths, with muP and without", unit="nats per token",
        low=min(values) - 0.05, high=min(max(values), min(values) + 2) + 0.05, left_x=math.log2(min(RATES)),
        right_x=math.log2(max(RATES)), x_name="log2 of the learning rate",
    )  # fmt: skip
    return as_file(plot.draw(curves))
