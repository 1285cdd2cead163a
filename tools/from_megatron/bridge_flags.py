"""A configuration of Megatron-Bridge's on its way to flags of Megatron-LM's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.shapes import GPTShape
from tools.from_megatron import bridge_fields
from tools.from_megatron.bridge_fields import shown, target_of
from tools.from_megatron.flags import Flag
from tools.from_megatron.unknown import OpenText, ScriptWord, Unknown

_REFERENCE = re.compile(r"\$\{(?:oc\.env:(\w+)(?:,([^{}]*))?|([A-Za-z_][\w.]*))\}")
_MOST_REFERENCES = 20


@dataclass(slots=True)
class BridgeFlags:
    """A configuration as flags of Megatron-LM's."""

    words: list[ScriptWord] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    """Fields that no flag means, with their values, which change nothing that is trained."""
    other_model: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    """Such fields that may change the data, a schedule or the model."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe that no flag means, by their dotted names."""
    off: set[str] = field(default_factory=set)
    """Flags that fields say are not to be given."""
    base: GPTShape | None = None
    """The model that it changes, where it does not say its own."""
    has_model: bool = False
    """Whether it says the model; otherwise it overrides a recipe, which is a Python function."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """All of it, for ``${model.seq_length}``."""
    given: Mapping[str, str] = field(default_factory=dict)
    """What --set says, for ``${oc.env:NAME}``."""

    def add(self, name: str, *values: Any) -> None:
        """A flag; the last of several wins."""
        self.words += [f"--{name}", *(self.word(value) for value in values)]

    def word(self, value: Any) -> ScriptWord:
        """A value as a word; a variable that is not given is not known."""
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        for _ in range(_MOST_REFERENCES):
            if (new := _REFERENCE.sub(self._referenced, text)) == text:
                break
            text = new
        unknowns = tuple(Unknown(found[0], 0, (found[1] or found[3],), "") for found in _REFERENCE.finditer(text))
        return OpenText(text, unknowns) if unknowns else text

    def _referenced(self, found: re.Match[str]) -> str:
        name, default, path = found.groups()
        if path is None or path in self.given:
            return self.given.get(name or path, found[0] if default is None else default)
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return found[0] if value is None or isinstance(value, dict | list) else str(value)


def add_field(found: BridgeFlags, section: str, name: str, value: Any) -> None:
    if value is None:
        return
    if name in bridge_fields.UNLESS:
        if value is False:
            found.add(bridge_fields.UNLESS[name])
        elif value is True:
            found.off.add(bridge_fields.UNLESS[name])
        return
    if section == "model" and name in bridge_fields.OWN_FIELDS and isinstance(value, int | float):
        found.fields[bridge_fields.OWN_FIELDS[name]] = float(value)
        return
    flag = bridge_fields.flag_of(name)
    if flag is not None and _flag(found, flag, value):
        return
    if flag is None and value is False and (negative := bridge_fields.negative(name)) is not None:
        found.add(negative)
    elif not bridge_fields.changes_nothing(name, value):
        said = f"{section}.{name} = {shown(value)}: no flag of Megatron-LM means it".lstrip(".")
        if section in ("model", "language_model") and bridge_fields.is_of_the_model(name):
            found.other_model.append(f"{said}, and the model may depend on it.")
        elif name == "decoupled_weight_decay":
            found.other_model.append("optimizer.decoupled_weight_decay: Adam, whose weight decay is in its gradients.")
        elif section not in bridge_fields.NOT_TRAINED:
            found.not_understood.append(f"{said}, and what is trained may depend on it.")
        else:
            found.strays.append(f"{said}.")


def _flag(found: BridgeFlags, flag: Flag, value: Any) -> bool:
    """Whether a value is one of the flag's, which is added then."""
    if value is False or (value is True and flag.arity == "0"):
        if value:
            found.add(flag.name)
        elif flag.arity == "0":
            found.off.add(flag.name)
        return True
    if isinstance(value, list):
        if any(isinstance(each, list | dict) for each in value) or flag.arity == "0":
            return not value
        if value:
            found.add(
                flag.name, *(value if flag.arity in "+*3" else [",".join(map(str, value)) if value[1:] else value])
            )
        return True
    if value is True or flag.arity == "0":
        return False
    if target := target_of(value).removeprefix("torch."):
        found.add(flag.name, {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(target, target))
    elif isinstance(value, dict):
        return not value
    else:
        found.add(flag.name, value)
    return True
