"""FLOPs per token of a shape, in the conventions that others publish, and what devices can do at most.

Only matrix products count, two FLOPs per multiply-add; a backward pass costs twice its forward pass. Of experts, those
that a token is sent to count, as if none were dropped. Letters: L blocks, h hidden, s sequence, v vocabulary (without
padding), n heads, d head width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from models.costs.parameters import Parameter, block_parameters, mtp_parameters, sum_active
from models.shapes import GPTShape
from models.symbols import ATTENTIONS

MAMBA_CHUNK = 128
"""Tokens whose products Mamba-2's kernels make at once, in megatron-core."""
DELTA_CHUNK = 64
"""The same of gated delta nets, in flash-linear-attention."""

DType = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


def flops_per_token(shape: GPTShape, seq_length: int) -> float:
    """Model FLOPs to train on one token: forward and backward, nothing recomputed.

    Megatron-LM's convention: a causal query sees seq_length / 2 keys. For a GPT with a four-fold MLP this is
    equation 3 of arXiv:2104.04473 without its recomputation and with s/6h halved for causality:
    72 L h^2 (1 + s/12h + v/12Lh). Each depth of multi-token prediction adds its block, and logits once more. Mamba-2
    and gated delta nets count as their chunked algorithms multiply, half a chunk of 128 or 64 tokens being seen on
    average.
    """
    blocks = sum(_block(shape, block, seq_length) for block in range(shape.num_layers))
    return 3 * (blocks + depth_flops(shape, seq_length) + (1 + shape.mtp_num_layers) * _logits(shape))


_RECOMPUTED_NAMES: dict[str, tuple[str, ...]] = {
    "mlp": (".mlp.linear_",),
    "moe": (".mlp.router.", ".mlp.experts.", ".mlp.shared_experts."),
    "shared_experts": (".mlp.shared_experts.",),
    "mla_up_proj": (".linear_q_up_proj.", ".linear_kv_up_proj."),
}
"""What is in the names of the parameters that a recomputed module multiplies by. mcore's modules that are not here,
but for core_attn, multiply no matrices."""


def hardware_flops_per_token(
    shape: GPTShape,
    seq_length: int,
    *,
    recompute_granularity: Literal["full", "selective"] | None = None,
    recompute_method: Literal["uniform", "block"] | None = None,
    recompute_num_layers: int | None = None,
    recompute_modules: Sequence[str] = ("core_attn",),
    layers_per_chunk: Sequence[int] | None = None,
    recompute_logits: bool = False,
) -> float:
    """FLOPs per token that devices execute: ``flops_per_token`` and a second forward of what is recomputed.

    layers_per_chunk: blocks of each pipeline chunk, needed by the block method, which recomputes the first
    recompute_num_layers of each; None: one chunk. What a flash-attention kernel recomputes inside itself is
    not counted. mcore recomputes depths of multi-token prediction by the uniform method only.
    """
    extra = 0.0
    if recompute_granularity == "full":
        chunks = [shape.num_layers] if layers_per_chunk is None else list(layers_per_chunk)
        whole = recompute_method != "block"
        most = shape.num_layers if whole else recompute_num_layers or 0
        extra = sum(_block(shape, block, seq_length) for block in _first_blocks(chunks, most))
        extra += depth_flops(shape, seq_length) if whole else 0
    elif recompute_granularity == "selective":
        extra = _selected(shape, seq_length, recompute_modules)
    if recompute_logits:
        extra += (1 + shape.mtp_num_layers) * _logits(shape)
    return flops_per_token(shape, seq_length) + extra


def _first_blocks(chunks: Sequence[int], most: int) -> Iterable[int]:
    """Numbers of the first ``most`` blocks of each chunk."""
    first = 0
    for count in chunks:
        yield from range(first, first + min(most, count))
        first += count


def _selected(shape: GPTShape, seq_length: int, modules: Sequence[str]) -> float:
    """One more forward of these modules wherever they are: per token, in blocks and in multi-token prediction."""
    marks = {mark for module in modules for mark in _RECOMPUTED_NAMES.get(module, ())}
    again = (parameter for parameter in _all_blocks(shape) if any(mark in parameter.name for mark in marks))
    attentions = _attentions(shape) if "core_attn" in modules else []
    return _products(shape, again) + sum(_core_attention(shape, seq_length, windowed) for windowed in attentions)


def _all_blocks(shape: GPTShape) -> Iterable[Parameter]:
    for block in range(shape.num_layers):
        yield from block_parameters(shape, block)
    for depth in range(shape.mtp_num_layers):
        yield from mtp_parameters(shape, depth)


def _block(shape: GPTShape, block: int, seq_length: int) -> float:
    """Forward FLOPs per token of one block."""
    products, symbols = _products(shape, block_parameters(shape, block)), shape.blocks[block]
    if set(symbols) & set(ATTENTIONS):
        products += _core_attention(shape, seq_length, _local_blocks(shape)[block])
    products += _scan(shape, min(seq_length, MAMBA_CHUNK) / 2) if "M" in symbols else 0.0
    return products + (_delta_rule(shape, min(seq_length, DELTA_CHUNK) / 2) if "G" in symbols else 0.0)


