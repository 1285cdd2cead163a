"""The norms that a model may have. To add one: its name and its entry here, its module in models/layers/norm.py."""

from dataclasses import dataclass
from typing import Literal

Normalization = Literal["RMSNorm", "LayerNorm"]


@dataclass(kw_only=True, slots=True, frozen=True)
class NormSpec:
    """What all but the module itself need to know of a norm: parameters, checkpoints, memory."""

    bias: bool
    """Beside its weight."""
    kept_inputs: int
    """Tensors of its input's shape and type that stay for the backward pass, its output for the next layer included."""
    kept_bytes: int
    """Bytes per token and channel that it keeps beside those, whatever the type."""
    kept_zero_centered: tuple[int, int] | None = None
    """Both of them with model.layernorm_zero_centered_gamma; None: as without."""
    transformer_engine: bool = False
    """Transformer Engine has it, alone and fused with the linear layer behind it."""

    def kept(self, zero_centered: bool) -> tuple[int, int]:
        """kept_inputs and kept_bytes."""
        plain = self.kept_inputs, self.kept_bytes
        return self.kept_zero_centered or plain if zero_centered else plain


# As torch.autograd.graph.saved_tensors_hooks shows of torch's modules, in bf16 and fp32, and as runs of models that
# differ in one width at a time hold (2026-11-21).
NORMS: dict[str, NormSpec] = {
    "RMSNorm": NormSpec(bias=False, kept_inputs=1, kept_bytes=8, transformer_engine=True),
    "LayerNorm": NormSpec(bias=True, kept_inputs=2, kept_bytes=0, kept_zero_centered=(1, 4), transformer_engine=True),
}
"""By their name in ``model.normalization``. RMSNorm: arXiv:1910.07467; LayerNorm: arXiv:1607.06450."""
