"""FLOPs per token of a shape, in the conventions that others publish, and what devices can do at most.

Only matrix products count, two FLOPs per multiply-add; a backward pass costs twice its forward pass. Letters:
L blocks, h hidden, s sequence, v vocabulary (without padding), n heads, d head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.shapes import GPTShape, num_parameters

DType = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


def flops_per_token(shape: GPTShape, seq_length: int) -> float:
    """Model FLOPs to train on one token: forward and backward, nothing recomputed.

    Megatron-LM's convention: a causal query sees seq_length / 2 keys. For a GPT with a four-fold MLP this is
    equation 3 of arXiv:2104.04473 without its recomputation and with s/6h halved for causality:
    72 L h^2 (1 + s/12h + v/12Lh).
    """
    return 3 * (shape.num_layers * _block(shape, seq_length) + _logits(shape))


def flops_per_token_palm(shape: GPTShape, seq_length: int) -> float:
    """Model FLOPs per token as PaLM defines MFU: 6 N + 12 L n d s (arXiv:2204.02311, appendix B).

    Attention is not halved for causality. N is every parameter but those that are only looked up: learned
    positions, and the word embeddings unless the output layer is tied to them.
    """
    looked_up = shape.vocab_size * shape.hidden_size if shape.untie_embeddings_and_output_weights else 0
    if shape.position_embedding_type == "learned_absolute":
        looked_up += shape.max_position_embeddings * shape.hidden_size
    attention = 12 * shape.num_layers * shape.query_size * seq_length
    return float(6 * (num_parameters(shape) - looked_up) + attention)


def hardware_flops_per_token(
    shape: GPTShape,
    seq_length: int,
    *,
    recompute_granularity: Literal["full", "selective"] | None = None,
    recompute_method: Literal["uniform", "block"] | None = None,
    recompute_num_layers: int | None = None,
    recompute_modules: Sequence[str] = ("core_attn",),
    layers_per_chunk: Sequence[int] | None = None,
) -> float:
    """FLOPs per token that devices execute: ``flops_per_token`` and a second forward of what is recomputed.

    layers_per_chunk: blocks of each pipeline chunk, needed by the block method, which recomputes the first
    recompute_num_layers of each; None: one chunk. What a flash-attention kernel recomputes inside itself is
    not counted.
    """
    extra = 0.0
    if recompute_granularity == "full":
        blocks = shape.num_layers
        if recompute_method == "block":
            chunks = [shape.num_layers] if layers_per_chunk is None else layers_per_chunk
            blocks = sum(min(recompute_num_layers or 0, chunk) for chunk in chunks)
        extra = blocks * _block(shape, seq_length)
    elif recompute_granularity == "selective":
        cost = {"core_attn": _core_attention(shape, seq_length), "mlp": _mlp(shape)}
        extra = shape.num_layers * sum(cost.get(module, 0.0) for module in recompute_modules)
    return flops_per_token(shape, seq_length) + extra


def _block(shape: GPTShape, seq_length: int) -> float:
    return _projections(shape) + _core_attention(shape, seq_length) + _mlp(shape)


def _projections(shape: GPTShape) -> float:
    """Queries, keys, values, and the output projection: forward FLOPs per token and block."""
    return 2.0 * shape.hidden_size * (2 * shape.query_size + 2 * shape.kv_size)


def _core_attention(shape: GPTShape, seq_length: int) -> float:
    """Scores and weighted values over the s / 2 keys that a query sees on average."""
    return 2.0 * shape.query_size * 2 * (seq_length / 2)


def _mlp(shape: GPTShape) -> float:
    return 2.0 * shape.hidden_size * shape.ffn_hidden_size * (3 if shape.gated else 2)


def _logits(shape: GPTShape) -> float:
    return 2.0 * shape.hidden_size * shape.vocab_size


# ---- what devices can do


@dataclass(slots=True, frozen=True)
class Peaks:
    """Dense matrix-product TFLOPS of one device; None where it has no such units, or no published figure.

    fp32: ordinary cores; the others: tensor cores, accumulating in fp32. Where a datasheet prints the double
    figure of 2:4 sparse matrices ("with sparsity"), it is halved here.
    """

    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None


DEVICES: list[tuple[frozenset[str], Peaks]] = [
    # Words that torch.cuda.get_device_name() must contain. The first match wins: special boards come first.
    # GB300 NVL72 and HGX B300 product pages: per rack of 72 and board of 8 GPUs, sparse.
    (frozenset({"GB300"}), Peaks(None, 1250, 2500, 2500, 5000)),
    (frozenset({"B300"}), Peaks(75, 1125, 2250, 2250, 4500)),
    # HGX B200 and GB200 NVL72 product pages, likewise.
    (frozenset({"GB200"}), Peaks(80, 1250, 2500, 2500, 5000)),
    (frozenset({"B200"}), Peaks(75, 1125, 2250, 2250, 4500)),
    # NVIDIA H200 datasheet: columns NVL and SXM.
    (frozenset({"H200", "NVL"}), Peaks(60, 417.5, 835.5, 835.5, 1670.5)),
    (frozenset({"H200"}), Peaks(67, 494.5, 989.5, 989.5, 1979)),
    # NVIDIA GH200 datasheet; NVIDIA H100 datasheet: columns PCIe (2022), NVL and SXM. H800 SXM: as H100 SXM.
    (frozenset({"GH200"}), Peaks(67, 494.5, 989.5, 989.5, 1979)),
    (frozenset({"H100", "PCIE"}), Peaks(51, 378, 756.5, 756.5, 1513)),
    (frozenset({"H100", "NVL"}), Peaks(60, 417.5, 835.5, 835.5, 1670.5)),
    (frozenset({"H100"}), Peaks(67, 494.5, 989.5, 989.5, 1979)),
    (frozenset({"H800", "PCIE"}), Peaks(51, 378, 756.5, 756.5, 1513)),
    (frozenset({"H800"}), Peaks(67, 494.5, 989.5, 989.5, 1979)),
    # NVIDIA H20 datasheet.
    (frozenset({"H20"}), Peaks(44, 74, 148, 148, 296)),
    # NVIDIA A100 datasheet, the same for PCIe and SXM; the A800 differs in NVLink only.
    (frozenset({"A100"}), Peaks(19.5, 156, 312, 312, None)),
    (frozenset({"A800"}), Peaks(19.5, 156, 312, 312, None)),
    # NVIDIA A40, A30 and A10 datasheets.
    (frozenset({"A40"}), Peaks(37.4, 74.8, 149.7, 149.7, None)),
    (frozenset({"A30"}), Peaks(10.3, 82, 165, 165, None)),
    (frozenset({"A10"}), Peaks(31.2, 62.5, 125, 125, None)),
    # NVIDIA L40S, L40 and L4 datasheets.
    (frozenset({"L40S"}), Peaks(91.6, 183, 362, 362, 733)),
    (frozenset({"L40"}), Peaks(90.5, 90.5, 181, 181, 362)),
    (frozenset({"L4"}), Peaks(30.3, 60, 121, 121, 242.5)),
    # NVIDIA T4 and V100 datasheets (before bf16 and tf32).
    (frozenset({"T4"}), Peaks(8.1, None, 65, None, None)),
    (frozenset({"V100S"}), Peaks(16.4, None, 130, None, None)),
    (frozenset({"V100", "PCIE"}), Peaks(14, None, 112, None, None)),
    (frozenset({"V100"}), Peaks(15.7, None, 125, None, None)),
]
"""Devices whose figures are published, newest first."""


def peak_flops(device_name: str, dtype: DType) -> float | None:
    """Dense matrix-product FLOPS of the device that torch.cuda.get_device_name() calls so; None when unknown.

    A MIG slice is unknown: its name tells the whole device's model, not the slice's share.
    """
    words = set(device_name.upper().replace("-", " ").split())
    if "MIG" in words:
        return None
    for marks, peaks in DEVICES:
        if marks <= words:
            tflops: float | None = getattr(peaks, dtype)
            return None if tflops is None else tflops * 1e12
    return None
