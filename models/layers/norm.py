"""Modules of the norms of models/norms.py, where Transformer Engine is not installed."""

from collections.abc import Callable

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from program.errors import SharedMistake


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """Multiplies by 1 + weight, in fp32, in which a small weight is not rounded away."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """Likewise."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        weight, bias = 1 + self.weight.float(), self.bias.float()
        return functional.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


MODULES: dict[str, Callable[..., nn.Module]] = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}
"""By the norm's name: ``(hidden_size, eps=, dtype=)``; parameters are named weight and, where it has one, bias."""

ZERO_CENTERED: dict[str, Callable[..., nn.Module]] = {
    "RMSNorm": ZeroCenteredRMSNorm,
    "LayerNorm": ZeroCenteredLayerNorm,
}
"""Of model.layernorm_zero_centered_gamma."""


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> nn.Module:
    """The norm that ``config.normalization`` names, over the last dim of ``[..., hidden_size]``.

    Under sequence parallelism each TP rank sees a part of the tokens, so its weights' gradients must be summed over
    TP: the mark ``sequence_parallel`` tells Megatron so.
    """
    modules = ZERO_CENTERED if config.layernorm_zero_centered_gamma else MODULES
    if config.normalization not in modules:
        raise SharedMistake(
            f"model.layernorm_zero_centered_gamma: model.normalization {config.normalization} has no such kind. "
            f"Use {' or '.join(modules)}."
        )
    norm = modules[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
