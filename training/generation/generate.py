"""Texts of token ids, token by token, until each has ended. Data-parallel replicas share the texts."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from models.layers.attention import check_supported
from models.layers.kv_cache import cached
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from program.errors import SharedMistake
from training.generation.forward import CachedLogits, NextLogits, WindowLogits, evaluating
from training.generation.sampling import choose, generator_of
from training.generation.settings import Sampling

Reason = Literal["end", "stop", "length", "interrupted"]
"""Why a text ends: its end token, a stop text, the number of tokens, or a request."""
NONE_YET = -1


@dataclass(slots=True)
class TextRow:
    """One text: its prompt, and what was generated."""

    ids: list[int]
    prompt_tokens: int
    reason: Reason | None = None
    """None: it goes on."""
    drawn: torch.Generator = field(default_factory=torch.Generator)

    @property
    def generated(self) -> list[int]:
        """Without the prompt, and without the end token."""
        return self.ids[self.prompt_tokens :]


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """When texts end."""

    new_tokens: int
    """At most, of each text."""
    seq_length: int
    """Tokens of a text and its prompt, at most."""
    vocab_size: int
    """Ids from here on are never chosen."""
    ends: Collection[int] = ()
    """Ids that end a text, and do not belong to it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Watch:
    """What accompanies texts while they are generated."""

    after_token: Callable[[Sequence[TextRow]], None] = field(default=lambda _: None)
    """Called on every rank after each token; may set rows' ``reason``, on all ranks alike."""
    asked_to_stop: Callable[[], bool] = field(default=lambda: False)
    """Whether this rank was; all texts then end."""


UNWATCHED = Watch()

MIXERS = {"M": "Mamba-2 mixers", "G": "gated delta nets"}
"""By megatron-core's letter."""


def no_cache_reason(chunks: Chunks, ranks: Ranks) -> str:
    """Why this model and layout generate without a KV cache; "" where they have one."""
    config = chunks[0].config
    if ranks.layout.cp > 1:
        return f"CP {ranks.layout.cp} divides each sequence"
    if config.tp_comm_overlap:
        return "kernels.tp_comm_overlap wants the sequence length of training"
    if mixers := set(unwrap(chunks[0]).hybrid_layer_pattern) & set(MIXERS):
        named = " and ".join(MIXERS[letter] for letter in sorted(mixers))
        return f"{named} carry no state from one token to the next here"
    try:
        check_supported(config)
    except SharedMistake as error:
        return str(error)
    return ""


def generate(
    chunks: Chunks,
    ranks: Ranks,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    *,
    first_number: int = 0,
    use_cache: bool = True,
    watch: Watch = UNWATCHED,
) -> list[TextRow]:
    """The prompts continued, the same on every rank. Collective.

    prompts: of at least one token each, and fewer than limits.seq_length. first_number: of the first prompt, among all
    that ``sampling.seed`` numbers. use_cache: where the layout allows it, see ``no_cache_reason``.
    """
    rows = [
        TextRow(list(prompt), len(prompt), drawn=generator_of(sampling, first_number + number))
        for number, prompt in enumerate(prompts)
    ]
    # With several replicas each has every dp-th row; one that has fewer than others repeats row 0 to keep step.
    own = list(range(ranks.at.dp, len(rows), ranks.layout.dp))
    computed = own + [0] * (-(-len(rows) // ranks.layout.dp) - len(own))
    longest = min(limits.seq_length, max(row.prompt_tokens for row in rows) + limits.new_tokens)
    with evaluating(chunks), _next_logits(chunks, ranks, computed, longest, limits, use_cache) as next_logits:
        while any(row.reason is None for row in rows):
            found = next_logits([row.ids for row in rows])
            chosen = torch.full((len(rows) + 1,), NONE_YET, dtype=torch.int64)
            if found is not None:
                logits, here = found
                for place, number in enumerate(own):
                    if here[place] and rows[number].reason is None:
                        chosen[number] = choose(logits[place, : limits.vocab_size], sampling, rows[number].drawn)
            chosen[-1] = int(watch.asked_to_stop())
            _extend(rows, _agreed(chosen, ranks), limits)
            watch.after_token(rows)
    return rows


@contextmanager
def _next_logits(
    chunks: Chunks, ranks: Ranks, computed: Sequence[int], longest: int, limits: Limits, use_cache: bool
) -> Iterator[NextLogits]:
    if use_cache and not no_cache_reason(chunks, ranks):
        with cached(chunks, len(computed), CachedLogits.length(chunks, ranks, longest)) as cache:
            yield CachedLogits(chunks, ranks, cache, computed)
    else:
        yield WindowLogits(chunks, ranks, limits.seq_length, computed)


def _agreed(chosen: torch.Tensor, ranks: Ranks) -> list[int]:
    """Every row's token, from the rank that has its logits, and whether any rank was asked to stop: one reduction.

    TP ranks choose alike from the same logits; were one ever to round otherwise, all would still get one token.
    """
    on_device = chosen.to(ranks.device)
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
    found: list[int] = on_device.tolist()
    return found


def _extend(rows: Sequence[TextRow], chosen: Sequence[int], limits: Limits) -> None:
    """Add a token to each row that goes on, or its reason to end."""
    for row, token in zip(rows, chosen, strict=False):
        if row.reason is not None:
            continue
        if token in limits.ends:
            row.reason = "end"
            continue
        row.ids.append(token)
        if len(row.generated) >= limits.new_tokens or len(row.ids) >= limits.seq_length:
            row.reason = "length"
        elif chosen[-1]:
            row.reason = "interrupted"
