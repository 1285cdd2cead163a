"""Muon in plain PyTorch: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), its updates sized as arXiv:2502.16982
and Megatron-LM size them; each matrix whole, in fp64, under our canonical names."""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch
from torch import Tensor

from models.shapes import GPTShape
from tests.oracle.exported import State
from tests.oracle.sizes import Rates
from training.config.optimizer_config import OptimizerConfig

POLYNOMIALS = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}
"""Jordan's, and those of leloykun.github.io/ponder/muon-opt-coeffs."""
WORDS = ("word_embeddings.weight", "output_layer.weight")


class Muon:
    """Momentum of each matrix, by our names; of experts [E, out, in] each by itself."""

    def __init__(self, settings: OptimizerConfig, shape: GPTShape) -> None:
        self.settings, self.shape = settings, shape
        self.momenta: State = {}

    def updated(self, weights: State, gradients: State, scale: float, rates: Rates) -> State:
        """The matrices after one step with gradients times ``scale``."""
        found = {}
        for name, gradient in gradients.items():
            if is_matrix(name, gradient):
                weight, gradient = weights[name].double(), gradient.double() * scale
                momentum = self.settings.muon_momentum * self.momenta.get(name, torch.zeros(())) + gradient
                self.momenta[name] = momentum
                ahead = gradient + self.settings.muon_momentum * momentum if self.settings.muon_nesterov else momentum
                weight = weight * (1 - rates.learning_rate * rates.weight_decay)
                found[name] = (weight - rates.learning_rate * self._change(name, ahead)).float()
        return found

    def _change(self, name: str, ahead: Tensor) -> Tensor:
        if ahead.dim() == 3:
            return torch.stack([self._change(name, expert) for expert in ahead])
        change = torch.zeros_like(ahead)
        for rows in _matrices(name, ahead, self.settings, self.shape):
            change[rows] = _orthogonal(ahead[rows], self.settings)
        return change


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether Muon has it."""
    return tensor.dim() > 1 and name not in WORDS and not name.endswith("bias") and "conv1d" not in name


def _matrices(name: str, whole: Tensor, settings: OptimizerConfig, shape: GPTShape) -> Iterator[Tensor]:
    """Rows of each matrix in a parameter."""
    rows = torch.arange(len(whole))
    if name.endswith("linear_qkv.weight") and settings.muon_split_qkv:
        queries = shape.num_attention_heads // shape.num_query_groups * shape.kv_channels
        parts = [queries] * (1 + shape.attention_output_gate) + [shape.kv_channels] * 2
        yield from (part.flatten() for part in rows.view(shape.num_query_groups, -1).split(parts, dim=1))
    elif name.endswith("linear_fc1.weight") and settings.muon_split_fused and shape.gated:
        yield from rows.chunk(2)
    else:
        yield rows


def _orthogonal(matrix: Tensor, settings: OptimizerConfig) -> Tensor:
    """Newton-Schulz, and its size."""
    x = matrix / matrix.norm().clamp_min(1e-7)
    x = x.mT if len(matrix) > len(matrix.mT) else x
    for a, b, c in _polynomials(settings):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out, into = matrix.shape
    size = {"spectral": max(out, into) ** 0.5, "unit_rms_norm": (out / into) ** 0.5}
    size["shape_scaling"] = max(1.0, out / into) ** 0.5
    return (x.mT if out > into else x) * size[settings.muon_scale_mode] * settings.muon_extra_scale_factor


def _polynomials(settings: OptimizerConfig) -> Sequence[tuple[float, float, float]]:
    return list(islice(cycle(POLYNOMIALS[settings.muon_coefficient_type]), settings.muon_num_ns_steps))
