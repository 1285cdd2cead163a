"""Other programs' checkpoints, known by the names of their files, and the command that converts each."""

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from program.untrusted import InputError, if_readable, read_json, read_text

Kind = Literal["hf", "torch_dist", "mp_rank", "dcp", "deepspeed"]

NAMES: dict[Kind, str] = {
    "hf": "a Hugging Face folder",
    "torch_dist": "Megatron's torch_dist folder",
    "mp_rank": "Megatron's mp_rank folder",
    "dcp": "a PyTorch DCP folder",
    "deepspeed": "a DeepSpeed folder",
}
_MP_RANK = re.compile(r"^mp_rank_\d+(_\d+)*$")
_DEEPSPEED = re.compile(r"^(mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+)_model_states\.pt$")
DCP_PARTS = re.compile(r"^(pytorch_model_fsdp|optimizer)_\d+$")
"""Folders of one checkpoint of Accelerate's and Trainer's: weights, and the optimizer's states."""
_NUMBERED = re.compile(r"^(?:step|checkpoint|global_step)[-_]?(\d+)$")
"""torchtitan's, Trainer's and DeepSpeed's checkpoints in their folder."""
_POINTERS = ("latest_checkpointed_iteration.txt", "latest")
"""Megatron's file beside iterations, and DeepSpeed's beside its tags."""


@dataclass(frozen=True)
class ForeignFolder:
    """A checkpoint of another program."""

    path: Path
    kind: Kind

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return NAMES[self.kind]

    @property
    def has_weights_alone(self) -> bool:
        """Whether no optimizer's state is read of it, ever."""
        return self.kind in ("hf", "mp_rank")

    def arguments(self, target: Path | str, recipe: Path | str) -> list[str]:
        """Of python: what converts it, and compares the result with the source."""
        if self.kind == "hf":
            return ["-m", "tools.convert", "import", str(self.path), str(target), "--verify"]
        return ["-m", "tools.reshard", str(self.path), str(target), "--recipe", str(recipe), "--verify"]

    def command(self, target: Path | str, recipe: Path | str) -> str:
        """The same to type."""
        return shlex.join(["python", *self.arguments(target, recipe)])


def recognise(path: Path) -> ForeignFolder | None:
    """What a path is, or the newest checkpoint in it; None for none of the programs that are known here."""
    for folder in _candidates(path.expanduser()):
        if (kind := _kind(folder)) is not None:
            return ForeignFolder(folder, kind)
    return None


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    for pointer in _POINTERS:
        with contextlib.suppress(OSError, InputError, ValueError):
            said = read_text(path / pointer, 4096).strip()
            name = f"iter_{int(said):07d}" if said.isdecimal() and pointer != "latest" else said
            if name and Path(name).name == name:
                yield path / name
    with contextlib.suppress(OSError):
        numbered = {entry: match for entry in path.iterdir() if (match := _NUMBERED.match(entry.name))}
        yield from sorted(numbered, key=lambda entry: int(numbered[entry][1]), reverse=True)


def _kind(folder: Path) -> Kind | None:
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError:
        return None
    if ".metadata" in names:
        return "torch_dist" if _says_torch_dist(folder) else "dcp"
    if any(DCP_PARTS.match(name) and (folder / name / ".metadata").is_file() for name in names):
        return "dcp"
    if any(map(_DEEPSPEED.match, names)):
        return "deepspeed"
    if any(map(_MP_RANK.match, names)):
        return "mp_rank"
    weights = (".safetensors", ".safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    if "config.json" in names and any(name.endswith(weights) for name in names):
        return "hf"
    return None


def _says_torch_dist(folder: Path) -> bool:
    found = if_readable(read_json, folder / "metadata.json", dict[str, Any]) or {}
    return bool(found.get("sharded_backend") == "torch_dist")
