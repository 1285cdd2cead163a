"""Hugging Face folders <-> Triplane checkpoints, on a CPU, with neither GPU nor Transformer Engine.

    python -m tools.convert import HF_FOLDER CHECKPOINT_FOLDER
    python -m tools.convert export CHECKPOINT_OR_RUN_FOLDER HF_FOLDER

Each may be the URL of a bucket, s3://BUCKET/PREFIX: fetched before, or uploaded at the end, by way of TMPDIR. Nothing
else is downloaded and no code of the folder is run. The same command continues a killed conversion. A
tensor that no table covers is refused by name. An import first compares logits of one block of each kind with those of
transformers, if it is installed. Exit code 2: bad input, or a comparison differs; then no target is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from program import command
from program.errors import UserError
from program.flags import at_least_one, parse_flags, size_in_bytes
from tools.convert import exporting, logits
from tools.convert.exporting import export_folder
from tools.convert.importing import import_folder
from tools.convert.verify import verify
from tools.shared import bucket_paths
from tools.shared.held_checkpoint import deleted_is_said, find
from tools.shared.hf_folder.source import HfFolder
from training.checkpoint.chosen_weights import ChosenWeights

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(kw_only=True)
class Import:
    """A Hugging Face folder becomes a checkpoint."""

    hf_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="HF_FOLDER")]
    """Folder with config.json, safetensors files and, if any, the tokenizer's."""
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder to write; must not exist."""
    dtype: Dtype | None = None
    """Round all weights to this one; routers' biases stay. None: as they are; fp8 becomes bfloat16."""
    workers: int = 1
    """Processes; each needs about 0.5 GB."""
    max_file_size: str = "4GB"
    """Size of the checkpoint's files. A kill loses at most one file per worker."""
    verify: bool = False
    """Convert back in memory and compare with the source, byte by byte; what differs is removed."""
    logits: bool | None = None
    """Compare the whole model's logits with transformers' own, for models that fit into memory; where they differ, the
    checkpoint is removed. --no_logits: compare none. None: compare those of one block of each kind, before anything is
    converted."""

    def run(self) -> None:
        """Raises UserError."""
        notes = import_folder(
            self.hf_folder,
            self.checkpoint,
            dtype=self.dtype,
            workers=at_least_one(self.workers),
            max_file_bytes=size_in_bytes(self.max_file_size),
            begin=self._begin if self.logits is None else None,
            accept=self._accept,
        )
        _show(notes, self.checkpoint)

    def _begin(self, source: HfFolder, scratch: Path) -> list[str]:
        if not logits.is_possible():
            return ["logits were not compared with transformers' own: it is not installed."]
        return [logits.compare_cut(source, scratch, self.dtype)]

    def _accept(self, folder: Path) -> list[str]:
        found = [verify(self.hf_folder, folder, "checkpoint")] if self.verify else []
        if self.logits:
            found.append(logits.compare(self.hf_folder, folder, self.dtype or "float32"))
        return [line.replace(str(folder), str(self.checkpoint)) for line in found]


@dataclass(kw_only=True)
class Export:
    """A checkpoint becomes a Hugging Face folder."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, of a run or imported; or a run's folder, or one of checkpoints, whose newest is taken."""
    hf_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="HF_FOLDER")]
    """Folder to write; must not exist."""
    dtype: Dtype | None = None
    """dtype of the weights. None: the one that the model computes in (precision.dtype)."""
    workers: int = 1
    """Processes; each needs about 0.5 GB."""
    max_shard_size: str = "5GB"
    """Size of the safetensors files."""
    like: Path | None = None
    """Hugging Face folder to copy the tokenizer's files from, if the checkpoint carries none."""
    weights: ChosenWeights = "trained"
    """ema, average_last: an average of the weights, which train.ema_decay and train.average_last keep."""
    verify: bool = False
    """Read the new files back and compare with the checkpoint, byte by byte; what differs is removed."""
    logits: bool = False
    """Compare this model's logits with transformers' own, for models that fit into memory; where they differ,
    the folder is removed."""

    def run(self) -> None:
        """Raises UserError."""
        if self.logits and self.weights != "trained":
            raise UserError(
                f"--logits compares the trained weights, found --weights {self.weights}. --verify takes both."
            )
        checkpoint = find(self.checkpoint, "CHECKPOINT ")
        with deleted_is_said(checkpoint):
            notes = export_folder(
                checkpoint,
                self.hf_folder,
                dtype=self.dtype,
                workers=at_least_one(self.workers),
                max_shard_bytes=size_in_bytes(self.max_shard_size),
                like=self.like,
                chosen=self.weights,
                accept=partial(self._accept, checkpoint),
            )
        if checkpoint != self.checkpoint:
            notes = [f"the newest checkpoint is {checkpoint}.", *notes]
        _show(notes, self.hf_folder)

    def _accept(self, checkpoint: Path, folder: Path) -> list[str]:
        found = [verify(folder, checkpoint, "hf_folder", self.weights)] if self.verify else []
        if self.logits:
            found.append(logits.compare(folder, checkpoint, self.dtype or exporting.default_dtype(checkpoint)))
        return [line.replace(str(folder), str(self.hf_folder)) for line in found]


Command: Any = Annotated[Import, tyro.conf.subcommand("import")] | Annotated[Export, tyro.conf.subcommand("export")]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done, and verified where asked for; 2: bad input, or what was compared differs."""
    job: Import | Export = parse_flags(Command, argv, "python -m tools.convert", __doc__)
    names = ("checkpoint", "hf_folder") if isinstance(job, Import) else ("hf_folder", "checkpoint", "like")
    return bucket_paths.run("tools.convert", job, lambda local: local.run(), names[0], names[1:])


def _show(notes: Sequence[str], written: Path) -> None:
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {written}")


if __name__ == "__main__":
    raise SystemExit(command.run("tools.convert", main))
