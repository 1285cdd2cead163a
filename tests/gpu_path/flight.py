"""Collectives and messages that this process has asked NCCL for, as torch's flight recorder keeps them.

TORCH_FR_BUFFER_SIZE is how many it keeps; their number in all must stay below. A message to a peer counts as one.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Any

import torch

from tests.gpu_path.emulator import ROOT

DECORATORS = ("contextlib.py", "typing_extensions.py")
ROOM = {"TORCH_FR_BUFFER_SIZE": "100000"}
BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """One call."""

    kind: str
    """all_reduce, all_gather, ..., "send 0->1" by places in the group."""
    group: str
    """Megatron's description of it."""
    size: int
    """The group's, in ranks; 0 where it is not known."""
    dtype: str
    bytes: int
    """Of the larger one of what the rank gives and what it gets."""
    caller: str
    """File:function of the innermost frame outside of torch and its decorators."""

    def __str__(self) -> str:
        """Without the bytes of experts' tokens, which depend on the router."""
        size = "tokens" if self.kind == "all_to_all" else f"{self.bytes:,} bytes"
        return f"{self.kind} {self.group} of {self.size}: {size} of {self.dtype}, {self.caller}"


def last() -> int:
    """The number of the newest one, for ``since``; -1: there is none."""
    return max((entry["record_id"] for entry in recorded()["entries"]), default=-1)


def since(number: int) -> list[Collective]:
    """Those after ``number``, in the order of their calls."""
    record = recorded()
    entries = sorted(record["entries"], key=lambda entry: entry["record_id"])
    sizes = {name: len(group["ranks"].split(",")) for name, group in record["pg_config"].items()}
    return [
        as_collective(entry, sizes) for entry in entries if entry["record_id"] > number and entry["input_sizes"]
    ]  # without sizes: the end of a group of messages, which stand before it


def recorded() -> Mapping[str, Any]:
    """torch's own format, https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html."""
    record: Mapping[str, Any] = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]
    return record if "entries" in record else {"entries": [], "pg_config": {}}


def as_collective(entry: Mapping[str, Any], sizes: Mapping[str, int]) -> Collective:
    """Of one entry of the record."""
    name, description = entry["process_group"]
    kind = entry["profiling_name"].removeprefix("nccl:").lstrip("_")
    for ending in ("_coalesced", "_into_tensor", "_tensor", "_base"):
        kind = kind.removesuffix(ending)
    given, got = (
        sum(
            BYTES[dtype] * prod(shape)
            for shape, dtype in zip(entry[f"{way}_sizes"], entry[f"{way}_dtypes"], strict=True)
        )
        for way in ("input", "output")
    )
    return Collective(
        kind, description, sizes.get(name, 0), entry["input_dtypes"][0], max(given, got), caller(entry["frames"])
    )


def caller(frames: Sequence[Mapping[str, Any]]) -> str:
    """Innermost first."""
    for frame in frames:
        path = frame["filename"]
        if "/torch/" not in path and PurePath(path).name not in DECORATORS:
            return f"{short(path)}:{frame['name']}"
    return "?"


def short(path: str) -> str:
    """From the repository or the package on."""
    inside = path.split("site-packages/")[-1].removeprefix(f"{ROOT}/").removeprefix(".te/")
    return inside if not inside.startswith("/") else "/".join(PurePath(inside).parts[-3:])
