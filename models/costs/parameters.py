"""Every parameter of a model, by canonical name and full shape.

Shape letters: h = hidden_size, f = ffn_hidden_size (of the MLP, an expert, or the shared experts), E = experts,
n = num_attention_heads, g = num_query_groups, d = kv_channels. A gated ``linear_fc1`` holds the gate's f rows, then
the other f. The router's expert bias is no parameter: no gradient moves it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from models.activations import ACTIVATIONS
from models.norms import NORMS
from models.shapes import GPTShape

MAMBA_TAPS = 4
"""Tokens that the convolution of a Mamba-2 mixer, or of a gated delta net, sees in megatron-core."""


@dataclass(slots=True, frozen=True)
class Parameter:
    """A parameter of the whole model, as no rank holds it alone."""

    name: str
    """Canonical: Transformer Engine's spelling, global block number."""

    shape: tuple[int, ...]
    """Full shape, in the orientation of torch.nn.Linear: [out, in]; of all experts together: [E, out, in]."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Whether it holds the experts among which the router chooses."""
        return ".mlp.experts." in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether Muon updates it, of experts each by itself (training/muon/matrices.py)."""
        others = ("word_embeddings.weight", "output_layer.weight", "conv1d.weight")
        return len(self.shape) - self.of_experts == 2 and not self.name.endswith(others)


def parameters(shape: GPTShape, *, padded_vocab: bool = True) -> Iterator[Parameter]:
    """Every parameter of the model, once, from the embedding to the output layer, then multi-token prediction.

    padded_vocab: count the rows that only round the vocabulary up, which exist but are never trained.
    """
    yield from embedding_parameters(shape, padded_vocab=padded_vocab)
    for block, symbols in enumerate(shape.blocks):  # found once: a frequency is read for all blocks at a time
        yield from _block(shape, f"layers.{block}.", symbols)
    yield from head_parameters(shape, padded_vocab=padded_vocab)
    for depth in range(shape.mtp_num_layers):
        yield from mtp_parameters(shape, depth)


def num_parameters(shape: GPTShape, *, padded_vocab: bool = False) -> int:
    """Parameters of the model, without the padding of the vocabulary unless asked: the published way."""
    return sum(times * parameter.size for times, parameter in _counted(shape, padded_vocab=padded_vocab))


def active_parameters(shape: GPTShape) -> int:
    """Parameters of the model that one token meets: of all experts, the moe_router_topk that it is sent to.

    The published way: all of the embedding counts, without padding. Multi-token prediction counts where there is any.
    """
    return sum(times * sum_active(shape, [parameter]) for times, parameter in _counted(shape, padded_vocab=False))


def _counted(shape: GPTShape, *, padded_vocab: bool) -> Iterator[tuple[int, Parameter]]:
    """``parameters``, of blocks that are alike one, and how many there are: a search asks for thousands of models."""
    alike = Counter(shape.blocks)
    yield from ((1, parameter) for parameter in embedding_parameters(shape, padded_vocab=padded_vocab))
    for symbols, blocks in alike.items():
        yield from ((blocks, parameter) for parameter in _block(shape, "layers.0.", symbols))
    yield from ((1, parameter) for parameter in head_parameters(shape, padded_vocab=padded_vocab))
    for depth in range(shape.mtp_num_layers):
        yield from ((1, parameter) for parameter in mtp_parameters(shape, depth))


def mtp_only_parameters(shape: GPTShape) -> int:
    """Parameters that are there for multi-token prediction alone, which generation can do without."""
    return sum(parameter.size for depth in range(shape.mtp_num_layers) for parameter in mtp_parameters(shape, depth))


def sum_active(shape: GPTShape, listed: Iterable[Parameter]) -> int:
    """Elements of the listed parameters that one token meets."""
    topk, experts = shape.moe_router_topk, shape.num_moe_experts
    return sum(parameter.size * topk // experts if parameter.of_experts else parameter.size for parameter in listed)


def embedding_parameters(shape: GPTShape, *, padded_vocab: bool = True) -> Iterator[Parameter]:
    """What the first pipeline chunk holds before its blocks."""
    yield Parameter("word_embeddings.weight", (_vocab(shape, padded_vocab), shape.hidden_size))
    if shape.position_embedding_type == "learned_absolute":
        yield Parameter("position_embeddings.weight", (shape.max_position_embeddings, shape.hidden_size))


def block_parameters(shape: GPTShape, block: int) -> Iterator[Parameter]:
    """The parameters of block ``block``, counted from 0 over the whole model. Raises UserError for a bad frequency."""
    yield from _block(shape, f"layers.{block}.", shape.blocks[block])


def head_parameters(shape: GPTShape, *, padded_vocab: bool = True) -> Iterator[Parameter]:
    """What the last pipeline chunk holds after its blocks; a tied output layer adds nothing of its own."""
    yield from _norm(shape, "final_layernorm.", shape.hidden_size)
    if shape.untie_embeddings_and_output_weights:
        yield Parameter("output_layer.weight", (_vocab(shape, padded_vocab), shape.hidden_size))


def mtp_parameters(shape: GPTShape, depth: int) -> Iterator[Parameter]:
    """What the last pipeline chunk holds for multi-token-prediction depth ``depth``, counted from 0.

    ``eh_proj`` makes h channels of the 2 h of a normed embedding and a normed hidden state; the block behind it is of
    the kind of the model's last one (arXiv:2412.19437, section 2.2). Embedding and output layer are the model's.
    """
    h, prefix = shape.hidden_size, f"mtp.{depth}."
    yield from _norm(shape, f"{prefix}enorm.", h)
    yield from _norm(shape, f"{prefix}hnorm.", h)
    yield from _linear(f"{prefix}eh_proj", h, 2 * h, bias=False)
    yield from _block(shape, prefix, shape.blocks[-1])
    yield from _norm(shape, f"{prefix}final_layernorm.", h)


def _block(shape: GPTShape, prefix: str, symbols: str) -> Iterator[Parameter]:
    """symbols: its sublayers', as ``GPTShape.blocks`` has them."""
    for symbol in symbols:
        yield from _SUBLAYERS[symbol](shape, prefix)


