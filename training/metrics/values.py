"""What a logged line holds, and its flat form for sinks that draw curves."""

from collections.abc import Iterator, Mapping, Sequence

Number = float | int
Value = Number | Sequence[Number] | Mapping[str, Number] | Mapping[str, Sequence[Number]]
"""A number, one for each MTP depth, one for each block, or one for each expert of each block."""
Values = Mapping[str, Value]
"""By key of metrics.jsonl (docs/metrics.md)."""

NO_CURVES = {"time_s", "recompiled"}
"""What a line has for its readers: sinks that draw curves keep the time themselves, and a cause is a sentence."""
PARTS = {"mtp_loss": "depth", "expert_load": "expert"}
"""Key of metrics.jsonl -> what the entries of its sequences are."""


def curves(values: Values, max_experts: int) -> Iterator[tuple[str, Number]]:
    """Each number that makes a curve, with its name: ``loss``, ``mtp_loss/depth_0``, ``expert_load/block_3/expert_0``.

    Of a block with more experts than ``max_experts`` there is ``expert_load_max/block_3`` alone: its fullest expert,
    1.0 being an even share. Every block has that one.
    """
    for name, value in ((name, value) for name, value in values.items() if name not in NO_CURVES):
        if isinstance(value, Mapping):
            for block, loads in value.items():
                where = f"block_{block}" if block.isdecimal() else block
                if not isinstance(loads, Sequence):
                    yield f"{name}/{where}", loads
                    continue
                yield f"{name}_max/{where}", max(loads) * len(loads)
                if len(loads) <= max_experts:
                    yield from _each(f"{name}/{where}/{PARTS[name]}", loads)
        elif isinstance(value, Sequence):
            yield from _each(f"{name}/{PARTS[name]}", value)
        else:
            yield name, value


def _each(name: str, values: Sequence[Number]) -> Iterator[tuple[str, Number]]:
    return ((f"{name}_{number}", value) for number, value in enumerate(values))
