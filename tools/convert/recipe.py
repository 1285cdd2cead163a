"""The ``config.toml`` of an imported checkpoint: the model, written out in full, and what a run of it needs."""

import dataclasses
from pathlib import Path
from typing import Any

import tomli_w

from models.shapes import GPTShape

LONGEST = 4096
"""Tokens of a sample, where the model could see more: memory grows with it, and the user chooses."""

PRECISION = {"float64": "fp32", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def config_toml(shape: GPTShape, dtype: str, source: str, folder: Path) -> str:
    """A recipe that ``pretrain_gpt.py`` reads. ``finetune``: there is no optimizer's state to continue with."""
    sentencepiece = is_sentencepiece(folder / "tokenizer.model")
    sections: dict[str, dict[str, Any]] = {
        "model": {"seq_length": min(LONGEST, shape.max_position_embeddings), **dataclasses.asdict(shape)},
        "precision": {"dtype": PRECISION[dtype]},
        "data": {"tokenizer": "tokenizer.model" if sentencepiece else "byte"},
        "checkpoint": {"finetune": True},
    }
    lines = [
        f"# Imported from {source}. Train on from it:",
        "#   python pretrain_gpt.py CHECKPOINT/config.toml --checkpoint.load CHECKPOINT --data.paths YOUR_DATA",
        "# Every number of the model is its own; none comes from a named shape.",
    ]
    if not sentencepiece:
        lines += [
            '# The tokenizer "byte" stands in: the model\'s own is no SentencePiece model, which is what can be',
            "# trained with so far. The vocabulary is the model's, so any tokenizer with no more ids runs, but only",
            "# its own means what the model has learned.",
        ]
    return "\n".join([*lines, "", tomli_w.dumps(sections)])


def is_sentencepiece(path: Path) -> bool:
    """Whether a file is a SentencePiece model: a protobuf whose first field is a piece. Llama 3's tokenizer.model is
    text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\x0a"