def _attention(shape: GPTShape, prefix: str) -> Iterator[Parameter]:
    """``linear_qkv`` holds, group after group, the group's n/g query heads, its key and its value: [(n + 2g) d, h];
    with an output gate, behind its queries as many rows of gates."""
    h, attention, rows = shape.hidden_size, f"{prefix}self_attention.", shape.query_size + 2 * shape.kv_size
    rows += shape.query_size if shape.attention_output_gate else 0
    if shape.pre_norm:
        yield from _norm(shape, f"{attention}linear_qkv.layer_norm_", h)
    yield from _linear(f"{attention}linear_qkv", rows, h, bias=shape.qkv_bias)
    if shape.qk_layernorm:
        full = shape.qk_layernorm_full_width
        yield from _norm(shape, f"{attention}q_layernorm.", shape.query_size if full else shape.kv_channels)
        yield from _norm(shape, f"{attention}k_layernorm.", shape.kv_size if full else shape.kv_channels)
    yield from _softmax_offset(shape, attention)
    yield from _linear(f"{attention}linear_proj", h, shape.query_size, bias=shape.proj_bias)
    yield from _post_norm(shape, f"{attention}linear_proj.")


def _softmax_offset(shape: GPTShape, attention: str) -> Iterator[Parameter]:
    """Of each head, the logit of what its softmax gives no token."""
    if shape.softmax_type == "learnable":
        yield Parameter(f"{attention}core_attention.softmax_offset", (shape.num_attention_heads,))


def _latent_attention(shape: GPTShape, prefix: str) -> Iterator[Parameter]:
    """Its first norm stands alone: two projections read it. Down to the latents, with the rotary key behind those of
    keys and values, then up to the heads (arXiv:2405.04434, section 2.1)."""
    h, n, attention = shape.hidden_size, shape.num_attention_heads, f"{prefix}self_attention."
    rotary, queries = shape.qk_pos_emb_head_dim, n * (shape.qk_head_dim + shape.qk_pos_emb_head_dim)
    yield from _norm(shape, f"{prefix}input_layernorm.", h)
    if shape.q_lora_rank:
        yield from _linear(f"{attention}linear_q_down_proj", shape.q_lora_rank, h, bias=False)
        yield from _up(shape, f"{attention}linear_q_up_proj", queries, shape.q_lora_rank)
    else:
        yield from _linear(f"{attention}linear_q_proj", queries, h, bias=False)
    yield from _linear(f"{attention}linear_kv_down_proj", shape.kv_lora_rank + rotary, h, bias=False)
    yield from _up(
        shape, f"{attention}linear_kv_up_proj", n * (shape.qk_head_dim + shape.v_head_dim), shape.kv_lora_rank
    )
    yield from _softmax_offset(shape, attention)
    yield from _linear(f"{attention}linear_proj", h, n * shape.v_head_dim, bias=shape.add_bias_linear)


def _up(shape: GPTShape, name: str, rows: int, columns: int) -> Iterator[Parameter]:
    """A projection up from a latent vector, which is normed before it."""
    if shape.qk_layernorm:
        yield from _norm(shape, f"{name}.layer_norm_", columns)
    yield from _linear(name, rows, columns, bias=False)


