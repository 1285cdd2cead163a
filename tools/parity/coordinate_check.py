"""Whether training moves a model's outputs further the wider it is: what muP is there to prevent.

    python -m tools.parity coordinate_check RECIPE.toml --widths 64 128 256 512

The recipe's architecture, 2 blocks in fp32, trains a few iterations at each width; its own optimizer and model.use_mup,
whose base is the narrowest. Heads keep their width, all else grows alike (arXiv:2203.03466, appendix D.1).
"""

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import tyro

from models.resolve import resolve
from parallel import launch, local_ranks, output
from parallel.lean_imports import lean
from program.errors import UserError
from program.flags import parse_flags
from program.printing import columns
from tools.parity.layouts import shrink
from tools.shared.chart import COLOURS, as_file
from tools.shared.plot import Curve, Plot, Point
from tools.shared.written import check_file, marked, write_file
from training.cli import parse
from training.config.run_config import RunConfig
from training.start.prepare import prepare

SHRUNK = 64
"""Width of ``shrink``'s models."""
GROWING = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "mamba_num_heads", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
MOST = 0.4
"""Power of the width that a change may grow with: few iterations are noisy. Without muP, some output of each model that
was tried grew with 0.7 or more; of Muon's other scale modes, with 0.5 or more."""
LABEL = "Change of outputs over width"
PLACE = "--output", marked(LABEL)
"""Where the picture may go, for ``tools.shared.written``."""

Changes = Mapping[str, float]


@dataclass(kw_only=True)
class CoordinateCheck:
    """Whether training moves a model's outputs further the wider it is."""

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """Recipe whose architecture, optimizer and model.use_mup are tried."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Of the residual stream: multiples of 64, two or more."""

    iterations: int = 4
    """That each width trains."""

    lr: float = 1e-2
    """Learning rate of the narrowest."""

    output: Path = Path("coordinate_check.svg")
    """The picture: each output's change over width."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0: nothing grows with width; 1: something does. Raises UserError for bad input."""
    job = parse_flags(CoordinateCheck, argv, "python -m tools.parity coordinate_check", __doc__)
    widths = sorted(set(job.widths))
    if len(widths) < 2 or any(width < SHRUNK or width % SHRUNK for width in widths):
        raise UserError(
            f"--widths: expected two or more multiples of {SHRUNK}, found {' '.join(map(str, job.widths))}."
        )
    check_file(job.output, *PLACE)
    recipe = parse.load(job.recipe)
    found: dict[int, Changes] = {}
    with tempfile.TemporaryDirectory(prefix="triplane-widths-") as scratch:
        for width in widths:
            config = at_width(recipe, width, widths[0], job.iterations, job.lr)
            losses, found[width] = measured(config, Path(scratch))
            print(f"width {width}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    powers = {name: slope({width: changes[name] for width, changes in found.items()}) for name in found[widths[0]]}
    write_file(job.output, drawn(found, powers).encode(), *PLACE)
    rows = [("change of", *map(str, widths), "grows with width to the")]
    rows += [(name, *(f"{found[width][name]:.3g}" for width in widths), f"{powers[name]:.2f}") for name in powers]
    print("\n".join([*columns(rows, left=(0,)), f"picture: {job.output}"]))
    grown = [name for name, power in powers.items() if not power <= MOST]
    if grown:
        print(f"GROWS: {', '.join(grown)}, by more than width^{MOST}. {_advice(recipe)}")
        return 1
    print("nothing grows with width")
    return 0


def _advice(recipe: RunConfig) -> str:
    if not resolve(recipe.model, None).use_mup:
        return "model.use_mup is off."
    muon = recipe.optimizer.optimizer == "muon" and recipe.optimizer.muon_scale_mode != "unit_rms_norm"
    return 'Set optimizer.muon_scale_mode = "unit_rms_norm".' if muon else "Try a smaller --lr."


def at_width(recipe: RunConfig, width: int, base: int, iterations: int, lr: float) -> RunConfig:
    """The recipe's architecture with 2 blocks (a pattern's own) of this width."""
    small = shrink(recipe, num_layers=2, train_iters=iterations)
    shape = resolve(small.model, None)
    changes: dict[str, Any] = {name: getattr(shape, name) * width // SHRUNK for name in GROWING}
    changes |= {"kv_channels": shape.kv_channels}
    if shape.use_mup:
        changes |= {"mup_base_hidden_size": base, "mup_base_head_dim": min(shape.mup_base_head_dim, shape.kv_channels)}
        changes |= {"mup_output_mult": 1.0}  # a number of the recipe's own width
    optimizer = dataclasses.replace(
        small.optimizer, lr=lr, lr_decay_style="constant", lr_warmup_iters=0, lr_warmup_samples=0,
        lr_warmup_fraction=None, lr_warmup_init=0.0, decoupled_lr=None, decoupled_min_lr=None,
    )  # fmt: skip
    return dataclasses.replace(small, model=dataclasses.replace(small.model, **changes), optimizer=optimizer)


def measured(config: RunConfig, scratch: Path) -> tuple[list[float], Changes]:
    """Losses and changes, from a process of its own. Raises UserError for what cannot be built."""
    parse.check(config, 1)
    with output.own_output(scratch / "logs", launch.Identity(), every_rank=False), lean("cpu"):
        import torch

        from tools.parity.coordinates import write_changes

        work = partial(write_changes, config, prepare(config, None), scratch / "changes.pt")
    if failure := local_ranks.fork_logged(1, lambda _: work(), scratch / "logs"):
        raise RuntimeError(f"width {config.model.hidden_size} failed:\n{failure.text}")
    found: tuple[list[float], Changes] = torch.load(scratch / "changes.pt")
    return found


def slope(values: Mapping[int, float]) -> float:
    """Of log value over log width: the median over pairs of widths (Theil and Sen), which one odd run does not move, as
    where a router's choice tips. Infinite where a value is not finite or 0."""
    if not all(0 < value < math.inf for value in values.values()):
        return math.inf
    points = [(math.log(width), math.log(value)) for width, value in values.items()]
    return statistics.median((right - left) / (x2 - x1) for (x1, left), (x2, right) in combinations(points, 2))


def drawn(found: Mapping[int, Changes], powers: Mapping[str, float]) -> str:
    """An SVG file."""
    curves = [
        Curve(
            name=f"{name}: width^{powers[name]:.2f}", colour=COLOURS[number % len(COLOURS)], dots=True,
            points=[Point(math.log2(width), changes[name]) for width, changes in found.items()],
        )
        for number, name in enumerate(powers)
    ]  # fmt: skip
    values = [point.y for curve in curves for point in curve.points if 0 < point.y < math.inf] or [1.0]
    plot = Plot(
        label=LABEL, unit="RMS of the change", low=min(values) / 1.2, high=max(values) * 1.2,
        left_x=math.log2(min(found)), right_x=math.log2(max(found)), log=True, x_name="log2 of the width",
    )  # fmt: skip
    return as_file(plot.draw(curves))
