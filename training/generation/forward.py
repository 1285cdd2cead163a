"""The logits that follow a text, whatever the layout: with a KV cache, or by whole windows.

Texts are rows of token ids, of any lengths. The pipeline's stages pass activations on by plain sends, and around once
more for every further virtual stage. Shape letters: b rows, n positions of a call, s a whole window, v vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.compiled import as_written
from models.layers.kv_cache import CallPositions, KVCache
from models.layers.routing import drop_no_token
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from training.batches import zigzag
from training.checkpoint import model_state, settled

PREFILL_TOKENS = 512
"""Of a prompt, at most in one call: it bounds logits and masks of a long prompt."""
FP8_TOKENS = 32
"""Rows of a matrix in fp8 and fp4 come in multiples of it, at most (Transformer Engine)."""

type Tokens = Sequence[int]


class NextLogits(Protocol):
    """What follows each of the rows that a replica computes."""

    def __call__(self, rows: Sequence[Tokens]) -> tuple[Tensor, list[bool]] | None:
        """rows: of all replicas, each as long as before or longer; at least one is longer.

        fp32 [b, padded vocabulary] after the last token of each row of this replica, and which of these this rank has;
        None but on the last stage. Collective: replicas keep step, for experts and shards of weights lie on several.
        """
        ...


@contextlib.contextmanager
def evaluating(chunks: Chunks) -> Iterator[None]:
    """Within, forward passes are those of a finished model, and leave no trace in one that trains: no dropout, no
    expert that is full, no further depth of multi-token prediction, no graph, no scale of fp8 that moves."""
    were_training = [chunk.training for chunk in chunks]
    config, models = chunks[0].config, [unwrap(chunk) for chunk in chunks]
    fused, depths = config.apply_rope_fusion, [model.mtp_process for model in models]
    for chunk in chunks:
        chunk.eval()
    config.apply_rope_fusion = False  # its kernels know no rows of unequal positions
    for model in models:
        model.mtp_process = False
    try:
        with torch.no_grad(), settled(chunks), as_written(chunks), model_state.fp8_kept(chunks), drop_no_token(chunks):
            yield
    finally:
        config.apply_rope_fusion = fused
        for model, depth in zip(models, depths, strict=True):
            model.mtp_process = depth
        for chunk, training in zip(chunks, were_training, strict=True):
            chunk.train(training)


def positions_at_once(chunks: Chunks, ranks: Ranks) -> int:
    """A call's positions come in multiples of this: each TP rank has as many, and products in fp8 are possible."""
    config = chunks[0].config
    shards = ranks.layout.tp if config.sequence_parallel else 1
    return math.lcm(shards, shards * FP8_TOKENS if config.fp8 or config.fp4 else 1)


