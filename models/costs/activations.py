"""Bytes of activations at the peak, stage by stage.

Of each block, what its backward pass needs (Transformer Engine's modules; x of arXiv:2205.05198's sbh notation):
both norms' inputs and outputs, queries, keys, values and what attention returns, the first MLP product and the
activation after it. Two bytes an element, four in fp32.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.costs.cases import FORMATS, Column, MemoryColumns, element_bytes, tokens

LARGEST_BLOCK = 512
"""Queries that Triplane's own attention computes together (models/layers/blockwise_attention.py, BLOCK_ROWS)."""
SOFTMAX_BYTES = 4
"""Log-sum-exp of each query and head, which flash attention keeps in fp32."""


class BlockBytes(NamedTuple):
    """Of one block, one microbatch."""

    kept: Column
    """From its forward to its backward pass."""
    working: Column
    """Besides, while the backward pass is in it: what is recomputed, and gradients of the widest tensors."""


def block_bytes(columns: MemoryColumns, *, experts: bool) -> BlockBytes:
    """Of a dense block or one of experts."""
    model, layout, rows, width = columns.model, columns.layout, tokens(columns), element_bytes(columns)
    stream = stream_bytes(columns)
    attention = _attention_bytes(columns)
    if experts:
        mlp, wide = _expert_bytes(columns), _expert_working(columns)
    else:
        mlp, wide = _mlp_bytes(columns, model.ffn), width * rows * (1 + model.gated) * model.ffn / layout.tp
    own = columns.software.transformer_engine == 0
    mlp = np.where(own, _own_expert_bytes(columns) if experts else _own_mlp_bytes(columns, model.ffn), mlp)
    entered = np.where(columns.published.recomputes_norms > 0, 0.0, product_input_bytes(columns))
    norms = 2 * stream * (1 + entered / width)  # what they read, and what products then read
    norms = norms + (model.norms - 2) * stream  # those behind attention and MLP: what they read
    whole = np.where(own, _own_bytes(columns) + mlp, norms + attention + mlp)
    names = ("full", "mlp", "moe", "operators", "core_attn")
    of_mlp, of_moe = (mlp * 0, mlp) if experts else (mlp, mlp * 0)
    scores = _score_bytes(columns)
    kept_output = np.where(columns.recomputes("mlp") & own, stream, 0.0)
    again = np.select(
        [columns.recomputes(name) for name in names],
        [whole + scores - stream, of_mlp, of_moe, (whole - stream) * 0.5, scores],
        0.0,
    )
    wide = wide + width * rows * model.hidden  # a sequence piece of each TP rank, gathered for a weight's gradient
    wide = np.where(own, _own_working(columns, mlp, experts=experts), wide)
    return BlockBytes(kept=whole + scores - again + kept_output, working=again + wide)


def spared_bytes(columns: MemoryColumns, *, experts: bool) -> tuple[Column, Column]:
    """Of attention, and of the MLP or experts behind it: what each does not keep where it is computed again from its
    own input."""
    attention, mlp = attention_sublayer_bytes(columns), mlp_sublayer_bytes(columns, experts=experts)
    nothing_recomputed = block_bytes(columns, experts=experts).kept
    beside = (nothing_recomputed - attention - mlp) / 2  # norms behind them, masks of dropout
    return attention + beside - stream_bytes(columns), mlp + beside - stream_bytes(columns)


def norm_bytes(columns: MemoryColumns) -> Column:
    """Of the norm before a sublayer: what it reads, and what products then read."""
    model, width, stream = columns.model, element_bytes(columns), stream_bytes(columns)
    own = (model.norm_inputs * width + model.norm_bytes) / width * stream
    return np.where(columns.software.transformer_engine == 0, own, stream * (1 + product_input_bytes(columns) / width))


def attention_sublayer_bytes(columns: MemoryColumns) -> Column:
    """Of attention without an MLP behind it, nothing recomputed."""
    core = np.where(columns.matrices[3][0] > 0, _own_latent_bytes(columns), _own_grouped_bytes(columns))
    own = core + _own_score_bytes(columns)
    other = _attention_bytes(columns) + _score_bytes(columns)
    return norm_bytes(columns) + np.where(columns.software.transformer_engine == 0, own, other)


def mlp_sublayer_bytes(columns: MemoryColumns, *, experts: bool) -> Column:
    """Of an MLP, or of experts, without attention before it, nothing recomputed."""
    own = _own_expert_bytes(columns) if experts else _own_mlp_bytes(columns, columns.model.ffn)
    other = _expert_bytes(columns) if experts else _mlp_bytes(columns, columns.model.ffn)
    return norm_bytes(columns) + np.where(columns.software.transformer_engine == 0, own, other)


