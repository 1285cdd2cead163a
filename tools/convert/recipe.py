"""The ``config.toml`` of an imported checkpoint: the model, written out in full, and what a run of it needs."""

import dataclasses
from typing import Any

import tomli_w

from models.shapes import GPTShape
from parallel.errors import printable
from tools.convert.tokenizer import STAND_IN, Choice

LONGEST = 4096
"""Tokens of a sample, where the model could see more: memory grows with it, and the user chooses."""

PRECISION = {"float64": "fp32", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def config_toml(shape: GPTShape, dtype: str, source: str, tokenizer: Choice) -> str:
    """A recipe that ``pretrain_gpt.py`` reads. ``finetune``: there is no optimizer's state to continue with."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"seq_length": min(LONGEST, shape.max_position_embeddings), **dataclasses.asdict(shape)},
        "precision": {"dtype": PRECISION[dtype]},
        "data": {"tokenizer": tokenizer.name} | ({"eod_token": tokenizer.eod_token} if tokenizer.eod_token else {}),
        "checkpoint": {"finetune": True},
    }
    lines = [
        f"# Imported from {' '.join(printable(source).split())}. Train on from it:",
        "#   python pretrain_gpt.py CHECKPOINT/config.toml --checkpoint.load CHECKPOINT --data.paths YOUR_DATA",
        "# Every number of the model is its own; none comes from a named shape.",
    ]
    if tokenizer.name == STAND_IN:
        lines += [
            f"# None of its own tokenizer's files can be used: {' '.join(tokenizer.problem.split())}",
            f'# "{STAND_IN}" stands in. Training these weights on raw text with it is refused: its ids are not those',
            "# that the model has learned. Give --data.tokenizer PATH, or shards that were tokenised with its own.",
        ]
    return "\n".join([*lines, "", tomli_w.dumps(sections)])
