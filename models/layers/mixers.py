"""By what a model's Mamba-2 mixers and gated delta nets run, for the lines of a start."""

import torch
from megatron.core.ssm.gated_delta_net.common import HAVE_FLA

from models.layers.mamba import has_kernels
from models.shapes import GPTShape


def described(shape: GPTShape, device: torch.device) -> list[str]:
    """A line for each kind that the model has."""
    kinds = {
        "M": ("Mamba-2 layers", "mamba_ssm", has_kernels(device)),
        "G": ("gated delta nets", "flash-linear-attention", device.type == "cuda" and HAVE_FLA),
    }
    letters = set().union(*shape.blocks)
    return [_line(*kind, device) for letter, kind in kinds.items() if letter in letters]


def _line(what: str, package: str, kernels: bool, device: torch.device) -> str:
    if kernels:
        return f"{what}: by the kernels of {package}"
    why = f"{package} is not installed" if device.type == "cuda" else f"the kernels of {package} need CUDA"
    return f"{what}: in plain torch, which is slow ({why})"
