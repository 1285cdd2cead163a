"""A KV cache: attention keeps the keys and values of a text, so that each new token costs one position and not all.

Every call says which positions its tokens have, row by row, and each layer writes keys and values there and attends to
what is there. So rows of a batch may have different lengths, a long prompt may come in parts, and a call may hold more
positions than there are tokens (sequence parallelism and fp8 want multiples): what is written beyond a row's end lies
after all that its queries see, until a token of the row takes the place.

Of megatron-core's contexts, StaticInferenceContext has one length for all rows of a batch, and cuts the rotary
embedding by it; DynamicInferenceContext needs flash-attn's kernels, and of latent attention Flash MLA. Neither runs
with keys in rows of unequal lengths on a CPU, or with our attention, its windows and TP's sequence shards.

Shape letters: n positions of a call, t positions of the cache, b rows, d head width; heads and groups are a TP rank's.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from models.layers.attention import check_supported, softcap_of
from models.layers.blockwise_attention import Softmax, attend
from models.layers.chunked import Temperature, chunk_of, temperature_of
from models.layers.restarting_rope import at_positions
from parallel.ddp import Chunks


@dataclass(slots=True)
class CallPositions:
    """Of one call: where its tokens are in their rows."""

    rows: Tensor
    """int64 [b, n]."""
    end: int
    """Behind the last of them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CachedLayer:
    """What a layer's attention does, in every call."""

    number: int
    """Of the layer, among those of the rank."""
    softmax: Softmax
    left: int | None
    """Tokens before its own that a query sees; None: all."""
    chunk: int | None
    temperature: Temperature | None
    """See models/layers/chunked.py."""


class KVCache:
    """Keys and values of all layers of a rank's chunks. Set ``call`` before each forward pass."""

    def __init__(self, rows: int, length: int) -> None:
        """rows: texts at once. length: positions at most, those beyond a row's end included."""
        self.rows, self.length = rows, length
        self.call: CallPositions | None = None
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer: keys and values [t, b, groups, d]."""

    @property
    def bytes(self) -> int:
        """Of this rank; known after the first call."""
        return sum(tensor.nbytes for pair in self.held.values() for tensor in pair)

    def attend(self, layer: CachedLayer, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        """query [n, b, heads, d], key and value [n, b, groups, d] -> [n, b, heads * d].

        sink: one more logit of each head's softmax.
        """
        assert self.call is not None
        n, b = query.shape[:2]
        if layer.number not in self.held:  # zeros: what a row has not reached has no weight, and must be a number
            self.held[layer.number] = tuple(one.new_zeros(self.length, *one.shape[1:]) for one in (key, value))  # type: ignore[assignment]
        keys, values = self.held[layer.number]
        places = self.call.rows.T, torch.arange(b, device=query.device)
        keys[places], values[places] = key, value
        queries, seen = self.call.rows[:, :, None], torch.arange(self.call.end, device=query.device)
        mask = seen <= queries
        if layer.left is not None:
            mask &= seen >= queries - layer.left
        if layer.chunk is not None:
            mask &= seen >= queries - queries % layer.chunk
        if layer.temperature is not None:
            query = layer.temperature.apply(query, self.call.rows.T)
        keys, values = keys[: self.call.end], values[: self.call.end]
        out = attend(query, keys, values, layer.softmax, mask[:, None], sink)
        return out.permute(2, 0, 1, 3).reshape(n, b, -1)


@contextlib.contextmanager
def cached(chunks: Chunks, rows: int, length: int) -> Iterator[KVCache]:
    """Within, the chunks' attention writes to a cache and reads from it. Not with context parallelism.

    Raises SharedMistake for kinds of softmax that ``attend`` does not compute.
    """
    cache = KVCache(rows, length)
    changed: list[tuple[nn.Module, Any]] = []  # and its own forward, if it had one (models/layers/restarting_rope.py)
    check_supported(chunks[0].config)
    try:
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, Attention):
                    changed.append((module.core_attention, vars(module.core_attention).get("forward")))
                    _keep(module, cache, len(changed) - 1)
                if isinstance(rotary := getattr(module, "rotary_pos_emb", None), nn.Module):
                    changed.append((rotary, vars(rotary).get("forward")))
                    _place(rotary, cache)
        yield cache
    finally:
        for module, forward in reversed(changed):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def _keep(attention: Attention, cache: KVCache, number: int) -> None:
    """Let the core attention, ours or Transformer Engine's, go through the cache."""
    config = attention.config
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)
    scale = getattr(attention, "softmax_scale", config.softmax_scale)  # latent attention has its own
    layer = CachedLayer(
        number=number,
        softmax=Softmax(scale=scale, softcap=softcap_of(config)),
        left=config.window_size[0] if windowed and config.window_size[0] >= 0 else None,
        chunk=chunk_of(config, attention.layer_number),
        temperature=temperature_of(config, attention.layer_number),
    )

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        sink = getattr(attention.core_attention, "softmax_offset", None)
        sink = None if sink is None else sink.view(-1)
        return cache.attend(layer, query, key, value, sink)

    attention.core_attention.forward = forward


def _place(rotary: Any, cache: KVCache) -> None:
    """Let a rotary embedding be that of the call's positions."""
    whole = type(rotary).forward(rotary, cache.length)

    def forward(n: int, **_: object) -> Any:
        assert cache.call is not None and cache.call.rows.shape[1] == n
        return at_positions(whole, cache.call.rows)

    rotary.forward = forward
