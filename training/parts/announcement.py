"""What a run says of itself: before it begins, after its first step, and at its end."""

from collections.abc import Callable

import torch

from models.costs.recompute_plan import described_plans, recompute_plans
from models.kernels import described
from models.layers import mixers, packed
from parallel.config import PrecisionConfig
from parallel.precision import params_dtype
from training.loop import Callback, Reason
from training.loss_weights import layout_dependent
from training.memory.measured import own_case
from training.parts.model import fusions
from training.parts.run import TrainingRun
from training.progress import Progress
from training.step import StepResult


def announce(run: TrainingRun) -> None:
    """Say what runs."""
    config, shape, ranks = run.config, run.shape, run.ranks
    if (own := config.begin) is not None:
        ranks.say(f"{own.title}: iterations {own.first.iteration + 1:,} to {own.end.iteration:,}")
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    ranks.say(
        f"{ranks.identity.world_size} ranks ({ranks.identity.launcher}, {ranks.device.type}): "
        f"{ranks.layout}; {computed_in(config.precision, ranks.device, shape.mtp_num_layers > 0)}"
    )
    ranks.say(
        f"model {config.model.title}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size} (padded {shape.padded_vocab_size}); "
        f"batch {batch} samples x {config.model.seq_length} tokens "
        f"= {batch // (micro * ranks.layout.dp)} microbatches of {micro} on each of {ranks.layout.dp} replicas"
    )
    if config.import_paths:
        ranks.say(f"by import path: {', '.join(config.import_paths)}")
    if fused := described(fusions(config, shape, ranks, ranks.say)):
        ranks.say(f"fused kernels: {fused}")
    if config.train.recompute_budget is not None:
        plans = recompute_plans(own_case(config, shape, ranks), shape)
        ranks.say(f'recomputed for train.recompute = "{config.train.recompute}": {described_plans(plans)}')
    for line in mixers.described(shape, ranks.device):
        ranks.say(line)
    if by_definition := layout_dependent(shape):
        ranks.say(by_definition)
    if config.data.reset_attention_mask and shape.has_attention:
        how = packed.how(shape, ranks.device, params_dtype(config.precision), ranks.layout)
        ranks.say(f"documents are kept apart by attention {how}")


def computed_in(precision: PrecisionConfig, device: torch.device, mtp: bool) -> str:
    """bf16, or: bf16, products in fp8 hybrid (tensorwise). mtp: the model has multi-token prediction."""
    name = precision.products
    if name is None:
        return precision.dtype
    if device.type == "cpu":
        return f"{precision.dtype} (precision.{name} is off: it needs a GPU)"
    text = f"{precision.dtype}, products in {name} {getattr(precision, name)} ({precision.recipe})"
    if precision.first_last_layers_bf16:
        start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
        text += f", but in bf16 in the first {start} and last {end} layers"
    if name == "fp4" and mtp:  # megatron-core 0.19.2 enters fp8's context alone there, multi_token_prediction.py:1181
        text += ", and in bf16 in depths of multi-token prediction"
    return text + (", weights kept in fp8" if precision.fp8_param_gather else "")


class AttentionBackend(Callback):
    """Says once, after the first step, which attention Transformer Engine has chosen: it does so then, by card, number
    format and shapes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.said = say, False

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if not self.said:
            self.said = True
            self.say(f"attention backend: {_chosen()}")


def _chosen() -> str:
    """By the names of kernels.attention_backend."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as found

    if found["use_flash_attention"]:
        return f"flash (flash-attn {found['flash_attention_backend']})"
    return "fused (cuDNN)" if found["use_fused_attention"] else "unfused"


def say_the_end(run: TrainingRun, progress: Progress, reason: Reason) -> None:
    """Why training ended, and where everything lies."""
    ranks, run_dir, log = run.ranks, run.run_dir, run.config.log
    if reason == "requested":
        ranks.say(f"stopped on request at iteration {progress.iteration}, saved; the same command continues {run_dir}")
        return
    if reason == "stage":
        ranks.say(f"{run.config.own_stage.title} is over at iteration {progress.iteration}")
        return
    written = ["report.html"] * log.report + ["checkpoints/", "metrics.jsonl"] + ["events/"] * log.tensorboard
    ranks.say(f"{reason} at iteration {progress.iteration}; in {run_dir}: {', '.join(written)}, logs/, config.toml")