def _gated_delta_net(shape: GPTShape, prefix: str) -> Iterator[Parameter]:
    """Rows of ``in_proj``: queries, keys, values and gates of all heads, then of each value's head how much is written
    and how fast it is forgotten; TP splits each of the six. The first three pass a convolution (arXiv:2412.06464)."""
    h, attention, heads = shape.hidden_size, f"{prefix}self_attention.", shape.linear_num_value_heads
    keys, values = shape.linear_num_key_heads * shape.linear_key_head_dim, heads * shape.linear_value_head_dim
    yield Parameter(f"{attention}dt_bias", (heads,))
    yield Parameter(f"{attention}A_log", (heads,))
    yield from _norm(shape, f"{attention}in_proj.layer_norm_", h)
    yield from _linear(f"{attention}in_proj", 2 * keys + 2 * values + 2 * heads, h, bias=False)
    yield Parameter(f"{attention}conv1d.weight", (2 * keys + values, MAMBA_TAPS))
    yield Parameter(f"{attention}out_norm.weight", (shape.linear_value_head_dim,))
    yield from _linear(f"{attention}out_proj", h, values, bias=False)


def _mamba(shape: GPTShape, prefix: str) -> Iterator[Parameter]:
    """Rows of ``in_proj``: gate and input, then of each group what writes states and what reads them, then a step of
    each head; TP splits each of the five. All but gate and steps pass a convolution (arXiv:2405.21060, section 7)."""
    h, mixer, heads = shape.hidden_size, f"{prefix}mixer.", shape.mamba_heads
    inner, states = heads * shape.mamba_head_dim, shape.mamba_num_groups * shape.mamba_state_dim
    convolved = inner + 2 * states
    for name in ("dt_bias", "A_log", "D"):
        yield Parameter(f"{mixer}{name}", (heads,))
    yield from _norm(shape, f"{mixer}in_proj.layer_norm_", h)
    yield from _linear(f"{mixer}in_proj", inner + convolved + heads, h, bias=False)
    yield Parameter(f"{mixer}conv1d.weight", (convolved, MAMBA_TAPS))
    yield Parameter(f"{mixer}conv1d.bias", (convolved,))
    yield Parameter(f"{mixer}norm.weight", (inner,))
    yield from _linear(f"{mixer}out_proj", h, inner, bias=False)


def _mlp(shape: GPTShape, prefix: str) -> Iterator[Parameter]:
    h, f, bias = shape.hidden_size, shape.ffn_hidden_size, shape.fc_bias
    if shape.pre_norm:
        yield from _norm(shape, f"{prefix}mlp.linear_fc1.layer_norm_", h)
    yield from _linear(f"{prefix}mlp.linear_fc1", _fc1_rows(shape, f), h, bias=bias)
    for name in ACTIVATIONS[shape.activation].learned:
        yield Parameter(f"{prefix}mlp.activation_func.{name}", (1,))
    yield from _linear(f"{prefix}mlp.linear_fc2", h, f, bias=bias)
    yield from _post_norm(shape, f"{prefix}mlp.linear_fc2.")


def _experts(shape: GPTShape, prefix: str) -> Iterator[Parameter]:
    """Its norm stands alone: the router and all experts read it."""
    h, experts, f = shape.hidden_size, shape.num_moe_experts, shape.expert_ffn_hidden_size
    yield from _norm(shape, f"{prefix}pre_mlp_layernorm.", h)
    bias = shape.add_bias_linear
    yield from _linear(f"{prefix}mlp.router", experts, h, bias=bias)
    for name, rows, columns in (("linear_fc1", _fc1_rows(shape, f), h), ("linear_fc2", h, f)):
        yield Parameter(f"{prefix}mlp.experts.{name}.weight", (experts, rows, columns))
        if bias:
            yield Parameter(f"{prefix}mlp.experts.{name}.bias", (experts, rows))
    if shared := shape.moe_shared_expert_intermediate_size:
        yield from _linear(f"{prefix}mlp.shared_experts.linear_fc1", _fc1_rows(shape, shared), h, bias=False)
        yield from _linear(f"{prefix}mlp.shared_experts.linear_fc2", h, shared, bias=False)
        if shape.moe_shared_expert_gate:
            yield Parameter(f"{prefix}mlp.shared_experts.gate_weight", (1, h))


_SUBLAYERS = {
    "M": _mamba,
    "G": _gated_delta_net,
    "*": _attention,
    "+": _latent_attention,
    "-": _mlp,
    "E": _experts,
}
"""By HybridModel's symbols."""


def _fc1_rows(shape: GPTShape, width: int) -> int:
    return 2 * width if shape.gated else width


def _vocab(shape: GPTShape, padded: bool) -> int:
    return shape.padded_vocab_size if padded else shape.vocab_size


def _norm(shape: GPTShape, prefix: str, size: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", (size,))
    if NORMS[shape.normalization].bias:
        yield Parameter(f"{prefix}bias", (size,))


def _post_norm(shape: GPTShape, projection: str) -> Iterator[Parameter]:
    """Of what a projection adds to the residual stream, by Megatron-Bridge's name."""
    if shape.post_norm:
        yield from _norm(shape, f"{projection}post_layernorm.", shape.hidden_size)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (rows, columns))
    if bias:
        yield Parameter(f"{name}.bias", (rows,))
