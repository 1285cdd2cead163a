"""Inverse frequencies of rotary position embeddings (RoPE, arXiv:2104.09864), plain and stretched."""

import math

import torch
from torch import Tensor

from models.shapes import GPTShape


def inv_freq(shape: GPTShape, device: torch.device, seq_length: int = 0) -> Tensor:
    """fp32 [d * rotary_percent / 2]: radians per position of every pair of channels, highest frequency first.

    seq_length: of the run, by which longrope chooses between its two sets of factors. Where windowed blocks have their
    own, these follow: twice as many (models/layers/self_attention.py takes its half).
    """
    dim = int(shape.kv_channels * shape.rotary_percent)
    stretched = _stretched(_plain(shape.rotary_base, dim, device), shape, dim, seq_length)
    if not shape.has_local_rope:
        return stretched
    return torch.cat([stretched, _plain(shape.rotary_base_local, dim, device)])


def _plain(base: float, dim: int, device: torch.device) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _stretched(plain: Tensor, shape: GPTShape, dim: int, seq_length: int) -> Tensor:
    if shape.rope_scaling == "linear":
        return plain / shape.rope_scaling_factor
    if shape.rope_scaling == "llama3":
        return _llama3(plain, shape)
    if shape.rope_scaling == "yarn":
        return _yarn(plain, shape, dim)
    if shape.rope_scaling == "longrope":
        longer = seq_length > shape.rope_original_max_position_embeddings
        factors = shape.rope_long_factor if longer else shape.rope_short_factor
        return plain / torch.tensor(factors, dtype=plain.dtype, device=plain.device)
    return plain


def attention_factor(shape: GPTShape) -> float:
    """What scaled RoPE multiplies queries and keys by: YaRN by 0.1 ln(factor) + 1 (arXiv:2309.00071, equation 22)."""
    if shape.rope_attention_factor and shape.rope_scaling != "none":
        return shape.rope_attention_factor
    if shape.rope_scaling == "longrope" and shape.rope_scaling_factor > 1:
        original = math.log(shape.rope_original_max_position_embeddings)
        return math.sqrt(1 + math.log(shape.rope_scaling_factor) / original)  # arXiv:2402.13753, section 3.3
    scaled = shape.rope_scaling == "yarn" and shape.rope_scaling_factor > 1
    return 0.1 * math.log(shape.rope_scaling_factor) + 1.0 if scaled else 1.0


def _llama3(plain: Tensor, shape: GPTShape) -> Tensor:
    """Llama 3.1's rule (its model card's code): long wavelengths are stretched, short ones kept, a ramp between."""
    turns = shape.rope_original_max_position_embeddings * plain / (2 * math.pi)
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).float()
    return plain * (keep + (1 - keep) / shape.rope_scaling_factor)


def _yarn(plain: Tensor, shape: GPTShape, dim: int) -> Tensor:
    """NTK-by-parts (arXiv:2309.00071, section 3.2), with the ramp over channel numbers as its authors' code has it."""

    def channel(turns: float) -> float:
        return (
            dim
            * math.log(shape.rope_original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(shape.rotary_base))
        )

    low, high = channel(shape.yarn_beta_fast), channel(shape.yarn_beta_slow)
    if shape.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=plain.device) - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain * (keep + (1 - keep) / shape.rope_scaling_factor)
