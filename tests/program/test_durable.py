"""Small files that are replaced: whole under their name, on the disk before they have it."""

import os
from pathlib import Path

import pytest

from program.durable import replace_file


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the name may stand for an empty file after a loss of power."""
    synced, sync = [], os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, (tmp_path / "x").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    replace_file(tmp_path / "x", b"all of it")
    assert synced == [("x.partial", False), (tmp_path.name, True)]
    assert (tmp_path / "x").read_bytes() == b"all of it"
    replace_file(tmp_path / "x", b"again", durable=False)
    assert len(synced) == 2 and (tmp_path / "x").read_bytes() == b"again"


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"before")
    with pytest.raises(TypeError):
        replace_file(tmp_path / "x", "no bytes")  # type: ignore[arg-type]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]
