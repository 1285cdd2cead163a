"""torchtitan's own training program: TORCHTITAN=its checkout, of August 2026 or later (recipes in Python), its
requirements installed.

python -m tests.gpu.sides.torchtitan CHECKOUT: that program with the recipe ``beside`` below, which REQUEST describes.
"""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.sides.program import Request

VARIABLE, REQUEST = "TORCHTITAN", "TRIPLANE_BESIDE_REQUEST"
TOY = "llama3_debugmodel"
RECIPES = {"llama3_8b": "llama3_8b", "llama3_tiny": TOY}
"""By our shape; the second tries the way in toy size, with a model that is not ours."""
STEP = re.compile(r"step:\s*\d+\s+.*?loss:\s*([\d.]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def measured(request: "Request") -> dict[str, Any]:
    """Its own log's rates and losses; memory is what the allocator has reserved. Raises UnrunError."""
    from tests.gpu import processes
    from tests.gpu.sides.program import checkout
    from tests.gpu.subject_run import UnrunError

    folder = checkout(VARIABLE, "torchtitan/train.py", "torchtitan")
    recipe = RECIPES.get(request.config.model.shape)
    if recipe is None:
        raise UnrunError(f"it has no recipe of {request.config.model.shape}")
    train, seq_length = request.config.train, request.config.model.seq_length
    asked = {
        "recipe": recipe, "layers": request.shape.num_layers, "seq_length": seq_length,
        "steps": request.iterations, "microbatch_tokens": train.micro_batch_size * seq_length,
        "step_tokens": train.global_batch_size * seq_length,
    }  # fmt: skip
    command = [sys.executable, *request.launcher, "-m", "tests.gpu.sides.torchtitan", str(folder)]
    printed = processes.run(command, {REQUEST: json.dumps(asked)}, request.limit_s)
    found = lines(printed)
    tokens = train.global_batch_size * seq_length / len(request.gpus)
    times = [tokens / rate for _, _, rate in found]
    peak_bytes = max((gib for _, gib, _ in found), default=0.0) * 2**30
    return request.row([loss for loss, _, _ in found], times, peak_bytes) | {"shape": recipe}


def lines(printed: str) -> list[tuple[float, float, float]]:
    """Loss, GiB and tokens/s of a GPU, of each step once."""
    steps = STEP.findall(COLOURS.sub("", printed))
    return [(float(loss), float(gib), float(rate.replace(",", ""))) for loss, gib, rate in steps]


def beside() -> Any:
    """torchtitan's own recipe with fewer layers, compiled, nothing recomputed, on the texts that it brings."""
    from torchtitan.config import CompileConfig  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import config_registry  # type: ignore[import-not-found]

    asked = json.loads(os.environ[REQUEST])
    config, small = getattr(config_registry, asked["recipe"])(), config_registry.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[: asked["layers"]]
    config.hf_assets_path, config.dataloader = small.hf_assets_path, small.dataloader
    config.lr_scheduler = small.lr_scheduler  # two steps of warm-up, not 200; the learning rate is the same
    config.training.steps, config.training.max_context_length = asked["steps"], asked["seq_length"]
    config.training.num_tokens_per_microbatch_per_dp_rank = asked["microbatch_tokens"]
    config.training.num_tokens_per_train_step = asked["step_tokens"]
    # the emulated device does not capture flex attention
    config.training.disable_cuda_graphs = asked["recipe"] == TOY
    config.compile, config.activation_checkpoint = CompileConfig(enable=True), None
    config.metrics.log_freq, config.metrics.enable_tensorboard = 1, False
    config.profiler.enable_profiling = config.checkpoint.enable = config.validator.enable = False
    return config


def main(folder: Path) -> None:
    """Its program, in this process, in the checkout, whose texts it reads by relative paths."""
    os.chdir(folder)
    sys.path[:0] = [str(folder)]
    sys.argv = ["torchtitan.train", "--module", "tests.gpu.sides.torchtitan", "--config", "beside"]
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(Path(sys.argv[1]))