def _own_bytes(columns: MemoryColumns) -> Column:
    """But for the MLP, of this project's own modules: norms, rotary tables of each block, rotated copies.

    Counted from runs of models that differ in one width at a time, in bf16 and in fp32 (2026-11-21; norms of queries,
    dropout and latent attention 2026-11-22): bytes per token and channel. Dropout keeps its masks in the type of what
    it drops.
    """
    model, layout, width = columns.model, columns.layout, element_bytes(columns)
    norms = model.norms * (model.norm_inputs * width + model.norm_bytes) + 2 * width * model.hidden_dropout
    pieces = np.where(layout.sequence_parallel > 0, layout.tp, 1)
    attention = np.where(columns.matrices[3][0] > 0, _own_latent_bytes(columns), _own_grouped_bytes(columns))
    return tokens(columns) * norms * model.hidden / pieces + attention + _own_score_bytes(columns)


def _own_grouped_bytes(columns: MemoryColumns) -> Column:
    """Queries, keys and values, what norms of heads and rotation keep of them, and what attention returns."""
    model, width, alone = columns.model, element_bytes(columns), columns.layout.cp == 1
    copies_of_each = np.where(model.rotary > 0, 2 + alone, 3 - alone)  # without a turn the fused ones stay, too
    turned = width * copies_of_each + 8 * model.query_norms
    copies = (4 + width) * model.attention_dropout * model.query_width
    split = turned * (model.query_width + model.kv_width) + alone * (copies + SOFTMAX_BYTES * model.heads)
    split = split + 2 * width * (columns.layout.cp - 1) * model.kv_width  # the other context ranks' keys and values
    clipped = width * (model.query_width + (1 + model.query_norms) * model.kv_width)  # as traces have it (2026-11-28)
    split = split + model.clipped * clipped
    return tokens(columns) * (split / columns.layout.tp + 4 * width * model.rotary * model.head_dim)


def _own_latent_bytes(columns: MemoryColumns) -> Column:
    """Of latent attention: both latents with their norms, queries, keys and values head by head, rotary tables."""
    model, width = columns.model, element_bytes(columns)
    values = model.attention_width - model.query_width
    plain = _writes_scores(columns)
    heads = np.where(plain, 4, width) * (2 * model.query_width + values) + width * values
    heads = heads + np.where(plain, 0, SOFTMAX_BYTES) * model.heads
    gathered = width * (1 + columns.layout.cp) * (model.query_width + values)  # of all context ranks
    heads = np.where(columns.layout.cp > 1, gathered, heads)
    compressed, ranks = columns.matrices[0][0], columns.matrices[1][1] + columns.matrices[2][0]
    rotary = compressed - columns.matrices[1][1]
    return tokens(columns) * (heads / columns.layout.tp + (8 + width) * ranks + 6 * width * rotary)


def _writes_scores(columns: MemoryColumns) -> NDArray[np.bool_]:
    """PyTorch's attention on CPUs has a kernel for heads as wide in values as in queries, and without dropout.

    Over context ranks, and with sinks or capped scores, attention is in blocks of queries
    (models/layers/blockwise_attention.py): scores are computed, and none is kept.
    """
    return np.asarray(_makes_scores(columns) & (columns.layout.cp == 1) & ~_always_in_blocks(columns))


def _always_in_blocks(columns: MemoryColumns) -> NDArray[np.bool_]:
    return np.asarray((columns.model.capped_scores > 0) | (columns.model.softmax_offset > 0))


def _makes_scores(columns: MemoryColumns) -> NDArray[np.bool_]:
    model = columns.model
    uneven = (columns.matrices[3][0] > 0) & (model.attention_width != 2 * model.query_width)
    return np.asarray(uneven | (model.attention_dropout > 0))


def _block_score_bytes(columns: MemoryColumns) -> Column:
    """In the backward pass of one block of queries: its scores three times in fp32, with dropout what that leaves of
    them and its mask, too; keys and values of the whole sample with their gradients, of which the block before has left
    some. Counted from traces of 1,024 to 16,384 tokens over 2 to 16 context ranks, in bf16 and fp32 (2026-11-22)."""
    model, layout = columns.model, columns.layout
    piece = model.seq_length / np.where(layout.cp > 1, 2 * layout.cp, 1)
    rows = np.minimum(LARGEST_BLOCK, piece)
    scores = layout.mbs * model.heads / layout.tp * rows * model.seq_length
    both = tokens(columns) * layout.cp * model.attention_width / layout.tp
    left = np.where(piece > rows, element_bytes(columns), 0.0)
    more = 6 * model.attention_dropout + 20 * model.capped_scores + 10 * model.softmax_offset
    found = (12 + more) * scores + (8.5 + left) * both
    return np.where((_makes_scores(columns) & (layout.cp > 1)) | _always_in_blocks(columns), found, 0.0)


