"""Keys left out, null, or of another kind: each is read, or refused by one message; none ends in a traceback."""

from typing import Any

import pytest

from campaign import some
from models.families import TINY
from models.hf.shapes import read_shape, write_config
from program.errors import UserError

ABSENT = object()
FEW: tuple[Any, ...] = (ABSENT, None, "x", {})
MANY: tuple[Any, ...] = (
    True, [1], False, 0, -1, 0.5, 1 << 63, [], ["full_attention"] * 4, {"rope_type": None}, {"rope_theta": [1]},
    {"full_attention": {}, "sliding_attention": None}, float("inf"), float("nan"),
)  # fmt: skip
EACH_KEY = [f"{name}_tiny" for name in (
    "apertus", "deepseek_v3", "ernie45_moe", "gemma2", "gemma3", "glm4", "gpt2", "gpt_oss", "granite", "llama4",
    "mamba2", "nemotron", "nemotron3", "olmoe", "pythia", "qwen2_moe", "qwen35", "qwen3_next", "smollm3", "starcoder2",
)]  # fmt: skip
"""Together they have every key that a family has."""


@pytest.mark.parametrize("values", [FEW, pytest.param(MANY, marks=pytest.mark.campaign)], ids=["few", "many"])
@pytest.mark.parametrize("name", some(TINY, EACH_KEY))
def test_any_value_of_any_key_is_read_or_refused(name: str, values: tuple[Any, ...]) -> None:
    """What is read is written again."""
    config = write_config(TINY[name])[1]
    for key in config.keys() - {"model_type"}:
        for value in values:
            changed = {**config, key: value}
            if value is ABSENT:
                del changed[key]
            try:
                _, shape = read_shape(changed)
            except UserError as error:
                assert str(error).startswith("config.json ("), (key, value)
                continue
            write_config(shape)
