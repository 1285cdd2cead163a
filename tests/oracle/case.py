"""One question: a recipe, the tokens it trains on, and the ranks it runs on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.prepare import prepare
from data.prepared import Prepared
from data.shard_writer import ShardWriter
from models.resolve import resolve
from models.shapes import GPTShape
from training.config.run_config import RunConfig

VOCABULARY = 257
"""Ids: rows of the embedding are padded to 384."""
END = 256
"""Ends a document."""
STEPS = 3
TOKENS = 24_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A draw of the generator."""

    seed: int
    config: RunConfig
    world_size: int
    layout: str
    """As tools.parity.layouts spells it."""
    ends: float
    """Share of tokens that end a document."""
    words: str
    """What else was drawn, for a reader."""
    weights_seed: int = 0
    """Of the weights."""
    steps: int = STEPS
    """Iterations."""

    @property
    def shape(self) -> GPTShape:
        """The model's."""
        return resolve(self.config.model, VOCABULARY)

    @property
    def title(self) -> str:
        """In one line."""
        return f"{self.config.model.shape} {self.layout} {self.words}"


def corpus(case: Case, folder: Path) -> Prepared:
    """Random tokens, of which ``case.ends`` end a document, as Megatron's .bin and .idx."""
    draw = np.random.default_rng(case.seed)
    tokens = draw.integers(0, END, TOKENS)
    tokens[draw.random(TOKENS) < case.ends] = END
    with ShardWriter(folder / "tokens", VOCABULARY) as writer:
        writer.add_documents(tokens, np.full(TOKENS // 100, 100))
    config = DataConfig(paths=(str(folder / "tokens"),), tokenizer="byte", cache_dir=str(folder / "cache"))
    return prepare(config, lambda _: None)