def _own_score_bytes(columns: MemoryColumns) -> Column:
    """In fp32 where they are written down: what softmax makes of them; with dropout its mask, and what that leaves."""
    return np.where(_writes_scores(columns), 4 + 8 * columns.model.attention_dropout, 0.0) * _scores(columns)


def _scores(columns: MemoryColumns) -> Column:
    return np.asarray(columns.model.heads / columns.layout.tp * columns.model.seq_length * tokens(columns))


def _own_mlp_bytes(columns: MemoryColumns, inner: Column) -> Column:
    """The first product, and of gated ones its two halves apart and their product."""
    model, width = columns.model, element_bytes(columns)
    return width * tokens(columns) * (2 + 3 * model.gated + model.gate_copies) * inner / columns.layout.tp


def _own_expert_bytes(columns: MemoryColumns) -> Column:
    """Of this project's experts, one after the other: a permuted copy, each product, and that times its weight.

    Counted from traces that differ in one width at a time, in bf16 and fp32 (2026-11-21): 24 bytes of each token sent,
    17 of each token and expert.
    """
    model, layout, rows = columns.model, columns.layout, tokens(columns) / columns.layout.tp
    sent, width = rows * model.topk * layout.etp, element_bytes(columns)
    inner = (3 + 3 * model.gated + model.gate_copies) * model.expert_ffn / layout.etp
    routed = 24 * sent + rows * (17 * model.experts + 8)
    return width * sent * (model.hidden + inner) + routed + _own_mlp_bytes(columns, model.shared_ffn)


def _own_working(columns: MemoryColumns, kept_mlp: Column, *, experts: bool) -> Column:
    """In the backward pass of one block of this project's own modules, as traces with full recomputation have it
    (2026-11-22): what its MLP needs; or, when what that has kept is free already, the gradients of scores before and
    after softmax, in fp32; two gradients of the stream; a gathered input."""
    layout = columns.layout
    gathered = np.where((layout.sequence_parallel > 0) & (layout.tp > 1), layout.tp * stream_bytes(columns), 0.0)
    mlp = _own_expert_working(columns) if experts else _own_mlp_working(columns, gathered)
    written = np.where(_writes_scores(columns), 8 * _scores(columns), 0.0)
    scores = written + _block_score_bytes(columns) - kept_mlp
    return np.maximum(mlp, scores) + gathered + 2 * stream_bytes(columns)


def _own_mlp_working(columns: MemoryColumns, gathered: Column) -> Column:
    """The most of three moments: at its second weight's gradient, for which its own is gathered too; at its gated
    product's; at its first weight's, when what the activation has kept is free already."""
    model, width = columns.model, element_bytes(columns)
    inner = width * tokens(columns) * model.ffn / columns.layout.tp
    weight = width * model.hidden * model.ffn / columns.layout.tp
    first = (1 + model.gated) * weight - model.gated * inner
    return np.maximum(inner + weight + gathered, np.maximum(2 * inner, first))


def _own_expert_working(columns: MemoryColumns) -> Column:
    """The most of three moments: as the experts' outputs are put together, or in the backward pass of one of them, at
    its activation's gradients, in fp32 for the weight of each token, or at its first weight's gradient, when what that
    expert has kept is free already."""
    model, layout, width = columns.model, columns.layout, element_bytes(columns)
    inner = model.expert_ffn / layout.etp
    sent = tokens(columns) / layout.tp * model.topk * layout.etp
    one = sent * layout.ep / np.maximum(1, model.experts)
    # Ranks that share an expert add its outputs up in fp32; what each had sent, and got, before it was gathered stays.
    shared = 2 * width + np.where(width == 2, 4, 0) + (4 + width * (1 + (layout.ep > 1))) / layout.etp
    together = np.where(layout.etp > 1, shared, 4 * width) * sent * model.hidden
    activation = width * sent * model.hidden + np.where(width == 2, 12, 8) * one * inner
    weight = width * (2 * sent * model.hidden + (1 + model.gated) * inner * (model.hidden - one))
    return np.maximum(together, np.maximum(activation, weight))