class CachedLogits:
    """By a KV cache: a call computes the tokens that are new in each row, and no other."""

    def __init__(self, chunks: Chunks, ranks: Ranks, cache: KVCache, computed: Sequence[int]) -> None:
        """computed: the rows of this replica, as many as the cache has."""
        self.chunks, self.ranks, self.cache, self.computed = chunks, ranks, cache, computed
        self.known: dict[int, int] = {}
        """Tokens of each row, other replicas' too, whose keys and values are in a cache."""
        self.unit = positions_at_once(chunks, ranks)

    @staticmethod
    def length(chunks: Chunks, ranks: Ranks, longest: int) -> int:
        """Positions of a cache for rows of up to ``longest`` tokens: a last call may write some beyond."""
        return longest + positions_at_once(chunks, ranks) + PREFILL_TOKENS

    def __call__(self, rows: Sequence[Tokens]) -> tuple[Tensor, list[bool]] | None:
        found: Tensor | None = None
        while any(len(row) > self.known.get(number, 0) for number, row in enumerate(rows)):
            new = [row[self.known.get(number, 0) :][:PREFILL_TOKENS] for number, row in enumerate(rows)]
            logits = self._call(new)
            for number, part in enumerate(new):
                self.known[number] = self.known.get(number, 0) + len(part)
            if logits is not None:
                arrived = torch.tensor([bool(new[number]) for number in self.computed], device=logits.device)[:, None]
                found = logits if found is None else torch.where(arrived, logits, found)
        return None if found is None else (found, [True] * len(self.computed))

    def _call(self, new: Sequence[Tokens]) -> Tensor | None:
        """fp32 [b, padded vocabulary] after the last of the new tokens of each row of this replica."""
        n = -(-max(map(len, new)) // self.unit) * self.unit
        tokens = torch.zeros(len(self.computed), n, dtype=torch.int64)
        for place, number in enumerate(self.computed):
            tokens[place, : len(new[number])] = torch.tensor(new[number], dtype=torch.int64)
        starts = torch.tensor([self.known.get(number, 0) for number in self.computed])
        places = (starts[:, None] + torch.arange(n)).to(self.ranks.device)
        self.cache.call = CallPositions(places, int(starts.max()) + n)
        output = through_stages(self.chunks, tokens.to(self.ranks.device), places, self.ranks)
        if output is None:
            return None
        last = torch.tensor([max(len(new[number]), 1) - 1 for number in self.computed], device=output.device)
        return over_vocabulary(output[torch.arange(len(last), device=output.device), last], self.ranks)


class WindowLogits:
    """By a forward pass over the whole window of ``seq_length`` for each row and token, as in training: slow, and in
    every layout, with context parallelism and with what wants training's shapes."""

    def __init__(self, chunks: Chunks, ranks: Ranks, seq_length: int, computed: Sequence[int]) -> None:
        self.chunks, self.ranks, self.seq_length, self.computed = chunks, ranks, seq_length, computed

    def __call__(self, rows: Sequence[Tokens]) -> tuple[Tensor, list[bool]] | None:
        found = [self._one(rows[number]) for number in self.computed]
        there = [logits for logits in found if logits is not None]
        if not self.ranks.is_last_stage:
            return None
        nothing = torch.zeros_like(there[0]) if there else torch.zeros(1, device=self.ranks.device)
        logits = torch.stack([nothing if one is None else one for one in found])
        return logits, [one is not None for one in found]

    def _one(self, row: Tokens) -> Tensor | None:
        """fp32 [padded vocabulary] after the row, on the ranks that hold its last token."""
        cp, rank = self.ranks.layout.cp, self.ranks.at.cp
        tokens = torch.zeros(1, self.seq_length, dtype=torch.int64)
        tokens[0, : len(row)] = torch.tensor(row, dtype=torch.int64)
        places = torch.arange(self.seq_length)[None]
        if cp > 1:
            tokens, places = zigzag(tokens, cp, rank), zigzag(places, cp, rank)
        at = (places[0] == len(row) - 1).nonzero()
        device = self.ranks.device
        output = through_stages(self.chunks, tokens.to(device), places.to(device), self.ranks)
        if output is None or not len(at):
            return None
        return over_vocabulary(output[:, int(at)], self.ranks)[0]


def over_vocabulary(local: Tensor, ranks: Ranks) -> Tensor:
    """fp32 [b, v], from each TP rank's [b, v / tp]."""
    local = local.float().contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks.layout.tp)]
    dist.all_gather(parts, local, group=ranks.pgs.tp)
    return torch.cat(parts, dim=-1)


def through_stages(chunks: Chunks, tokens: Tensor, positions: Tensor, ranks: Ranks) -> Tensor | None:
    """One forward pass of ``tokens`` [b, n]: logits [b, n, v / tp] on the last stage, None elsewhere.

    positions [b, n]: each token's in its row; tokens that only fill up may have any.
    """
    model, stages = unwrap(chunks[0]), ranks.layout.pp
    config, (b, n) = chunks[0].config, tokens.shape
    shape = (n // (ranks.layout.tp if config.sequence_parallel else 1), b, config.hidden_size)
    known = positions.clamp(max=model.max_sequence_length - 1)  # learned embeddings end there
    before, after = (dist.get_global_rank(ranks.pgs.pp, (ranks.at.pp + way) % stages) for way in (-1, 1))
    output: Tensor | None = None
    for number, chunk in enumerate(chunks):
        first = ranks.is_first_stage and number == 0
        last = ranks.is_last_stage and number == len(chunks) - 1
        if not first:
            received = torch.empty(shape, dtype=config.params_dtype, device=ranks.device)
            dist.recv(received, src=before, group=ranks.pgs.pp)
            unwrap(chunk).set_input_tensor(received)
        output = chunk(tokens, known, None) if first else chunk(None, None, None)
        if not last:
            dist.send(output.contiguous(), dst=after, group=ranks.pgs.pp)
            output = None
    return output
