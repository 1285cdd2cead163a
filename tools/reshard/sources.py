"""Opens a checkpoint to read, Triplane's or another program's."""

from collections.abc import Callable
from pathlib import Path

from program.errors import UserError
from tools.reshard.assembled import AssembledFiles
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.dcp import source as dcp_source
from tools.reshard.deepspeed import source as deepspeed_source
from tools.reshard.megatron import mp_rank
from tools.reshard.megatron import source as megatron_source
from tools.reshard.options import ReshardOptions
from tools.reshard.tensors import Origin
from tools.shared.checked_checkpoint import check_files
from tools.shared.held_checkpoint import deleted_is_said, find
from training.checkpoint import folders
from training.checkpoint.foreign import Kind, recognise
from training.checkpoint.format.manifest import read_manifest
from training.checkpoint.format.reader import FileReader
from training.checkpoint.state import read_state
from training.config.recipe import load

CONFIG = "config.toml"
REWRITTEN = {"index.json", "pieces.jsonl", "manifest.json", folders.STATE, CONFIG}
"""Files of a checkpoint that a rewritten one has of its own."""


READERS: dict[Kind, Callable[[Path, ReshardOptions], CheckpointSource]] = {
    "torch_dist": megatron_source.open_source,
    "mp_rank": mp_rank.open_source,
    "dcp": dcp_source.open_source,
    "deepspeed": deepspeed_source.open_source,
}


def open_source(path: Path, options: ReshardOptions) -> CheckpointSource:
    """A checkpoint, or the newest of a run or of a folder of checkpoints; ours or another program's.

    Raises UserError where there is none.
    """
    foreign = recognise(path)
    if foreign is not None and foreign.kind == "hf":
        raise UserError(f"SOURCE {path}: {foreign.description}. Use {foreign.command('TARGET', 'RECIPE.toml')}")
    if foreign is not None:
        return READERS[foreign.kind](foreign.path, options)
    if options.recipe is not None:
        raise UserError(
            f"--recipe {options.recipe}: for other programs' checkpoints; {path} is ours and has its own {CONFIG}."
        )
    folder = find_ours(path)
    with deleted_is_said(folder):
        return open_ours(folder)


def find_ours(path: Path) -> Path:
    """Raises UserError, naming what was found instead."""
    try:
        return find(path)
    except UserError as error:
        text = str(error).removeprefix(f"{path}: ")
        raise UserError(f"SOURCE {path}: {text} Megatron's, PyTorch DCP and DeepSpeed folders are read, too.") from None


def open_ours(folder: Path) -> CheckpointSource:
    """A Triplane checkpoint."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: expected a checkpoint with a {CONFIG}; it has none. Bring this file back.")
    manifest = read_manifest(folder)
    files = FileReader(folder)
    return CheckpointSource(
        folder=folder,
        files=files,
        origins={key: Origin(key, info.dtype, info.shape) for key, info in files.tensors.items()},
        state=read_state(folder),
        config=load(folder / CONFIG),
        about=manifest.about,
        carried={name: folder / name for name in manifest.files if name not in REWRITTEN and not name.endswith(".bin")},
        fingerprint={name: list(facts) for name, facts in manifest.files.items()},
    )


def check(source: CheckpointSource) -> None:
    """Whether what a source says can be believed: reads every byte of it once. Raises UserError.

    A copy gets hashes of its own, which would hide what was wrong before.
    """
    if isinstance(source.files, AssembledFiles | dcp_source.DcpFiles):
        source.files.check()
    elif not isinstance(source.files, FileReader):
        megatron_source.check_bytes(source)
        megatron_source.check_optimizer(source)
    else:
        check_files(source.folder, "hashes")