def stream_bytes(columns: MemoryColumns) -> Column:
    """What one block hands to the next: a sequence piece of it on each TP rank, under sequence parallelism."""
    pieces = np.where(columns.layout.sequence_parallel > 0, columns.layout.tp, 1)
    return np.asarray(element_bytes(columns) * tokens(columns) * columns.model.hidden / pieces)


def product_input_bytes(columns: MemoryColumns) -> Column:
    """Of an element that a product has read and its weight's gradient reads again.

    Transformer Engine keeps it as it multiplied it: in fp8, with a scale for 32 in mxfp8, in four bits with one for 16
    in nvfp4 (v2.9, pytorch/module/linear.py and layernorm_linear.py: ``update_usage(rowwise_usage=False)``).
    """
    return np.select([columns.format == FORMATS.index(name) for name in ("fp8", "mxfp8", "fp4")],
                     [1.0, 1 + 1 / 32, 0.5 + 1 / 16], element_bytes(columns))  # fmt: skip


def _attention_bytes(columns: MemoryColumns) -> Column:
    """Queries, keys, values, and what attention returns, which the products in eight bits and fewer keep no second time
    (megatron-core 0.19.2, transformer/attention.py:443), but for delayed scales: as all fp8 with a scale a tensor is
    taken here."""
    through, latents = through_bytes(columns)
    scale = SOFTMAX_BYTES * tokens(columns) * columns.model.heads / columns.layout.tp
    return through + latents + returned_bytes(columns) + scale


def through_bytes(columns: MemoryColumns) -> tuple[Column, Column]:
    """Queries, keys and values; and latents, down-projected, before the norms and after."""
    model, layout, rows = columns.model, columns.layout, tokens(columns)
    latent = sum((n for n, _ in columns.matrices[:3:2]), np.zeros(columns.count))
    width = element_bytes(columns)
    is_latent = columns.matrices[3][0] > 0
    latent = np.where(is_latent, (width + product_input_bytes(columns)) * latent, 0.0)
    values = np.where(is_latent, model.attention_width - model.query_width, model.kv_width)
    through = width * (model.query_width + model.kv_width + values) * (1 + model.clipped)
    # what the norms have read, which in latent attention are the latents'
    normed = np.where(is_latent, 0.0, width * (model.query_width + model.kv_width) * model.query_norms)
    through = np.where(is_latent & (columns.published.recomputes_latents > 0), 0.0, through + normed)
    return rows * through / layout.tp, rows * latent


def returned_bytes(columns: MemoryColumns) -> Column:
    """What attention returns."""
    model = columns.model
    width = element_bytes(columns) + (columns.format == FORMATS.index("fp8"))
    return tokens(columns) * width * (model.attention_width - model.query_width) / columns.layout.tp


def _mlp_bytes(columns: MemoryColumns, inner: Column) -> Column:
    """The first product, and what the second one reads."""
    model, width = columns.model, element_bytes(columns)
    each = width * (1 + model.gated) + product_input_bytes(columns)
    return tokens(columns) * each * inner / columns.layout.tp


def _score_bytes(columns: MemoryColumns) -> Column:
    """Scores and probabilities that attention without flash keeps: 5 a s^2 b of 16 bits with its dropout mask."""
    each = 2 * element_bytes(columns) + 1
    return np.where(columns.published.flash_attention > 0, 0.0, each * _scores(columns))


def _expert_bytes(columns: MemoryColumns) -> Column:
    """The permuted copies that its experts read, their first product and activation, shared experts, the router.

    What experts return is not kept: each token's weight is applied within the activation (megatron-core 0.19.2,
    transformer/moe/experts.py:890).
    """
    model, layout = columns.model, columns.layout
    width, read = element_bytes(columns), product_input_bytes(columns)
    second = np.where(columns.published.recomputes_expert_activation > 0, 0.0, read)
    inner = (width * (1 + model.gated) + second) * model.expert_ffn / layout.etp
    own = sent_tokens(columns) * (read * model.expert_hidden + inner)
    return own + _mlp_bytes(columns, model.shared_ffn) + 4 * tokens(columns) / layout.tp * 2 * model.experts


def _expert_working(columns: MemoryColumns) -> Column:
    """The gradients of what experts read, and of their first product."""
    model, width = columns.model, element_bytes(columns)
    inner = (1 + model.gated) * model.expert_ffn / columns.layout.etp
    return width * sent_tokens(columns) * (model.expert_hidden + inner)


