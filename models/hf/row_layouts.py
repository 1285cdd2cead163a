"""How one of our parameters lies in tensors of theirs: runs of rows, each in one place here and one there. A table of
them says what one architecture's tensors are called.

Rows are counted over all dims but the last: a matrix [out, in] has ``out`` rows, experts [E, out, in] have E x out, a
vector has one row per element. A layout is therefore a list of (their tensor, first row there, first row here, rows),
which imports and exports alike, and any block of rows can be made without the rest of the tensor.

Shape letters as in models/costs/parameters.py: n = query heads, g = key-value groups, d = kv_channels, f = an MLP's
width.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from models.shapes import GPTShape


@dataclass(slots=True, frozen=True)
class Strip:
    """Rows of one of their tensors and where they lie in ours."""

    name: str
    """Theirs."""
    start: int
    """First row in theirs."""
    row: int
    """First row in ours."""
    rows: int
    step: int = 1
    """Ours are every so manieth of theirs: gates and other projections that take turns."""

    @property
    def theirs(self) -> slice:
        """Rows in theirs."""
        return slice(self.start, self.start + (self.rows - 1) * self.step + 1, self.step)


Strips = Callable[[tuple[str, ...], tuple[int, ...], GPTShape], Iterator[Strip]]
"""From their names, our tensor's shape and the architecture."""


@dataclass(slots=True, frozen=True)
class Rule:
    """What one of our parameters is made of."""

    names: tuple[str, ...]
    """Theirs, within the block. ``{expert}`` stands for an expert's number."""
    strips: Strips
    transposed: bool = False
    """Theirs is [in, out], as GPT-2's Conv1D keeps its matrices."""
    unsqueezed: int | None = None
    """Theirs has one more dim, of 1, at this place."""
    padded: bool = False
    """Ours ends with rows that they do not have, which are zeros: the vocabulary, rounded up."""
    all_experts: bool = False
    """Theirs, too, is one tensor of all experts."""


def row_count(shape: tuple[int, ...]) -> int:
    """Rows of a tensor, as this module counts them."""
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def unsqueezed(name: str, dim: int) -> Rule:
    """There with a dim of 1 at place ``dim``: a vector [1, n], or the weight [channels, 1, taps] of a convolution of
    each channel by itself, which is [channels, taps] here."""
    return Rule((name,), _whole, unsqueezed=dim)


def fused_experts(name: str, *, parts: int = 1, interleaved: bool = False, transposed: bool = True) -> Rule:
    """Of all experts one tensor there, too: [E, in, out], or where not transposed [E, out, in].

    parts: projections that lie in it, interleaved or one after the other.
    """
    return Rule((name,), _fused(parts if interleaved else 1), transposed=transposed, all_experts=True)


def fused_expert_biases(name: str, *, parts: int = 1, interleaved: bool = False) -> Rule:
    """Vectors [E, out], likewise: each element is a row."""
    return Rule((name,), _fused(parts if interleaved else 1), all_experts=True)


