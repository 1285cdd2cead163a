"""Greedy texts for tasks, by the model as it lies on its ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parallel.ddp import Chunks
from parallel.groups import Ranks
from training.evaluation.asked import BrokenOff
from training.evaluation.harness_tokens import HarnessTokenizer
from training.generation.generate import Limits, TextRow, Watch, generate
from training.generation.settings import Sampling
from training.generation.texts import before


@dataclass(kw_only=True, slots=True, frozen=True)
class TextRequests:
    """Prompts that are continued alike."""

    prompts: tuple[tuple[int, ...], ...]
    """Ids, cut so that ``new_tokens`` more fit."""
    stops: tuple[str, ...]
    """Texts that end a continuation, and do not belong to it."""
    new_tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TextGenerator:
    """The model on all ranks, for texts. All ranks call it together, with the same requests."""

    chunks: Chunks
    ranks: Ranks
    tokenizer: HarnessTokenizer
    seq_length: int
    at_once: int
    """Prompts that a replica continues at the same time."""
    before_round: Callable[[int, int], None] = field(default=lambda done, count: None)
    """As of ``Scorer``; a round is a batch of prompts."""
    after_token: Callable[[], None] = field(default=lambda: None)
    asked_to_stop: Callable[[], bool] = field(default=lambda: False)

    def __call__(self, requests: TextRequests) -> list[str]:
        """A text for each prompt, the same on every rank. Raises BrokenOff, on all ranks, where one was asked to."""
        order = sorted(range(len(requests.prompts)), key=lambda number: len(requests.prompts[number]))
        size = self.at_once * self.ranks.layout.dp
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        texts = [""] * len(order)
        for number, batch in enumerate(batches):
            self.before_round(number, len(batches))
            found = self._continued([requests.prompts[one] for one in batch], requests)
            for one, text in zip(batch, found, strict=True):
                texts[one] = text
        return texts

    def _continued(self, prompts: Sequence[Sequence[int]], requests: TextRequests) -> list[str]:
        def look(rows: Sequence[TextRow]) -> None:
            self.after_token()
            for row in rows if requests.stops else ():
                if row.reason in (None, "length"):
                    text = self.tokenizer.decode(row.generated)
                    row.reason = "stop" if any(stop in text for stop in requests.stops) else row.reason

        limits = Limits(
            new_tokens=requests.new_tokens,
            seq_length=self.seq_length,
            vocab_size=self.tokenizer.tokenizer.vocab_size,
            ends={self.tokenizer.eot},
        )
        rows = generate(
            self.chunks, self.ranks, prompts, limits, Sampling(temperature=0.0),
            watch=Watch(after_token=look, asked_to_stop=self.asked_to_stop),
        )  # fmt: skip
        if any(row.reason == "interrupted" for row in rows):
            raise BrokenOff
        return [before(requests.stops, self.tokenizer.decode(row.generated)) for row in rows]