def sent_tokens(columns: MemoryColumns) -> Column:
    """Tokens that the experts of a rank get of a microbatch, in balance."""
    layout = columns.layout
    return tokens(columns) / layout.tp * columns.model.topk * layout.etp


def in_flight(columns: MemoryColumns, stage: Column) -> Column:
    """Chunk-microbatches that a stage holds at most, in units of its whole stack of blocks.

    1F1B: PP - stage. Interleaved: 2 (PP - stage - 1) + (VPP - 1) PP + 1 chunks (Megatron's warm-up, arXiv:2104.04473,
    section 2.2).
    """
    layout = columns.layout
    chunks = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    interleaved = np.minimum(chunks, layout.microbatches * layout.vpp) / layout.vpp
    plain = np.minimum(layout.pp - stage, layout.microbatches)
    return np.where(layout.vpp > 1, interleaved, plain)


def lookup_bytes(columns: MemoryColumns) -> Column:
    """On the first stage, as a microbatch's backward pass ends: the word embeddings' whole gradient, in the weights'
    own type, and what enters it, gathered, masked and turned."""
    model, layout, width = columns.model, columns.layout, element_bytes(columns)
    stream = width * tokens(columns) * model.hidden
    return width * model.vocab / layout.tp * model.hidden + 3 * stream + stream_bytes(columns)


def depth_bytes(columns: MemoryColumns) -> Column:
    """On the last stage of this project's own modules, with depths of multi-token prediction: whole gradients of the
    output layer, from each head, and of the word embeddings; and what joins a depth's two inputs keeps: both norms, and
    both halves side by side. Counted from traces of 256 to 2,048 tokens, in bf16 and fp32 (2026-11-22)."""
    model, layout, width = columns.model, columns.layout, element_bytes(columns)
    pieces = np.where(layout.sequence_parallel > 0, layout.tp, 1)
    joined = tokens(columns) * model.hidden / pieces * (2 * (2 * width + 16) + 2 * width)
    gradients = (2 + model.extra_heads) * width * model.vocab / layout.tp * model.hidden
    there = (model.extra_heads > 0) & (columns.software.transformer_engine == 0)
    return np.where(there, gradients + model.extra_heads * joined, 0.0)


def loss_bytes(columns: MemoryColumns) -> Column:
    """On the last stage: the final norm; logits in 16 bits, and in fp32 for the softmax, then its gradient.

    fp32 logits become the softmax, and its gradient, in place; the weight's gradient then stands beside them. So does
    that of 16 bits beside its logits, where nothing adds it to the others' at once: with few tokens it is the larger.
    """
    model, layout, whole = columns.model, columns.layout, element_bytes(columns) == 4
    stream = np.where(columns.software.transformer_engine > 0, 6, 20) * model.hidden
    logits = np.where(whole, 4, columns.software.loss_bytes) * tokens(columns) * model.vocab
    vocabulary = model.hidden * model.vocab
    alone = np.where(columns.software.transformer_engine > 0, 0.0, 2 * tokens(columns) * model.vocab + 2 * vocabulary)
    weight = np.where(whole, 4 * vocabulary, np.maximum(0.0, alone - logits))
    head = np.where(np.isfinite(columns.software.loss_chunk_tokens), _piece_bytes(columns), logits + weight)
    # the final norm's output, and its gradient, of all TP ranks
    gathered = np.where(whole, 4 * (1 + layout.sequence_parallel) * tokens(columns) * model.hidden, 0.0)
    return (head + stream * tokens(columns)) / layout.tp + gathered


def _piece_bytes(columns: MemoryColumns) -> Column:
    """Of logits that are there piece by piece (models/layers/chunked_losses.py), of all TP ranks, beside the fp32 sum
    of the weight's gradient: the most of two moments, as the softmax is taken, and as a piece's own gradient of the
    weight is multiplied. Counted from traces in bf16 and fp32 (2026-11-25); where embeddings are tied, both of their
    gradients wait for each other, and small pieces hold more than this."""
    model, width = columns.model, element_bytes(columns)
    logits = np.minimum(tokens(columns), columns.software.loss_chunk_tokens) * model.vocab
    # Transformer Engine's product adds a piece's gradient to the main one, so that there is no sum beside it.
    vocabulary = np.where(columns.software.transformer_engine > 0, 0.0, model.hidden * model.vocab)
    softmax = np.where(width == 4, 4, columns.software.loss_bytes) * logits
    return np.maximum(4 * vocabulary + softmax, (4 + width) * vocabulary + width * logits)
