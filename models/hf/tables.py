"""For each architecture, the tensors of theirs that each of our parameters is made of."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from models.costs.parameters import Parameter, parameters
from models.families import TABLES
from models.hf.row_layouts import Strip, Table, row_count
from models.names import checkpoint_key
from models.shapes import GPTShape
from program.errors import UserError


@dataclass(slots=True, frozen=True)
class Entry:
    """One of our parameters, and where its rows are in their tensors."""

    name: str
    """Canonical."""
    key: str
    """In a checkpoint."""
    shape: tuple[int, ...]
    strips: tuple[Strip, ...]
    """By our rows."""
    transposed: bool
    unsqueezed: int | None
    """Theirs has one more dim, of 1, at this place."""
    padded: bool
    keeps_dtype: bool
    """A state that is never rounded: the router's bias, which moves by steps that bf16 would lose."""
    all_experts: bool = False
    """Theirs, too, is one tensor of all experts."""

    @property
    def vectors(self) -> bool:
        """Of all experts, [E, out]: each element is a row."""
        return self.all_experts and len(self.shape) == 2

    @property
    def rows(self) -> int:
        """Our rows."""
        return math.prod(self.shape) if self.vectors else row_count(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if len(self.shape) > 1 and not self.vectors else 1

    @property
    def unit(self) -> int:
        """Rows that lie together: of one expert, or all."""
        if self.vectors:
            return self.shape[1]
        return self.shape[1] if len(self.shape) == 3 else self.rows

    @property
    def turned(self) -> bool:
        """Whether rows of theirs are not ours in the same order in memory: columns, or rows that take turns."""
        return self.transposed or any(strip.step > 1 for strip in self.strips[:1])

    def rectangle(self, first: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of our rows within one unit, in the tensor."""
        if len(self.shape) == 1:
            return (first,), (count,)
        if self.vectors:
            return divmod(first, self.shape[1]), (1, count)
        if len(self.shape) == 2:
            return (first, 0), (count, self.shape[1])
        expert, row = divmod(first, self.shape[1])
        return (expert, row, 0), (1, count, self.shape[2])

    def by_their_name(self) -> dict[str, list[Strip]]:
        """The strips of each of their tensors, by its rows."""
        found: dict[str, list[Strip]] = {}
        for strip in self.strips:
            found.setdefault(strip.name, []).append(strip)
        for strips in found.values():
            strips.sort(key=lambda strip: strip.start)
        return found

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Their tensors, each with the shape that it must have."""
        rows: dict[str, int] = {}
        for strip in self.strips:
            rows[strip.name] = rows.get(strip.name, 0) + strip.rows
        return {name: self._their_shape(count) for name, count in rows.items()}

    def _their_shape(self, rows: int) -> tuple[int, ...]:
        if self.all_experts:
            experts, *matrix = self.shape
            return (experts, *(reversed(matrix) if self.transposed else matrix))
        if self.transposed:
            return (self.columns, rows)
        shape = [rows] if len(self.shape) == 1 else [rows, self.columns]
        if self.unsqueezed is not None:
            shape.insert(self.unsqueezed, 1)
        return tuple(shape)


def entries(model_type: str, shape: GPTShape) -> Iterator[Entry]:
    """Every parameter of ``shape``, and the routers' biases, once.

    Raises UserError for a parameter that no model of this type has.
    """
    for parameter in itertools.chain(parameters(shape), _expert_biases(shape)):
        yield _entry(TABLES[model_type], parameter, shape, model_type)


def copies(model_type: str, shape: GPTShape) -> dict[str, str]:
    """Tensors that their files may hold although they are others' equals: their names, and our parameter's."""
    table, found = TABLES[model_type], {}
    if shape.tied:
        found[table.whole["output_layer.weight"].names[0]] = "word_embeddings.weight"
    for depth in range(shape.mtp_num_layers):
        for name, ours in table.mtp_copies.items():
            equal = "word_embeddings.weight" if shape.tied else ours
            found[f"{table.prefix}{shape.num_layers + depth}.{name}"] = equal
    return found


def constants(model_type: str, shape: GPTShape) -> dict[str, float]:
    """Numbers that their files hold beside weights, by name."""
    table = TABLES[model_type]
    return {
        f"{table.prefix}{block}.{name}": value
        for block in range(shape.num_layers)
        for name, value in table.constants.items()
    }


def is_computed(model_type: str, name: str) -> bool:
    """Whether a tensor of theirs is no weight."""
    return TABLES[model_type].computed.search(name) is not None


def full_name(model_type: str, name: str) -> str:
    """A tensor's name with the prefix that its file may have left out, and without what it may have put in."""
    table = TABLES[model_type]
    if table.nested and name.startswith(f"model.{table.nested}"):
        return f"model.{name.removeprefix(f'model.{table.nested}')}"
    whole = name.startswith(table.bare) or name in (table.whole["output_layer.weight"].names)
    return name if whole else table.bare + name


def mtp_blocks(model_type: str, shape: GPTShape) -> tuple[str, ...]:
    """What the names of their tensors for multi-token prediction begin with, by depth."""
    first = shape.num_layers
    return tuple(f"{TABLES[model_type].prefix}{first + depth}." for depth in range(shape.mtp_num_layers))


def _expert_biases(shape: GPTShape) -> Iterator[Parameter]:
    """No parameters, but theirs are in the files: [E] for each block with a router."""
    if not shape.moe_router_enable_expert_bias:
        return
    for block in (block for block, moe in enumerate(shape.moe_blocks) if moe):
        yield Parameter(f"layers.{block}.mlp.router.expert_bias", (shape.num_moe_experts,))
    for depth in range(shape.mtp_num_layers if shape.moe_blocks[-1] else 0):
        yield Parameter(f"mtp.{depth}.mlp.router.expert_bias", (shape.num_moe_experts,))


def _entry(table: Table, parameter: Parameter, shape: GPTShape, model_type: str) -> Entry:
    kind, _, rest = parameter.name.partition(".")
    prefix, rules = "", table.whole
    if kind in ("layers", "mtp"):
        number, _, rest = rest.partition(".")
        prefix = f"{table.prefix}{int(number) + (shape.num_layers if kind == 'mtp' else 0)}."
        rules = table.block
    rule = rules.get(rest if prefix else parameter.name)
    if rule is None:
        raise UserError(f"{parameter.name}: transformers' {model_type} has no such parameter.")
    names = tuple(prefix + name for name in rule.names)
    strips = sorted(rule.strips(names, parameter.shape, shape), key=lambda strip: strip.row)
    return Entry(
        name=parameter.name,
        key=checkpoint_key(parameter.name),
        shape=parameter.shape,
        strips=tuple(strips),
        transposed=rule.transposed and len(parameter.shape) > 1,
        unsqueezed=rule.unsqueezed,
        padded=rule.padded,
        keeps_dtype=rest.endswith("router.expert_bias"),
        all_experts=rule.all_experts,
    )
