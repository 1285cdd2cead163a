"""Prompts to texts: tokens in between, and what ends a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.tokenizers.base import Tokenizer
from parallel.ddp import Chunks
from parallel.groups import Ranks
from training.generation.generate import UNWATCHED, Limits, Reason, TextRow, Watch, generate
from training.generation.settings import Sampling, TextLimits

UNFINISHED = "�"
"""What a decoder makes of a character whose last bytes are still to come."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TextModel:
    """A model on all ranks that reads and writes texts."""

    chunks: Chunks
    ranks: Ranks
    tokenizer: Tokenizer


@dataclass(kw_only=True, slots=True, frozen=True)
class Continuation:
    """What a model wrote behind a prompt."""

    prompt: str
    text: str
    """Without the prompt, the end token and the stop text."""
    tokens: int
    """That were generated."""
    reason: Reason


def prompt_ids(tokenizer: Tokenizer, prompt: str, begin: int | None = None) -> list[int]:
    """A prompt's tokens. begin: put before it. An empty prompt is the beginning of a document, as in training: behind
    the end of another."""
    ids: list[int] = tokenizer.encode(prompt).tolist()
    return [*([] if begin is None else [begin]), *ids] or [tokenizer.eod]


def continue_prompts(
    model: TextModel,
    prompts: Sequence[str],
    limits: TextLimits,
    sampling: Sampling,
    *,
    begin: int | None = None,
    first_number: int = 0,
    use_cache: bool = True,
    watch: Watch = UNWATCHED,
) -> list[Continuation]:
    """One for each prompt, the same on every rank. Collective. See ``generate`` for what is not of texts."""
    tokenizer = model.tokenizer

    def look(rows: Sequence[TextRow]) -> None:
        for row in rows if limits.stops else ():
            if row.reason in (None, "length") and any(stop in generated_text(tokenizer, row) for stop in limits.stops):
                row.reason = "stop"
        watch.after_token(rows)

    rows = generate(
        model.chunks,
        model.ranks,
        [prompt_ids(tokenizer, prompt, begin) for prompt in prompts],
        Limits(
            new_tokens=limits.new_tokens,
            seq_length=limits.seq_length,
            vocab_size=tokenizer.vocab_size,
            ends=limits.ends | {tokenizer.eod},
        ),
        sampling,
        first_number=first_number,
        use_cache=use_cache,
        watch=Watch(after_token=look, asked_to_stop=watch.asked_to_stop),
    )
    return [
        Continuation(
            prompt=prompt,
            text=before(limits.stops, generated_text(tokenizer, row)),
            tokens=len(row.generated),
            reason=row.reason or "interrupted",
        )
        for prompt, row in zip(prompts, rows, strict=True)
    ]


def generated_text(tokenizer: Tokenizer, row: TextRow) -> str:
    """What stands behind the prompt: a token's text may depend on the one before it, a blank's above all."""
    whole, head = tokenizer.decode(row.ids), tokenizer.decode(row.ids[: row.prompt_tokens])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(row.generated)


def before(stops: Sequence[str], text: str) -> str:
    """The text up to the first of the stops."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


class Printed:
    """One text as it comes, in parts that later tokens do not change."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], write: Callable[[str], None]) -> None:
        self.tokenizer, self.stops, self.write = tokenizer, stops, write
        self.length = 0
        """Characters that were written."""

    def __call__(self, rows: Sequence[TextRow]) -> None:
        """Of the first row."""
        whole = generated_text(self.tokenizer, rows[0])
        text = before(self.stops, whole)
        if rows[0].reason is None:
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - max((overlap(text, stop) for stop in self.stops), default=0)]
        if len(text) > self.length:
            self.write(text[self.length :])
            self.length = len(text)


def overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that the stop may begin with."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
