"""Prove or refute that layouts train the same model as one rank.

    python -m tools.parity RECIPE.toml --layouts tp2 pp2 tp2pp2dp2

The recipe's architecture runs shrunk to 4 layers of width 64, in fp32 on CPU ranks of this machine. Or compare a model
with a reference, layer by layer, as it is:

    python -m tools.parity RUN_DIR --against CHECKPOINT_OR_HF_FOLDER

Or look at widths instead of layouts, which has its own --help:

    python -m tools.parity coordinate_check RECIPE.toml --widths 64 128 256 512
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from parallel import launch, output
from parallel.lean_imports import lean
from program import command
from program.errors import UserError
from program.flags import parse_flags
from tools.parity import against, coordinate_check
from tools.parity.layouts import shrink
from training.cli import parse
from training.start.prepare import prepare


@dataclass(kw_only=True)
class Parity:
    """Prove or refute that layouts train the same model as one rank: loss, every gradient, data order, resume.

    With --against: that a model computes what a reference does, layer by layer.
    """

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """Recipe whose architecture is tried. With --against: a run's folder, a checkpoint, a recipe (its initial weights,
    or those of checkpoint.load) or a Hugging Face folder."""

    layouts: tuple[str, ...] = ("tp2", "pp2", "dp2", "tp2sppp2dp2")
    """Names made of tpN cpN ppN vppN dpN epN etpN (sizes), mbsN (micro-batch), firstN lastN (layers of the end stages),
    account (embedding and loss as layers), sp overlap zero0 zero2 zero3 hsdpN (copies of the shards) allgather bucketN,
    and "[Et|t|tt|L]" (Megatron's letters of what each stage holds), e.g. tp2sp pp2vpp2 dp4zero3 tp2spep2etp1
    "pp4[Et|t|tt|L]"."""

    num_layers: int = 4
    """Layers of the shrunk model; a multiple of the pipeline chunks."""

    against: Path | None = None
    """The reference: a checkpoint of any layout, a run's folder, a Hugging Face folder or a recipe. Both models compute
    the same random tokens, whole, in fp32 on the CPU, one after the other."""

    tolerance: float = 1e-4
    """--against: outputs are equal whose largest difference is at most this share of their largest element."""

    num_samples: int = 2
    """--against: samples that both compute."""

    seq_length: int = 64
    """--against: tokens of a sample; at most as many as both models can have."""

    gradients: bool = True
    """--against: compare every parameter's gradient, too, where both are Triplane's models."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all layouts agree; 1: one does not; 2: bad input."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if words[:1] == ["coordinate_check"]:
            return coordinate_check.main(words[1:])
        job = parse_flags(Parity, words, "python -m tools.parity", __doc__)
        return prove(job) if job.against is None else compare_with(job, job.against)
    except UserError as error:
        print(f"tools.parity: {error}", file=sys.stderr)
        return 2


def compare_with(job: Parity, reference: Path) -> int:
    """A model with a reference."""
    return against.run(
        against.Comparing(
            subject=job.recipe,
            reference=reference,
            samples=job.num_samples,
            seq_length=job.seq_length,
            tolerance=job.tolerance,
            gradients=job.gradients,
        )
    )


def prove(job: Parity) -> int:
    """Run one rank, then every layout; one line each, then what differs."""
    config = shrink(parse.load(job.recipe), num_layers=job.num_layers)
    with tempfile.TemporaryDirectory(prefix="triplane-parity-") as scratch:
        with output.own_output(Path(scratch), launch.Identity(), every_rank=False), lean("cpu"):
            from tools.parity.compare import compare, observe  # torch loads only now, and not quietly

            prepared = prepare(config, None)
        began = time.monotonic()
        reference = observe(config, prepared, "tp1", Path(scratch, "one"))
        losses = " ".join(f"{loss:.6f}" for loss in reference.loss)
        print(f"one rank, {len(reference.gradients)} parameters, losses {losses}")
        print(row("layout", "ranks", "loss", "grad norm", "gradient", "resume") + "  largest relative difference")
        failed = []
        for number, layout in enumerate(job.layouts):
            verdict = compare(config, prepared, layout, reference, Path(scratch, f"layout{number}"))
            failed += [f"{layout}: {problem}" for problem in verdict.problems]
            left_s = (time.monotonic() - began) / (number + 2) * (len(job.layouts) - number - 1)
            differences = verdict.loss, verdict.grad_norm, verdict.gradient, verdict.resume
            numbers = row(layout, str(verdict.world_size), *(f"{difference:.1e}" for difference in differences))
            ending = f"{'REFUTED' if verdict.problems else 'same'}, worst {verdict.worst or '-'}, {left_s:.0f} s left"
            print(f"{numbers}  {ending}", flush=True)
    print("\n".join(failed) if failed else f"all {len(job.layouts)} layouts agree with one rank within 1e-5")
    return 1 if failed else 0


def row(layout: str, ranks: str, *columns: str) -> str:
    """One line of the table."""
    return f"{layout:24} {ranks:>5} " + " ".join(f"{column:>9}" for column in columns)


if __name__ == "__main__":
    raise SystemExit(command.run("tools.parity", main))
