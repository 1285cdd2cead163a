"""ERNIE-4.5, dense."""

from typing import Any

from models.hf.block_parts import rotary
from models.hf.config_parts import tied
from models.hf.families.base import HEADS, LLAMA, LLAMA_DEFAULTS, LLAMA_IMPLIED, LLAMA_NUMBERS, LLAMA_SWITCHES
from models.hf.keys import Architecture, Config, take_bool
from models.hf.table import Table

_NUMBERS = {key: ours for key, ours in LLAMA_NUMBERS.items() if key != "attention_dropout"}
_IMPLIED = {key: ours for key, ours in LLAMA_IMPLIED.items() if key != "add_bias_linear"}


def read_bias(left: Config, fields: dict[str, Any]) -> None:
    """Of all linear layers."""
    fields["add_bias_linear"] = take_bool(left, "use_bias", False)


ARCHITECTURES: dict[str, Architecture] = {
    "ernie4_5": Architecture(
        model_class="Ernie4_5ForCausalLM",
        numbers=_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        switches=LLAMA_SWITCHES,
        implied=_IMPLIED | {"rotary_interleaved": True, "attention_dropout": 0.0},
        parts=(
            HEADS,
            rotary(theta=500_000.0),
            tied(True),
            (read_bias, lambda shape: {"use_bias": shape.add_bias_linear}),
        ),
    ),
}

TABLES: dict[str, Table] = {"ernie4_5": LLAMA}
