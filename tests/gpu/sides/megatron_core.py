"""Megatron's own GPTModel, DistributedDataParallel and distributed optimizer, as Megatron-LM's pretrain_gpt.py makes
them with --bf16 --use-distributed-optimizer, Transformer Engine's layers, and all fusions that run without APEX."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from data.loader import Batch
from models.layers.fp8 import resolve_recipe
from tests.gpu.sides.job import Job, fill


@contextlib.contextmanager
def steps(job: Job) -> Iterator[Callable[[], float]]:
    """One update; this rank's mean loss."""
    config = transformer_config(job)
    narrow = job.config.precision.dtype != "fp32"
    model = GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(), job.shape.padded_vocab_size,
        job.config.model.seq_length, position_embedding_type="rope", rotary_base=int(job.shape.rotary_base),
        share_embeddings_and_output_weights=False,
    ).to(job.ranks.device)  # fmt: skip
    fill(model, job.shape, job.config.train.seed)
    overlap = job.ranks.layout.dp > 1
    chunk = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=narrow, use_distributed_optimizer=True, overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        ),
        Float16Module(config, model) if narrow else model,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(optimizer_config(job, overlap), [chunk], use_gloo_process_groups=False)
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    config.no_sync_func = chunk.no_sync if overlap else None

    def step() -> float:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(job.microbatches), model=[chunk],
            num_microbatches=len(job.microbatches), seq_length=job.config.model.seq_length,
            micro_batch_size=job.config.train.micro_batch_size, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        return torch.stack([one["loss"] for one in found]).mean().item()

    yield step


def forward(
    batches: Iterator[Batch], chunk: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """Losses of a microbatch's tokens, and what makes its loss of them."""
    batch = next(batches)
    losses = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels)
    return losses, partial(mean_of, batch.loss_mask)


def mean_of(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As Megatron-LM's loss_func; what is reported is a copy, since megatron-core divides the loss in place."""
    mean = (losses.float() * mask).sum() / mask.sum()
    return mean, {"loss": mean.detach().clone()}


def transformer_config(job: Job) -> TransformerConfig:
    """Its gradient accumulation is fused where APEX is installed: without, Megatron-LM's users turn it off."""
    shape, precision = job.shape, resolve_recipe(job.config.precision, job.ranks.device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision.dtype]
    return TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads, num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels, normalization="RMSNorm", layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, params_dtype=dtype, pipeline_dtype=dtype, bf16=precision.dtype == "bf16",
        fp8=precision.fp8, fp8_recipe=precision.fp8_recipe if precision.fp8 else "delayed",
        perform_initialization=False, apply_rope_fusion=True, bias_activation_fusion=True, bias_dropout_fusion=True,
        masked_softmax_fusion=True, cross_entropy_loss_fusion=precision.dtype == "bf16",
        cross_entropy_fusion_impl="native", gradient_accumulation_fusion=layers._grad_accum_fusion_available,
        deterministic_mode=job.config.train.deterministic_mode,
    )  # fmt: skip


def optimizer_config(job: Job, overlap: bool) -> OptimizerConfig:
    """The recipe's AdamW."""
    rates, bf16 = job.config.optimizer, job.config.precision.dtype == "bf16"
    return OptimizerConfig(
        optimizer="adam", lr=rates.lr, min_lr=rates.min_lr, weight_decay=rates.weight_decay,
        adam_beta1=rates.adam_beta1, adam_beta2=rates.adam_beta2, adam_eps=rates.adam_eps, clip_grad=rates.clip_grad,
        bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32, use_distributed_optimizer=True,
        overlap_param_gather=overlap,
    )  # fmt: skip
