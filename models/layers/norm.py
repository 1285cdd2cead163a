"""Modules of the norms of models/norms.py, where Transformer Engine is not installed."""

from collections.abc import Callable

from megatron.core.transformer import TransformerConfig
from torch import nn

MODULES: dict[str, Callable[..., nn.Module]] = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}
"""By the norm's name: ``(hidden_size, eps=, dtype=)``; parameters are named weight and, where it has one, bias."""


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> nn.Module:
    """The norm that ``config.normalization`` names, over the last dim of ``[..., hidden_size]``.

    Under sequence parallelism each TP rank sees a part of the tokens, so its weights' gradients must be summed over
    TP: the mark ``sequence_parallel`` tells Megatron so.
    """
    norm = MODULES[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
