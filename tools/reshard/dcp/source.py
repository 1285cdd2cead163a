"""A DCP folder under our keys. Accelerate has one folder for weights, one for the optimizer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.resolve import resolve
from program.errors import UserError
from program.untrusted import if_readable, read_foreign
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.megatron.files import METADATA, TorchDist, TorchDistTensor
from tools.reshard.model_recipe import foreign_source, is_recipe, model_recipe, with_vocab_size
from tools.reshard.named_source import NamedTensors, check_numbers, matched, origins, state_of
from tools.reshard.options import ReshardOptions
from training.checkpoint.foreign import DCP_PARTS

_ITERATION = re.compile(r"(?:^|\.)(?:train_state|trainer|app|state)\.(?:step|global_step|iteration)$")
_FOLDER = re.compile(r"^(?:step|checkpoint|iter|epoch|global_step)[-_]?(\d+)$")


class DcpFiles:
    """The tensors of one DCP folder, or of several. Implements ``tensors.Tensors``. Close it: it keeps files open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        parts = [folder] if (folder / METADATA).is_file() else sorted(_parts(folder))
        self.parts: Sequence[TorchDist] = [TorchDist(part) for part in parts]

    @cached_property
    def _owners(self) -> Mapping[str, TorchDist]:
        owners: dict[str, TorchDist] = {}
        for part in self.parts:
            for key in part.tensors:
                if owners.setdefault(key, part) is not part:
                    raise UserError(f"{self.folder}: {owners[key].folder.name} and {part.folder.name} both have {key}.")
        return owners

    @cached_property
    def tensors(self) -> Mapping[str, TorchDistTensor]:
        """Every tensor. Raises UserError where its chunks are not each element of it once."""
        return {key: part.tensors[key] for key, part in self._owners.items()}

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """As ``TorchDist.read``."""
        self._owners[key].read(key, offset, into)

    def number(self, ending: re.Pattern[str]) -> int | None:
        """A number that is kept as a tensor of one element or as a plain value, by its key's end."""
        for key, info in self.tensors.items():
            if ending.search(key) and not info.shape:
                return self.scalar(key)
        for part in self.parts:
            for key in filter(ending.search, part.objects):
                value = part.object(key)
                if isinstance(value, int | float):
                    return int(value)
        return None

    def scalar(self, key: str) -> int:
        """A tensor of one element."""
        kinds = {"float32": np.float32, "int64": np.int64, "int32": np.int32, "float64": np.float64}
        info = self.tensors[key]
        if info.shape not in ((), (1,)) or info.dtype not in kinds:
            raise UserError(f"{self.folder}: {key} is {info.dtype} {list(info.shape)}, expected one number.")
        words = np.empty(info.shape, dtype=np.dtype(f"u{np.dtype(kinds[info.dtype]).itemsize}"))
        self.read(key, (0,) * len(info.shape), words)
        return int(words.view(kinds[info.dtype]).reshape(-1)[0])

    def check(self) -> None:
        """Compare each chunk with torch.save's checksums. Raises UserError for the first that differs."""
        for part in self.parts:
            part.check(part.tensors)

    def fingerprint(self) -> list[list[Any]]:
        """What tells one state of the folder from another without reading tensors."""
        return [[part.folder.name, *entry] for part in self.parts for entry in part.fingerprint()]

    def close(self) -> None:
        """Close the files."""
        for part in self.parts:
            part.close()


def _parts(folder: Path) -> Iterator[Path]:
    """The folders of Accelerate's and Trainer's sharded checkpoints."""
    return (path for path in folder.iterdir() if DCP_PARTS.match(path.name) and (path / METADATA).is_file())


def open_source(folder: Path, options: ReshardOptions) -> CheckpointSource:
    """Raises UserError for whatever of it is not covered, by name."""
    config, vocab_size = model_recipe(options, folder, "a DCP folder")
    shape = resolve(config.model, vocab_size)
    files = DcpFiles(folder)
    found = matched(files.tensors, shape, folder)
    check_numbers(files.tensors, found, folder)
    made = origins(files.tensors, found, folder, weights_alone=options.drop_optimizer)
    step = None if options.drop_optimizer else _step(files, found)
    iteration = files.number(_ITERATION)
    if iteration is None:
        iteration = _of_folder(folder) or step or 0
    samples = iteration * config.train.global_batch_size
    notes = []
    if iteration and not is_recipe(options):
        notes.append(
            f"note: {folder}: iteration {iteration} counts as {samples} samples, of train.global_batch_size "
            f"{config.train.global_batch_size}, from which schedules go on. --recipe RECIPE.toml of the run to come "
            "counts as it does."
        )
    state, config = state_of(iteration, samples, step), with_vocab_size(config, vocab_size)
    program = f"dcp, {found.naming.label}"
    return foreign_source(folder, files, made, state, config, program, files.fingerprint(), notes)


def _step(files: DcpFiles, found: NamedTensors) -> int | None:
    """Steps that AdamW has taken; None where it has no states."""
    if not found.states.get("exp_avg"):
        return None
    steps = {files.scalar(key) for key in found.states.get("step", {}).values()}
    if len(steps) > 1:
        raise UserError(f"{files.folder}: its parameters have taken different numbers of steps: {sorted(steps)}.")
    return steps.pop() if steps else files.number(re.compile(r"\.step$")) or 0


def _of_folder(folder: Path) -> int | None:
    """The iteration that the folder's name or Trainer's own file tells."""
    said = (if_readable(read_foreign, folder / "trainer_state.json") or {}).get("global_step")
    if isinstance(said, int):
        return said
    match = _FOLDER.match(folder.name)
    return int(match[1]) if match else None
