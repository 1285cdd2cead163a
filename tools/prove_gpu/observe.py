"""On a rank: what a layout's first steps look like, in the form that ``tools.parity`` compares."""

from pathlib import Path
from typing import Any, Literal

from models.families import resolve
from parallel import groups
from parallel.launch import Identity
from tools.parity import probe
from tools.parity.layouts import shrink, with_layout
from training import cli, job
from training.checkpoint.progress import Progress
from training.config import RunConfig
from training.preparing import prepare
from training.step import Wishes

STEPS = 4
RECIPE = Path(__file__).resolve().parents[2] / "slurm/recipes/debug.toml"


def configuration(layout: str) -> tuple[RunConfig, int]:
    """The debug recipe on a layout, in fp32, and the layout's world size."""
    return with_layout(shrink(cli.load(RECIPE)), layout)


def measure(identity: Identity, layout: str, device: Literal["cpu", "cuda"] = "cuda") -> dict[str, Any]:
    """Losses, gradient norms, and this rank's pieces of step 1's gradients. Needs NVIDIA_TF32_OVERRIDE=0."""
    config, world_size = configuration(layout)
    prepared = prepare(config, identity)
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    observed: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "order": []}
    parts = config.layout(world_size)
    with groups.start(parts, identity, device=device, seed=config.train.seed, timeout_minutes=5) as ranks:
        chunks, optim = job.build_parts(config, shape, ranks)
        gradients = probe.step_gradients(config, prepared, chunks, ranks, Progress())
        stream, progress = probe.open_stream(config, prepared, ranks, Progress()), Progress()
        for _ in range(STEPS):
            progress, result = job.one_step(config, chunks, optim, stream, ranks, progress, Wishes())
            observed["loss"].append(result.loss)
            observed["grad_norm"].append(result.grad_norm)
        stream.close()
        return {"observed": observed, "gradients": gradients, "at": tuple(ranks.at)}
