"""What a checkpoint keeps of a tokenizer, and of what lies beside it."""

from pathlib import Path

from data.tokenizers.base import CarriedTokenizer
from models.hf.files import beside


def tokenizer_files(path: Path | None, kept: CarriedTokenizer, *, licenses: bool) -> dict[str, Path]:
    """A tokenizer's files by the names that they have in a checkpoint, and what Hugging Face keeps beside them.
    licenses: of weights that came with some."""
    others = {} if path is None else beside(path, licenses=licenses)
    return {name: one for name, one in others.items() if name not in kept.texts} | kept.copies