def _fused(step: int) -> Strips:
    def strips(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
        rows = shape[1] // step
        for expert in range(shape[0]):
            for part in range(step):
                first = expert * shape[1]
                yield Strip(names[0], first + part, first + part * rows, rows, step)

    return strips


def same(name: str) -> Rule:
    """The same tensor under another name."""
    return Rule((name,), _whole)


def vocabulary(name: str) -> Rule:
    """An embedding or output layer: their vocab_size rows, then our padding."""
    return Rule((name,), _vocabulary, padded=True)


def stacked(*names: str) -> Rule:
    """Equal parts one below the other: of a gated MLP the gate's f rows, then the other f."""
    return Rule(names, _stacked)


def by_group(queries: str, keys: str, values: str) -> Rule:
    """Queries [n d, h], keys and values [g d, h] -> group after group its n/g queries, its key, its value."""
    return Rule((queries, keys, values), _by_group)


def fused_by_group(name: str) -> Rule:
    """All queries, then all keys, then all values, in one tensor (Phi-3)."""
    return Rule((name,), _fused_by_group)


def gated_by_group(queries: str, keys: str, values: str) -> Rule:
    """With an output gate: theirs has each head's gate behind its query, [2 n d, h], ours a group's behind its
    queries."""
    return Rule((queries, keys, values), _gated_by_group)


def delta_projections(qkvz: str, ba: str) -> Rule:
    """A gated delta net's: theirs key after key, with its query, itself, its values and their gates, and apart what is
    written and forgotten of each; ours all queries, all keys, and so on."""
    return Rule((qkvz, ba), _delta_projections)


def delta_parts(qkv: str, gates: str, written: str, forgotten: str) -> Rule:
    """A gated delta net's, likewise, in our order: queries, keys and values; the values' gates; what is written and
    forgotten of each."""
    return Rule((qkv, gates, written, forgotten), _delta_parts)


def experts(*names: str) -> Rule:
    """Of each expert, its matrices one below the other: [E, rows of all names, in]."""
    return Rule(names, _experts)


def conv1d(name: str) -> Rule:
    """GPT-2's Conv1D: theirs is [in, out]; its bias is a vector as ever."""
    return Rule((name,), _whole, transposed=True)


def conv1d_by_group(name: str) -> Rule:
    """GPT-2's c_attn: a Conv1D of all queries, then all keys, then all values."""
    return Rule((name,), _fused_by_group, transposed=True)


def _whole(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    yield Strip(names[0], 0, 0, row_count(shape))


def _vocabulary(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    yield Strip(names[0], 0, 0, of.vocab_size)


def _stacked(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    rows = shape[0] // len(names)
    for number, name in enumerate(names):
        yield Strip(name, 0, number * rows, rows)


def _experts(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    rows = shape[1] // len(names)
    for expert in range(shape[0]):
        for number, name in enumerate(names):
            yield Strip(name.format(expert=expert), 0, expert * shape[1] + number * rows, rows)


def _by_group(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    for (name, start), row, rows in _groups(of):
        yield Strip(names[name], start, row, rows)


def _gated_by_group(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    width, heads, row = of.kv_channels, of.num_attention_heads // of.num_query_groups, 0
    for group in range(of.num_query_groups):
        for part in (0, 1):  # queries, gates
            for head in range(group * heads, (group + 1) * heads):
                yield Strip(names[0], (2 * head + part) * width, row, width)
                row += width
        for name in names[1:]:
            yield Strip(name, group * width, row, width)
            row += width


def _delta_projections(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    keys, each = of.linear_num_key_heads, of.linear_num_value_heads // of.linear_num_key_heads
    key, values = of.linear_key_head_dim, each * of.linear_value_head_dim
    row = 0
    for name, parts in zip(names, ((key, key, values, values), (each, each)), strict=True):
        for part, rows in enumerate(parts):
            for head in range(keys):
                yield Strip(name, head * sum(parts) + sum(parts[:part]), row, rows)
                row += rows


def _delta_parts(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    keys, heads = of.linear_num_key_heads * of.linear_key_head_dim, of.linear_num_value_heads
    values, row = heads * of.linear_value_head_dim, 0
    for name, rows in zip(names, (2 * keys + values, values, heads, heads), strict=True):
        yield Strip(name, 0, row, rows)
        row += rows


def _fused_by_group(names: tuple[str, ...], shape: tuple[int, ...], of: GPTShape) -> Iterator[Strip]:
    first = (0, of.query_size, of.query_size + of.kv_size)
    for (part, start), row, rows in _groups(of):
        yield Strip(names[0], first[part] + start, row, rows)


def _groups(of: GPTShape) -> Iterator[tuple[tuple[int, int], int, int]]:
    """((queries, keys or values: 0, 1, 2; first row among these), first row in ours, rows), in our order."""
    queries, row = of.num_attention_heads // of.num_query_groups * of.kv_channels, 0
    for group in range(of.num_query_groups):
        for part, rows in enumerate((queries, of.kv_channels, of.kv_channels)):
            yield (part, group * rows), row, rows
            row += rows


@dataclass(slots=True, frozen=True)
class Table:
    """An architecture's names."""

    whole: Mapping[str, Rule]
    """What is there once."""
    block: Mapping[str, Rule]
    """What a block has, without its prefix on either side."""
    prefix: str = "model.layers."
    """Of a block, before its number; those of multi-token prediction follow the model's own."""
    bare: str = ""
    """A prefix that files on the hub may leave out."""
    computed: re.Pattern[str] = re.compile(r"\.rotary_emb\.inv_freq$")
    """Tensors in old files that are no weights: they follow from the configuration."""
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """What a block of multi-token prediction holds again: their name, and which of our parameters it is."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers that each block's files hold although every model has the same; ``computed`` knows them, too."""
    nested: str = ""
    """What names may have behind ``model.`` in files that were taken out of a model of text and images."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors [E, rows, in] that a block's files may hold in place of each expert's: their name -> the expert's
    matrices, whose rows lie one below the other."""
