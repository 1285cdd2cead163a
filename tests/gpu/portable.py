"""On a rank: what the model of our own modules computes, on either device."""

from typing import Literal

from models.layers.spec import PortableProvider
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from tests.gpu.specs import Outputs, outputs


def measure(identity: Identity, device: Literal["cpu", "cuda"]) -> Outputs:
    """Logits and gradients in fp32. On cuda NVIDIA_TF32_OVERRIDE=0 keeps libraries from rounding to TF32."""
    with groups.start(layout_of(ParallelConfig(), 1), identity, device=device, seed=1) as ranks:
        return outputs(PortableProvider(), PrecisionConfig(dtype="fp32"), ranks)
