"""On a rank: the losses of a short run, in bf16, fp8 or fp4."""

import math
from typing import Any, Literal

from models.config import ModelConfig
from models.resolve import resolve
from parallel import groups
from parallel.config import PrecisionConfig
from parallel.launch import Identity
from tests.benchmarks.step.one_rank import RandomTokens
from training import train
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

USED_IDS = 64  # of 1,024: the loss falls from ln 1024 = 6.9 towards ln 64 = 4.2


def configuration(precision: PrecisionConfig, model: ModelConfig | None = None) -> RunConfig:
    """A small Llama-like model whose sizes are multiples of 32, which fp8 and fp4 matrix products need."""
    small = ModelConfig(
        shape="debug",
        hidden_size=256,
        ffn_hidden_size=704,
        num_attention_heads=4,
        vocab_size=1024,
        seq_length=256,
    )
    return RunConfig(
        model=model or small,
        precision=precision,
        optimizer=OptimizerConfig(lr=1e-3, lr_decay_style="constant"),
        train=TrainConfig(global_batch_size=8, micro_batch_size=4),
    )


def measure(
    identity: Identity,
    steps: int = 20,
    dtype: Literal["fp32", "bf16"] = "bf16",
    fp8: Literal["hybrid"] | None = None,
    fp4: Literal["e2m1"] | None = None,
    device: Literal["cpu", "cuda"] = "cuda",
) -> dict[str, Any]:
    """Losses and gradient norms of ``steps`` steps on one rank."""
    config = configuration(PrecisionConfig(dtype=dtype, fp8=fp8, fp4=fp4))
    shape = resolve(config.model, None)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    with groups.start(config.layout(1), identity, device=device, seed=1) as ranks:
        parts = build_parts(config, shape, ranks)
        stream, progress = RandomTokens(config, USED_IDS, device=ranks.device), Progress()
        for _ in range(steps):
            progress, result = train.one_step(parts, stream, progress, StepRequests())
            found["loss"].append(result.loss)
            found["grad_norm"].append(result.grad_norm or math.nan)
    return found
