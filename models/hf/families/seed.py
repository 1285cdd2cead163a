"""Seed-OSS."""

from models.hf.block_parts import bias_switches, equal_dropouts
from models.hf.config_parts import tied
from models.hf.families.base import HEADS, LLAMA, LLAMA_DEFAULTS, LLAMA_IMPLIED, LLAMA_NUMBERS, LLAMA_SWITCHES, ROPE
from models.hf.keys import Architecture
from models.hf.table import Table

_IMPLIED = {key: value for key, value in LLAMA_IMPLIED.items() if key != "hidden_dropout"}

ARCHITECTURES: dict[str, Architecture] = {
    "seed_oss": Architecture(
        model_class="SeedOssForCausalLM",
        numbers=LLAMA_NUMBERS,
        defaults=LLAMA_DEFAULTS | {"attention_dropout": 0.1},
        switches=LLAMA_SWITCHES,
        implied=_IMPLIED,
        parts=(
            HEADS,
            ROPE,
            tied(False),
            bias_switches(
                "attention_bias", out="attention_out_bias", mlp="mlp_bias", defaults={"attention_bias": True}
            ),
            equal_dropouts("residual_dropout", (), 0.1),
        ),
    ),
}

TABLES: dict[str, Table] = {"seed_oss": LLAMA}
