"""A damaged checkpoint is not exported: its own hashes say so, and the files of the export would have good ones."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from campaign import some
from models.families import TINY
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main
from training.checkpoint.format.manifest import read_manifest, write_manifest
from training.checkpoint.format.reader import FileReader


def flipped(data: bytes, position: int) -> bytes:
    """With one bit changed."""
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Imported, to damage."""
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    assert (
        main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint"), "--max_file_size", "300KB"])
        == 0
    )
    return tmp_path / "checkpoint"


def refused(checkpoint: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that is said; nothing is left."""
    capsys.readouterr()
    assert (
        main(["export", str(checkpoint), str(checkpoint.with_name("again")), "--max_shard_size", "50KB", *flags]) == 2
    )
    said = capsys.readouterr().err.splitlines()
    assert not [line for line in said[:-1] if line and not line.startswith("export: ")]
    assert not list(checkpoint.parent.glob("again*"))
    return said[-1]


TENSORS = ("embedding.word_embeddings.weight", "decoder.final_norm.weight")


@pytest.mark.parametrize(
    ("tensor", "workers"), some(itertools.product(TENSORS, "12"), [*itertools.product(TENSORS, "1"), (TENSORS[1], "2")])
)
def test_a_changed_byte_is_not_exported(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tensor: str, workers: str
) -> None:
    """At the start and at the end of the work, when others are done."""
    with FileReader(checkpoint) as reader:
        piece = reader.pieces(tensor)[-1]
    path = checkpoint / piece.file
    path.write_bytes(flipped(path.read_bytes(), piece.position + 1))
    said = refused(checkpoint, capsys, "--workers", workers, "--verify")
    assert said.startswith(f"tools.convert: {checkpoint} is damaged: {path}: expected hash {piece.hashes[0]}, found ")
    assert said.endswith(f" (in {tensor}). Take another checkpoint, or bring these files back.")


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "cut short": ("part_00000.bin", lambda data: data[:-1], "expected 286,259 bytes, found 286,258"),
    "gone": ("part_00000.bin", lambda data: None, "No such file"),
    "index cut short": ("index.json", lambda data: data[: len(data) // 2], "expected "),
    "index changed": ("index.json", lambda data: flipped(data, 9), "expected hash "),
    "pieces changed": ("pieces.jsonl", lambda data: flipped(data, 9), "expected hash "),
    "configuration changed": ("config.toml", lambda data: flipped(data, 9), "expected hash "),
    "manifest changed": ("manifest.json", lambda data: flipped(data, 9), "not the manifest of a checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named_in_one_message(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    name, damage, expected = DAMAGES[kind]
    path = checkpoint / name
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    said = refused(checkpoint, capsys)
    assert said.startswith(f"tools.convert: {checkpoint} is damaged: {path}: {expected}")


def test_an_index_that_was_written_broken_is_one_message_too(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "index.json").write_text("{")
    files = read_manifest(checkpoint).files
    write_manifest(checkpoint, {name: facts for name, facts in files.items() if name.endswith(".bin")}, {})
    assert "index.json: not the index of a checkpoint" in refused(checkpoint, capsys)
