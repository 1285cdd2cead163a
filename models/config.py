"""The ``model`` section of a recipe."""

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.families import named, unknown_shape
from models.owned_fields import OWNED, UNSUPPORTED
from models.shape_fields import Declared, ShapeFields, declared
from models.spans import LENGTH
from parallel.megatron_fields import megatron_field_problems, parse

MOST_NAME = 100
"""Characters of model.name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Own:
    """What only the section has."""

    shape: str = "debug"
    """Named architecture, fills every field that is not set: debug, demo, gpt2, gpt3_175b, llama3_8b, ..."""

    name: str | None = None
    """What the model is called where a start, a report or a checkpoint names it; an import notes its own. None:
    model.shape."""

    seq_length: int = 4096
    """Tokens per sample."""

    megatron: tuple[str, ...] = ()
    """More of mcore's TransformerConfig, as "field=value" strings."""


if TYPE_CHECKING:  # types as a shape has them; a field that the recipe leaves to the named shape is None

    @dataclass(kw_only=True, frozen=True)
    class _OwnAndShapes(ShapeFields, _Own): ...  # type: ignore[misc]  # of slots in both, which is not so when it runs

else:
    _OwnAndShapes = dataclasses.make_dataclass(
        "_OwnAndShapes",
        [(name, kind | None, None) for name, kind in typing.get_type_hints(ShapeFields).items()],
        bases=(_Own,),
        namespace={"documented": ShapeFields},  # program/flags.py: whose docstrings are its fields'
        frozen=True, kw_only=True, slots=True,
    )  # fmt: skip


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig(_OwnAndShapes):
    """What is trained. A named shape fills every field that is None."""

    @property
    def title(self) -> str:
        """What the model is called."""
        return self.name or self.shape

    def problems(self) -> list[str]:
        """What is wrong within this section alone; ``shape_problems`` checks what results from it."""
        found = [*unknown_shape(self.shape), *self._range_problems()]
        if self.name is not None and (len(self.name) > MOST_NAME or not self.name.isprintable() or not self.name):
            found.append(f"model.name: expected 1 to {MOST_NAME} printable characters, found {len(self.name)}.")
        if not found:
            found += self._head_problems()
        found += megatron_field_problems("model.megatron", self.megatron, OWNED)
        values = parse(self.megatron)
        return found + [
            f"model.megatron: {name} is not supported: {why}. Leave it out."
            for name, why in UNSUPPORTED.items()
            if values.get(name) not in (None, False, "none")
        ]

    def _range_problems(self) -> Iterator[str]:
        for name, about in [("seq_length", Declared(span=LENGTH)), *declared()]:
            value, span, none = getattr(self, name), about.span, about.zero_is_none
            if value is None or span is None or value in span or (none and value == 0):
                continue
            asked = "0 or more" if none and value <= span.least else span.short(value)
            yield f"model.{name} must be {asked}, found {value}."

    def _head_problems(self) -> list[str]:
        """Whether the derived head width is whole (see ``resolve``)."""
        if self.kv_channels is not None or (self.hidden_size is None and self.num_attention_heads is None):
            return []
        base = named(self.shape)
        hidden = self.hidden_size or base.hidden_size
        heads = self.num_attention_heads or base.num_attention_heads
        if hidden % heads == 0:
            return []
        below, above = hidden // heads * heads, -(-hidden // heads) * heads
        sizes = " or ".join(str(size) for size in (below, above) if size)
        return [
            f"model.hidden_size {hidden} is not divisible by model.num_attention_heads {heads}. "
            f"Use hidden_size {sizes}, or set model.kv_channels (the width of a head) yourself."
        ]
