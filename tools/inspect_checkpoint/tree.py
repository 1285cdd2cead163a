"""A checkpoint's tensors as a table by block, blocks that are alike folded into one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from program.number_ranges import listed, merged
from tools.inspect_checkpoint.catalogue import Checkpoint
from tools.inspect_checkpoint.contents import Kind, StoredParameter, bytes_by_kind
from tools.inspect_checkpoint.text import columns, count, size

PLURAL: Mapping[Kind, str] = {"weight": "weights", "master": "fp32 masters", "rng": "generators"}
"""Of kinds that are not called as they are."""
MOST_RANGES = 6
"""Of block numbers in the heading of a folded block."""


def head(checkpoint: Checkpoint, found: list[StoredParameter]) -> list[str]:
    """What the checkpoint says of itself, and how many bytes of what it holds."""
    kinds = bytes_by_kind(found)
    rest = checkpoint.bytes - sum(kinds.values())
    parts = [f"{PLURAL.get(kind, kind)} {size(amount)}" for kind, amount in kinds.items()] + [
        f"tables and texts {size(rest)}"
    ]
    steps = [
        f"iteration {checkpoint.iteration:,}" if checkpoint.iteration is not None else "iteration unknown",
        f"{checkpoint.samples:,} samples" if checkpoint.samples is not None else "",
        f"{checkpoint.tokens:,} tokens" if checkpoint.tokens is not None else "",
    ]
    rows = {
        "DAMAGED": "manifest.json cannot be read; --verify says more" if checkpoint.status == "damaged" else "",
        "model": checkpoint.model,
        "progress": ", ".join(filter(None, steps)),
        "layout": f"{checkpoint.layout or 'unknown'}, {checkpoint.state.get('device', 'device unknown')}",
        "written": f"{checkpoint.written:%Y-%m-%d %H:%M}",
        "files": f"{checkpoint.files:,}, {size(checkpoint.bytes)}",
        "versions": _pairs(checkpoint.about.get("versions")),
        "data": _pairs(checkpoint.about.get("data")),
        **{name: _text(checkpoint.about[name]) for name in ("source", "average_of") if name in checkpoint.about},
        "parameters": count(sum(parameter.elements for parameter in found)),
        "bytes": ", ".join(parts),
    }
    return [str(checkpoint.path), *(f"  {name:<11}{text}" for name, text in rows.items() if text)]


def tree(found: Sequence[StoredParameter], fold: bool) -> list[str]:
    """A line for each parameter, under a line for each block. ``fold``: one block for all that are like it."""
    rows = [("tensor", "shape", "stored", "bytes")]
    for names, block in groups(found, fold):
        indent = ""
        if block[0].block:
            elements, total = (sum(getattr(one, what) for one in block) for what in ("elements", "bytes"))
            many = f"{len(names)} blocks alike, each " if len(names) > 1 else ""
            rows.append((f"{ranges(names)}", "", f"{many}{count(elements)} parameters", size(total)))
            indent = "  "
        rows += [(indent + one.rest, _shape(one), _stored(one), size(one.bytes)) for one in block]
    return columns(rows, right=(3,))


def groups(found: Sequence[StoredParameter], fold: bool) -> Iterator[tuple[list[str], list[StoredParameter]]]:
    """(names of blocks that are alike, the parameters of the first); a parameter outside of the blocks by itself."""
    blocks: dict[str, list[StoredParameter]] = {}
    for parameter in found:
        blocks.setdefault(parameter.block or parameter.name, []).append(parameter)
    alike: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        same = tuple((one.rest, tuple((s.kind, s.dtype, s.shape) for s in one.states.values())) for one in block)
        kind = name.partition(".")[0] if fold and block[0].block else name
        alike.setdefault((kind, same), []).append(name)
    for names in alike.values():
        yield names, blocks[names[0]]


def ranges(names: Sequence[str]) -> str:
    """``layers.0-3, 8`` for blocks of these numbers."""
    kind = names[0].partition(".")[0]
    numbers = [int(name.rpartition(".")[2]) for name in names]
    texts = [listed([one], "d") for one in merged((number, number + 1) for number in numbers)]
    if len(texts) > MOST_RANGES:
        texts = [*texts[: MOST_RANGES - 2], "...", texts[-1]]
    return f"{kind}.{', '.join(texts)}"


def to_json(found: Sequence[StoredParameter]) -> list[dict[str, Any]]:
    """Every parameter with all that is stored of it."""
    return [
        {
            "name": parameter.name,
            "states": {
                kind: {"key": stored.key, "dtype": stored.dtype, "shape": list(stored.shape), "bytes": stored.bytes}
                for kind, stored in parameter.states.items()
            },
        }
        for parameter in found
    ]


def _shape(parameter: StoredParameter) -> str:
    """Of all its tensors, which have the same one unless something is wrong."""
    return " ".join(dict.fromkeys(str(list(stored.shape)) for stored in parameter.states.values()))


def _stored(parameter: StoredParameter) -> str:
    by_dtype: dict[str, list[str]] = {}
    for stored in parameter.states.values():
        by_dtype.setdefault(stored.dtype, []).append(stored.kind)
    return ", ".join(f"{dtype} {' + '.join(kinds)}" for dtype, kinds in by_dtype.items())


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, Mapping) else ""


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
