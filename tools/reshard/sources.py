"""A checkpoint to read, by our keys, whoever wrote it. No torch here."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data import tokenizers
from parallel.errors import UserError
from tools.reshard.options import Options
from tools.reshard.tensors import Origin, Tensors
from training.checkpoint import folders
from training.checkpoint.format.manifest import read_manifest
from training.checkpoint.format.reader import Reader
from training.checkpoint.format.verify import damages
from training.checkpoint.state import JSON, State, read_state
from training.config import RunConfig
from training.recipe import load

CONFIG = "config.toml"
STATE = "optimizer.state."
MASTER = STATE + "param."
STATES = ("param", "exp_avg", "exp_avg_sq")
RNG = "rng."
MADE_ANEW = {"index.json", "pieces.jsonl", "manifest.json", folders.STATE, CONFIG}
"""Files of a checkpoint that a rewritten one has of its own."""


@dataclass(kw_only=True)
class Source:
    """What a checkpoint holds. Close its files."""

    folder: Path
    files: Tensors
    origins: Mapping[str, Origin]
    """Every tensor by our key."""
    state: State
    config: RunConfig
    about: Mapping[str, JSON] = field(default_factory=dict)
    """What its manifest says."""
    carried: Mapping[str, Path] = field(default_factory=dict)
    """Files that go along, by name: a tokenizer's, say."""
    pads_as_configured: bool = True
    """Whether the vocabulary has the rows that the configuration says. Megatron's depend on TP."""
    fingerprint: Any = None
    """What tells one state of the folder from another without reading tensors."""

    @property
    def real_vocab_size(self) -> int:
        """Token ids. Raises UserError where the tokenizer that tells them is not there."""
        return real_vocab_size(self.config, self.folder)

    def weights(self) -> dict[str, Origin]:
        """Weights and buffers; those that are there as the optimizer's fp32 ones only, as these."""
        masters = {key.removeprefix(MASTER): origin for key, origin in self.origins.items() if key.startswith(MASTER)}
        plain = {key: origin for key, origin in self.origins.items() if not key.startswith((STATE, RNG))}
        return masters | plain

    def states(self, key: str) -> dict[str, Origin]:
        """The optimizer's tensors of a weight by their keys; empty where there are none."""
        return {
            name: self.origins[name] for name in (f"{STATE}{part}.{key}" for part in STATES) if name in self.origins
        }


def real_vocab_size(config: RunConfig, folder: Path) -> int:
    """Ids that mean something: of the configuration, or else of the tokenizer."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return tokenizers.load(config.data, folder, lambda _: None).vocab_size


def open_source(path: Path, options: Options) -> Source:
    """A checkpoint, or the newest of a run or of a folder of checkpoints; ours or Megatron's.

    Raises UserError where there is none.
    """
    from tools.reshard import megatron_source

    if (folder := megatron_source.find(path)) is not None:
        return megatron_source.open_source(folder, options)
    if options.recipe is not None:
        raise UserError(
            f"--recipe {options.recipe}: for Megatron's checkpoints; {path} is ours and has its own {CONFIG}."
        )
    return open_ours(find_ours(path))


def find_ours(path: Path) -> Path:
    """Raises UserError, naming what was found instead."""
    try:
        return folders.find(str(path), partial(print, file=sys.stderr))[0]
    except UserError as error:
        text = str(error).removeprefix(f"checkpoint.load {path}: ")
        raise UserError(f"SOURCE {path}: {text} Megatron's torch_dist folders (.metadata) are read, too.") from None


def open_ours(folder: Path) -> Source:
    """A checkpoint of ours."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: expected a checkpoint with a {CONFIG}; it has none. Bring this file back.")
    manifest = read_manifest(folder)
    files = Reader(folder)
    return Source(
        folder=folder,
        files=files,
        origins={key: Origin(key, info.dtype, info.shape) for key, info in files.tensors.items()},
        state=read_state(folder),
        config=load(folder / CONFIG),
        about=manifest.about,
        carried={name: folder / name for name in manifest.files if name not in MADE_ANEW and not name.endswith(".bin")},
        fingerprint={name: list(facts) for name, facts in manifest.files.items()},
    )


def check(source: Source) -> None:
    """Whether what a source says can be believed: reads every byte of it once. Raises UserError.

    A copy gets hashes of its own, which would hide what was wrong before.
    """
    if not isinstance(source.files, Reader):
        from tools.reshard.megatron_source import check_optimizer

        check_optimizer(source)
    elif found := damages(source.folder, "hashes"):
        texts = "; ".join(damage.text for damage in found[:3])
        raise UserError(f"{source.folder} is damaged: {texts}. Take another checkpoint, or bring these files back.")
