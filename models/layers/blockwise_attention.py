"""Causal attention in blocks of queries, each against only the keys that it can see.

For sliding windows, packed documents and the pieces that context parallelism leaves on a rank: what
``scaled_dot_product_attention`` needs a mask for. A mask belongs to one block at a time, in both directions, so it has
at most 512 rows whatever the sequence's length.

Shape letters: s queries on this rank, t keys from the sample's first token on, b microbatch, n query heads / TP,
g key-value groups / TP, d head width.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.layers.documents import Documents

BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive queries, and the keys that at least one of them sees."""

    rows: slice
    """Of this rank's queries."""
    first: int
    """Position of the first query in the sample; the last key is the last query's own."""
    keys: slice
    """Positions in the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """What each query sees beyond being causal: position i sees i - left to i, of its own document."""

    left: int | None = None
    """Tokens before its own that a query sees; None: all."""
    documents: Documents | None = None
    chunk: int | None = None
    """Tokens of a chunk, counted as positions are: a query sees its own only; None: all."""

    def blocks(self, pieces: Sequence[int], length: int, block_rows: int = BLOCK_ROWS) -> Iterator[QueryBlock]:
        """Blocks of at most ``block_rows`` queries, in order.

        pieces: where in the sample each of this rank's pieces starts; each is ``length`` tokens.
        """
        for number, start in enumerate(pieces):
            for offset in range(0, length, block_rows):
                rows = slice(number * length + offset, number * length + min(offset + block_rows, length))
                first = start + offset
                end = start + min(offset + block_rows, length)
                yield QueryBlock(rows, first, slice(self._first_key(rows.start, first), end))

    def _first_key(self, row: int, position: int) -> int:
        """The first query of a block sees furthest back: neither windows nor documents move backwards."""
        by_window = 0 if self.left is None else position - self.left
        by_document = 0 if self.documents is None else self.documents.earliest[row]
        by_chunk = position - position % self.chunk if self.chunk and self.documents is None else 0
        return max(0, by_window, by_document, by_chunk)

    def mask(self, block: QueryBlock, device: torch.device) -> Tensor:
        """Whether each query of a block sees each of its keys: bool [1 or b, 1, rows, keys]."""
        queries = torch.arange(block.first, block.keys.stop, device=device)[:, None]
        keys = torch.arange(block.keys.start, block.keys.stop, device=device)
        seen = keys <= queries
        if self.left is not None:
            seen &= keys >= queries - self.left
        seen = seen[None, None]
        if self.documents is not None:
            seen = seen & (keys >= self.documents.starts[:, None, block.rows, None])
        if self.chunk is not None:
            seen = seen & (keys >= queries - self._positions(queries, block) % self.chunk)
        return seen

    def _positions(self, queries: Tensor, block: QueryBlock) -> Tensor:
        """Of a block's queries, from which their chunks are counted: as RoPE counts them."""
        return queries if self.documents is None else self.documents.positions[:, None, block.rows, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """How scores become weights."""

    scale: float | None = None
    """Of products of queries and keys; None: 1 / sqrt(d)."""
    softcap: float = 0.0
    """cap: cap tanh(scores / cap) instead of scores; 0: none."""
    dropout: float = 0.0
    """Of weights."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """[s, b, n, d] and [t, b, g, d] twice -> [b, n, s, d]; causal unless a mask [1 or b, 1, s, t] says more.

    sink: one more logit of each head's softmax, [n], which no value belongs to. It and a soft cap need a mask.
    """
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if sink is not None or softmax.softcap:
        assert mask is not None
        return _attend_by_scores(q, k, v, softmax, mask, sink)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=softmax.dropout,
        scale=softmax.scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )


def _attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    mask: Tensor,
    sink: Tensor | None,
) -> Tensor:
    """[b, n, s, d] and [b, g, t, d] twice -> [b, n, s, d]; the softmax in fp32."""
    times = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(times, dim=1) if times > 1 else one for one in (k, v))
    scale, softcap = q.shape[-1] ** -0.5 if softmax.scale is None else softmax.scale, softmax.softcap
    scores = (q @ k.mT).float().mul_(scale / softcap if softcap else scale)  # in place: no backward reads them
    if softcap:
        scores = torch.tanh_(scores) * softcap
    scores = scores.masked_fill_(~mask, -torch.inf)
    if sink is None:
        weights = scores.softmax(dim=-1)
    else:
        total = torch.logaddexp(scores.logsumexp(dim=-1), sink.float().view(1, -1, 1))
        weights = (scores - total[..., None]).exp()
    weights = weights.type_as(v)
    return (F.dropout(weights, softmax.dropout) if softmax.dropout else weights) @ v


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: AttentionMask,
    softmax: Softmax = Softmax(),
    *,
    pieces: Sequence[int] = (0,),
    block_rows: int = BLOCK_ROWS,
    sink: Tensor | None = None,
) -> Tensor:
    """query [s, b, n, d], key and value [t, b, g, d] -> [b, n, s, d].

    pieces: where in the sample each of the pieces starts that ``query`` is made of, all of one length. sink: as in
    ``attend``.
    """
    blocks = list(sight.blocks(pieces, query.shape[0] // len(pieces), block_rows))
    return _Blocks.apply(query, key, value, sight, blocks, softmax, sink)


class _Blocks(torch.autograd.Function):
    """The backward pass makes each block again: one more forward pass of attention, for which nothing but query, key
    and value is kept. Left to autograd, every block's mask would stay until then, t x t in all, and every block's
    gradient would be padded with zeros to all keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sight: AttentionMask,
        blocks: list[QueryBlock],
        softmax: Softmax,
        sink: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sink)
        ctx.sight, ctx.blocks, ctx.softmax = sight, blocks, softmax
        ctx.rng_state = _rng_state(query.device) if softmax.dropout else None
        return torch.cat([_attend_block(ctx, block, sink, *_cut(block, query, key, value)) for block in blocks], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink = ctx.saved_tensors
        query_grad = torch.empty_like(query)
        # Many blocks add to a key's gradient: rounding each sum to bf16 would lose what later blocks add.
        dtype = torch.promote_types(key.dtype, torch.float32)
        key_grad, value_grad = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        sink_grad = None if sink is None else torch.zeros_like(sink, dtype=dtype)
        with torch.enable_grad(), _same_draws(query.device, ctx.rng_state):
            for block in ctx.blocks:
                inputs = [part.detach().requires_grad_() for part in _cut(block, query, key, value)]
                own_sink = None if sink is None else sink.detach().requires_grad_()
                output = _attend_block(ctx, block, own_sink, *inputs)
                leaves = inputs if own_sink is None else [*inputs, own_sink]
                parts = torch.autograd.grad(output, leaves, grad[:, :, block.rows])
                query_grad[block.rows] = parts[0]
                key_grad[block.keys] += parts[1]
                value_grad[block.keys] += parts[2]
                if sink_grad is not None:
                    sink_grad += parts[3]
        if sink is not None and sink_grad is not None:
            sink_grad = sink_grad.to(sink.dtype)
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), None, None, None, sink_grad


def _cut(block: QueryBlock, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query[block.rows], key[block.keys], value[block.keys]


def _attend_block(
    ctx: Any, block: QueryBlock, sink: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    mask = ctx.sight.mask(block, query.device)
    return attend(query, key, value, ctx.softmax, mask, sink)


def _rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def _same_draws(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Dropout draws what it drew when ``state`` was taken, and what comes after draws as if nothing had been drawn."""
    if state is None:
        yield
        return
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.cuda.set_rng_state(state, device) if cuda else torch.set_rng_state(state)
        yield
