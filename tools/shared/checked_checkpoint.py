"""A checkpoint that is read only where it is what was written: a copy gets hashes of its own, which would hide damage.

Sizes and small files before anything else. Tensors while they are read, piece by piece, so that bytes come from the
disk once, and what is not read, such as moments that are not exported, costs nothing.
"""

from pathlib import Path

import numpy as np

from program.errors import UserError
from training.checkpoint.format.manifest import MANIFEST, DamagedError
from training.checkpoint.format.reader import FileReader, overlaps
from training.checkpoint.format.verify import STEP_BYTES, Depth, damages, hash_of
from training.config.recipe import load
from training.config.run_config import RunConfig

FIX = "Take another checkpoint, or bring these files back."


def check_files(folder: Path, depth: Depth = "sizes") -> None:
    """Sizes of all files and every byte of the small ones, the index among them; or every byte. Raises UserError."""
    if found := damages(folder, depth):
        texts = "; ".join(damage.text for damage in found[:3])
        raise UserError(f"{folder} is damaged: {texts}. {FIX}")


def read_config(folder: Path) -> RunConfig:
    """A checkpoint's ``config.toml``. Raises UserError where the folder is no checkpoint."""
    check_is_checkpoint(folder)
    return load(folder / "config.toml")


def check_is_checkpoint(folder: Path) -> None:
    """Raises UserError where the folder is none, by the names in it."""
    if not (folder / MANIFEST).is_file() or not (folder / "config.toml").is_file():
        raise UserError(f"{folder}: expected a checkpoint, with {MANIFEST} and config.toml. Give the path of one.")


class CheckedReader(FileReader):
    """Hashes each piece before the first bytes of it are given out. ``check_files`` comes first: the index is believed.

    What is hashed lies in the page cache when it is read right after.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._good: set[tuple[str, int]] = set()
        self._asked: set[tuple[str, int]] = set()

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """As ``FileReader.read``. Raises DamagedError, too, where the hash of a piece is not the written one."""
        number = self.tensors[key].number
        for piece, *_ in overlaps(self.pieces(key), offset, into.shape):
            size = self.tensors[key].piece_bytes(piece.shape)
            position = piece.position + number * size
            if (piece.file, position) not in self._good:
                found = hash_of(self._descriptor(piece.file), position, size, memoryview(bytearray(STEP_BYTES)))
                if found != piece.hashes[number]:
                    said = f"expected hash {piece.hashes[number]}, found {found} (in {key})"
                    raise DamagedError(f"{self.folder} is damaged: {self.folder / piece.file}: {said}")
                self._good.add((piece.file, position))
        super().read(key, offset, into)

    def ask_for(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Have the disk fetch what ``read`` of this rectangle will want: the pieces that it hashes, whole."""
        for piece, *_ in overlaps(self.pieces(key), offset, shape):
            at = (piece.file, piece.position)
            if at not in self._asked:
                self._asked.add(at)
                super().ask_for(key, piece.offset, piece.shape)
