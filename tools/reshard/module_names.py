"""Names of transformers' modules, made of those of its files.

Since version 5 its modules have names of their own, and hold the experts of a block in one tensor
(transformers/conversion_mapping.py); until version 4 a module's names are the files'.
"""

import re
from collections.abc import Callable

from tools.reshard.named_weights import Naming, NewName

EXPERT = re.compile(r"^(.+)\.(mlp|block_sparse_moe|mixer)\.experts\.(\d+)\.((?:gate|up|down)_proj|w[123])\.weight$")
"""One expert's matrix: what is before, its module, its number, which of its matrices."""
_GATES = ("gate_proj", "w1")
_DOWN = ("down_proj", "w2")

_MODULES: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "nemotron_h": ((re.compile(r"^backbone\."), "model."),),
    "gpt_neox": ((re.compile(r"^embed_out\."), "lm_head."),),
    "ernie4_5_moe": ((re.compile(r"\.mlp\.moe_statics\."), ".mlp.gate.moe_statics."),),
}
"""By model_type; others' names are the files'."""


def module_name(model_type: str, naming: Naming) -> Callable[[str], NewName]:
    """What calls each tensor of a naming of files as the module does."""
    experts = [match for name in naming.shapes if (match := EXPERT.match(name))]
    is_gated = any(match[4] in _GATES for match in experts)

    def rename(name: str) -> NewName:
        for pattern, new in _MODULES.get(model_type, ()):
            name = pattern.sub(new, name)
        if match := EXPERT.match(name):
            down = match[4] in _DOWN
            part = "all" if down or not is_gated else "first" if match[4] in _GATES else "second"
            stack = "down_proj" if down else "gate_up_proj" if is_gated else "up_proj"
            return f"{match[1]}.{_module(match[2])}.experts.{stack}", (int(match[3]), part)
        return name.replace(".block_sparse_moe.", f".{_module('block_sparse_moe')}."), None

    return rename


def _module(name: str) -> str:
    return "mlp" if name == "block_sparse_moe" else name
