"""What is asked for. It travels to workers, and an unfinished folder remembers it."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from program.untrusted import read_text
from tools.reshard.megatron.job import MegatronJob
from tools.reshard.named_weights import Names

Dtype = Literal["float32", "float16", "bfloat16"]
Format = Literal["triplane", "megatron", "dcp"]
Keys = Literal["stacked", "per_block", "per_layer"]


@dataclass(kw_only=True, frozen=True)
class ReshardOptions:
    """How the target differs from the source."""

    format: Format = "triplane"
    drop_optimizer: bool = False
    dtype: Dtype | None = None
    max_file_bytes: int = 4_000_000_000
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int | None = None
    keys: Keys = "per_layer"
    names: Names = "transformers"
    """Of the form "dcp"."""
    job: MegatronJob = field(default_factory=MegatronJob)
    """Which loads it, with the form "megatron"."""
    recipe: Path | None = None

    @property
    def repads(self) -> bool:
        """Whether the vocabulary gets another size."""
        return self.vocab_size is not None or self.make_vocab_size_divisible_by is not None

    def as_json(self) -> dict[str, Any]:
        """For the record; the recipe by its content, so that an edited one starts over."""
        values = dataclasses.asdict(self)
        return values | {"recipe": read_text(self.recipe) if self.recipe else None}