def sublayer_flops(shape: GPTShape, block: int, seq_length: int) -> tuple[float, ...]:
    """Forward FLOPs per token of each sublayer of one block, in the order of ``GPTShape.blocks``."""
    whole = _block(shape, block, seq_length)
    if len(shape.blocks[block]) == 1:
        return (whole,)
    mlp = _products(shape, (each for each in block_parameters(shape, block) if ".mlp." in each.name))
    return whole - mlp, mlp


def depth_flops(shape: GPTShape, seq_length: int) -> float:
    """Forward FLOPs per token of all depths of multi-token prediction, without their logits."""
    return sum(
        _products(shape, mtp_parameters(shape, depth)) + _core_attention(shape, seq_length, _attentions(shape)[-1])
        for depth in range(shape.mtp_num_layers)
    )


def _products(shape: GPTShape, listed: Iterable[Parameter]) -> float:
    """Of the matrices among these parameters: a token is multiplied once by each that it meets."""
    matrices = (
        each
        for each in listed
        if len(each.shape) > 1 and ".conv1d." not in each.name and not each.name.endswith(".bias")  # experts' are 2-d
    )
    return 2.0 * sum_active(shape, matrices)


def _attentions(shape: GPTShape) -> list[bool]:
    """Whether each attention of the model sees a window only: of every block, then of each multi-token depth.

    mcore counts the layers of a depth from 1, so that a depth does what the first block does.
    """
    blocks = zip(_local_blocks(shape), shape.blocks, strict=True)
    own = [windowed for windowed, symbols in blocks if set(symbols) & set(ATTENTIONS)]
    return own + own[:1] * shape.mtp_num_layers


def _local_blocks(shape: GPTShape) -> tuple[bool, ...]:
    """Whether each block's attention sees a window, or a chunk, only."""
    return shape.chunk_blocks if shape.attention_chunk_size else shape.window_blocks


def _scan(shape: GPTShape, keys: float) -> float:
    """Of Mamba-2's state space model, in chunks (arXiv:2405.21060, section 6.3): forward FLOPs per token.

    keys: tokens of its own chunk that a token sees: one score a group and one weighted input a head for each. Then what
    it adds to the state, and what it reads of the one before its chunk.
    """
    inner, states = shape.mamba_heads * shape.mamba_head_dim, shape.mamba_state_dim
    return 2.0 * (keys * (shape.mamba_num_groups * states + inner) + 2 * states * inner)


def _delta_rule(shape: GPTShape, keys: float) -> float:
    """Of a gated delta net, in chunks (arXiv:2412.06464, section 3.3): forward FLOPs per token.

    keys: tokens of its own chunk that a token sees: scores of keys and of queries, the weighted values, and the
    triangular system, which is solved for as many columns as a key and a value have. Then three products with a state.
    """
    key, value = shape.linear_key_head_dim, shape.linear_value_head_dim
    each = keys * (2 * key + value) + keys * (key + value) + 3 * key * value
    return 2.0 * shape.linear_num_value_heads * each


def _core_attention(shape: GPTShape, seq_length: int, windowed: bool) -> float:
    """Scores and weighted values over the keys that a query sees on average: forward FLOPs per token.

    min(x, w) keys at position x, w being the window, averaged over x from 0 to s: w - w^2 / 2s, or s / 2 without one.
    """
    if shape.attention_chunk_size and windowed:
        keys = mean_chunk_keys(shape.attention_chunk_size, seq_length)
    else:
        window = min(seq_length, _window(shape, windowed) or seq_length)
        keys = window - window**2 / (2 * seq_length)
    return 2.0 * _attention_width(shape) * keys


def mean_chunk_keys(chunk: int, seq_length: int) -> float:
    """Half of a chunk in whole ones, half of the rest in the last."""
    left = seq_length % chunk
    return (chunk**2 * (seq_length // chunk) + left**2) / (2 * seq_length)


def _window(shape: GPTShape, windowed: bool) -> int | None:
    """Keys that a query sees at most, its own among them; None: all before it."""
    return (shape.attention_chunk_size or shape.window_size[0] + 1) if windowed else None


def _attention_width(shape: GPTShape) -> int:
    """Multiply-adds per query and key: as wide as all heads' queries for its scores, as all heads' values after."""
    if shape.multi_latent_attention:
        return shape.num_attention_heads * (shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim)
    return 2 * shape.query_size


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
    fp4: float | None = None


DEVICES: list[tuple[frozenset[str], Peaks]] = [
    # Words that torch.cuda.get_device_name() must contain. The first match wins: special boards come first.
    # GB300 NVL72 and HGX B300 product pages: per rack of 72 and board of 8 GPUs, sparse.
    (frozenset({"GB300"}), Peaks(None, 1250, 2500, 2500, 5000, 15000)),
    (frozenset({"B300"}), Peaks(75, 1125, 2250, 2250, 4500, 13500)),
    # HGX B200 and GB200 NVL72 product pages, likewise.
    (frozenset({"GB200"}), Peaks(80, 1250, 2500, 2500, 5000, 10000)),
    (frozenset({"B200"}), Peaks(75, 1125, 2250, 2250, 4500, 9000)),
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
