"""Megatron-Bridge's configuration in YAML (run_config.yaml, overrides of a recipe), and Megatron-LM's --yaml-cfg: their
fields as flags of Megatron-LM's."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from parallel.errors import UserError
from tools.from_megatron import bridge_rules
from tools.from_megatron.bridge_flags import BridgeFlags, add_field
from tools.from_megatron.yaml_text import YamlText, YamlValue, plain

_SECTIONS = tuple(
    "model train optimizer scheduler dataset checkpoint ddp dist logger rng tokenizer validation mixed_precision"
    " comm_overlap language_model model_parallel".split()
)
_PASSED_OVER = ("rerun_state_machine", "profiling", "straggler", "nvrx_straggler", "ft", "inprocess_restart",
                "tensor_inspect", "env_vars", "optimizer_config_override_provider", "peft")  # fmt: skip
"""How a job is watched and recovers, which changes nothing that is trained; and what has a rule of its own."""
_BRIDGE_MARKS = {"ddp", "dist", "logger", "rng", "scheduler", "validation", "mixed_precision", "comm_overlap", "peft"}
_PLACEHOLDER = re.compile(r"<[^<>\n]+>|\?\?\?")


def is_bridge(value: YamlValue, shape: str = "") -> bool:
    """Whether a YAML file is a configuration of Megatron-Bridge's, or a --yaml-cfg of Megatron-LM's.

    shape: the named shape that it is said to change; then it need not hold what only they have.
    """
    if not isinstance(value, dict):
        return False
    target = value.get("_target_")
    if isinstance(target, YamlText) and "megatron.bridge" in target.text:
        return True
    names = {name for name, each in value.items() if isinstance(each, dict)}
    if shape and value and value.keys() <= {*_SECTIONS, *_PASSED_OVER}:
        return True
    yaml_cfg = {"language_model", "model_parallel"} <= names
    return yaml_cfg or (
        "train" in names and bool(names & _BRIDGE_MARKS) and names <= {*_SECTIONS, *_PASSED_OVER, "peft"}
    )


def flags_of(value: YamlValue, given: Mapping[str, str]) -> BridgeFlags:
    """Its fields as flags. given: what --set says. Raises UserError for values that are to be filled in."""
    assert isinstance(value, dict)
    if unfilled := list(_unfilled(value, "")):
        raise UserError("\n  - ".join(["values that are to be filled in; write them in their places:", *unfilled]))
    config = plain(value)
    found = BridgeFlags(config=config, given=given)
    sections = {name: each for name, each in config.items() if name in _SECTIONS and isinstance(each, dict)}
    if isinstance(inner := sections.get("model", {}).get("transformer"), dict):
        sections["model"] = inner | sections["model"]
    merged: dict[str, Any] = {}
    for section in sections.values():
        merged |= {name: each for name, each in section.items() if each is not None}
    bridge_rules.precision(found, config, merged)
    for section, fields in sections.items():
        for name, each in fields.items():
            if not name.startswith("_") and name not in bridge_rules.BY_RULE and section != "mixed_precision":
                add_field(found, section, name, each)
    _beside_sections(found, config, sections)
    bridge_rules.model(found, sections, merged)
    bridge_rules.data(found, sections, merged)
    bridge_rules.profiling(found, config.get("profiling"))
    found.has_model = "num_layers" in merged and "hidden_size" in merged
    return found


def _unfilled(value: YamlValue, name: str) -> Iterator[str]:
    """Values such as <path to the data>, and OmegaConf's ???."""
    if isinstance(value, YamlText):
        if _PLACEHOLDER.fullmatch(value.text.strip()):
            yield f"line {value.line}: {name}: {value.text.strip()}"
        return
    for key, each in value.items() if isinstance(value, dict) else ((str(at), one) for at, one in enumerate(value)):
        yield from _unfilled(each, f"{name}.{key}".lstrip("."))


def _beside_sections(found: BridgeFlags, config: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """What stands beside the sections: of a --yaml-cfg, the rest of its flags."""
    for name, each in config.items():
        if name in (*sections, *_PASSED_OVER, "mixed_precision") or name.startswith("_"):
            continue
        add_field(found, "", name, each)
    if isinstance(config.get("peft"), dict):
        found.other_model.append("peft: low-rank adapters (LoRA) are trained, not the model.")
