"""Multipliers of embeddings and logits, and the logits' soft cap: within the chunk's own modules, which multi-token
prediction calls, too."""

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from models.shapes import GPTShape


def install(chunk: HybridModel, shape: GPTShape) -> None:
    """On the stages that have embeddings or the output layer."""
    if hasattr(chunk, "embedding") and shape.embedding_multiplier != 1.0:
        scale_embeddings(chunk, shape.embedding_multiplier)
    if hasattr(chunk, "output_layer") and (shape.logits_divisor != 1.0 or shape.final_logit_softcapping):
        scale_logits(chunk, shape.logits_divisor, shape.final_logit_softcapping)


def scale_embeddings(chunk: HybridModel, multiplier: float) -> None:
    """By the multiplier rounded to the embeddings' type, as transformers' Gemma rounds sqrt(hidden_size)."""

    def scaled(_module: object, _inputs: object, output: Tensor) -> Tensor:
        return output * torch.tensor(multiplier, dtype=output.dtype, device=output.device)

    chunk.embedding.word_embeddings.register_forward_hook(scaled)


def scale_logits(chunk: HybridModel, divisor: float, cap: float) -> None:
    """Divided, then capped: cap tanh(logits / cap)."""

    forward = chunk.output_layer.forward

    def scaled(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        logits, bias = forward(*args, **kwargs)
        logits = logits if divisor == 1.0 else logits / divisor
        return (torch.tanh(logits / cap) * cap if cap else logits), bias

    chunk.output_layer.forward = scaled
