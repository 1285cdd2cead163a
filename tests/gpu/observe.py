"""On a rank: what a layout's first steps look like, in the form that ``tools.parity`` compares."""

from pathlib import Path
from typing import Any, Literal

from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from tools.parity import probe
from tools.parity.layouts import shrink, with_layout
from training import train
from training.cli import parse
from training.config.run_config import RunConfig
from training.parts.model import build_parts
from training.progress import Progress
from training.start.prepare import prepare
from training.step import StepRequests

STEPS = 4
RECIPE = Path(__file__).resolve().parents[2] / "slurm/recipes/debug.toml"


def configuration(layout: str) -> tuple[RunConfig, int]:
    """The debug recipe on a layout, in fp32, and the layout's world size."""
    return with_layout(shrink(parse.load(RECIPE)), layout)


def measure(identity: Identity, layout: str, device: Literal["cpu", "cuda"] = "cuda") -> dict[str, Any]:
    """Losses, gradient norms, and this rank's pieces of step 1's gradients. Needs NVIDIA_TF32_OVERRIDE=0."""
    config, world_size = configuration(layout)
    prepared = prepare(config, identity)
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    observed: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "order": []}
    layout_of_ranks = config.layout(world_size)
    with groups.start(layout_of_ranks, identity, device=device, seed=config.train.seed) as ranks:
        parts = build_parts(config, shape, ranks)
        gradients = probe.step_gradients(config, prepared, parts.chunks, ranks, Progress())
        stream, progress = probe.open_stream(config, prepared, ranks, Progress()), Progress()
        for _ in range(STEPS):
            progress, result = train.one_step(parts, stream, progress, StepRequests())
            observed["loss"].append(result.loss)
            observed["grad_norm"].append(result.grad_norm)
        stream.close()
        return {"observed": observed, "gradients": gradients, "at": tuple(ranks.at)}
