"""Nothing in a Megatron checkpoint is executed, whoever wrote it; torch's own readers of pickles are not reached."""

import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import default_planner, filesystem

from checkpoint_parts import configuration, on_ranks, sizes
from tests.tools.reshard_sources import train_and_save
from tools.reshard.__main__ import main
from training.config import recipe

CONFIG = configuration(sizes(), shape="llama2_tiny")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    on_ranks(1, CONFIG, train_and_save, folder / "theirs", "fully_reshardable")
    (folder / "recipe.toml").write_text(recipe.dump(CONFIG))
    return folder


def arguments(source: Path, folder: Path, target: Path) -> list[str]:
    return [str(folder), str(target), "--recipe", str(source / "recipe.toml")]


class Touch:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def entries(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def in_place_of_metadata(folder: Path, witness: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(witness)))


def among_metadata(folder: Path, witness: Path) -> None:
    metadata = entries(folder)
    metadata.planner_data = Touch(witness)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def as_protocol_0(folder: Path, witness: Path) -> None:
    (folder / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {witness}'\ntR.".encode())


def through_a_builtin(folder: Path, witness: Path) -> None:
    (folder / ".metadata").write_bytes(
        f'cbuiltins\neval\n(S\'__import__("os").system("touch {witness}")\'\ntR.'.encode()
    )


def through_an_admitted_name(folder: Path, witness: Path) -> None:
    """pathlib is in the table, but what is in it is a record; getattr and the rest are not."""
    text = f"cpathlib\nPosixPath\n(S'{witness}'\ntR(dS'touch'\nS'x'\nsb0cpathlib\nPosixPath.touch\n(tR."
    (folder / ".metadata").write_bytes(text.encode())


def in_a_blob(folder: Path, witness: Path, key: str) -> None:
    """The pickle inside what torch.save made of a tensor or of the common state; appended, and pointed to."""
    metadata = entries(folder)
    index = next(index for index in metadata.storage_data if index.fqn == key)
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Touch(witness)))
        archive.writestr("archive/byteorder", "little")
    path = folder / metadata.storage_data[index].relative_path
    metadata.storage_data[index].offset = path.stat().st_size
    metadata.storage_data[index].length = len(blob.getvalue())
    with path.open("ab") as file:
        file.write(blob.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_a_tensor(folder: Path, witness: Path) -> None:
    in_a_blob(folder, witness, "output_layer.weight")


def in_the_common_state(folder: Path, witness: Path) -> None:
    in_a_blob(folder, witness, "common_state/shard_0_1")


def in_a_legacy_common_state(folder: Path, witness: Path) -> None:
    torch.save({"iteration": 2, "args": Touch(witness)}, folder / "common.pt")


ATTACKS: list[Callable[[Path, Path], None]] = [
    in_place_of_metadata, among_metadata, as_protocol_0, through_a_builtin, through_an_admitted_name, in_a_tensor,
    in_the_common_state, in_a_legacy_common_state,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_is_executed(
    attack: Callable[[Path, Path], None], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, witness = tmp_path / "theirs", tmp_path / "executed"
    shutil.copytree(source / "theirs", folder)
    attack(folder, witness)
    assert main(arguments(source, folder, tmp_path / "ours")) == 2
    said = capsys.readouterr().err
    assert re.search(r"refused, nothing was run: it names (posix\.system|os\.system|builtins\.eval|pathlib)", said)
    assert not witness.exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("damage", ["cut", "noise", "missing", "hole", "fifo", "fifo for a number"])
def test_damage_is_named(damage: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(source / "theirs", folder)
    metadata, data = folder / ".metadata", folder / "__0_0.distcp"
    if damage == "cut":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    elif damage == "noise":
        metadata.write_bytes(b"\x80\x04" + os.urandom(500))
    elif damage == "missing":
        data.unlink()
    elif damage == "fifo":
        metadata.unlink()
        os.mkfifo(metadata)
    elif damage == "fifo for a number":
        metadata.unlink()
        os.mkfifo(folder / "latest_checkpointed_iteration.txt")
    else:
        found = entries(folder)
        chunks = found.state_dict_metadata["output_layer.weight"].chunks
        chunks[0].sizes = torch.Size([100, chunks[0].sizes[1]])
        metadata.write_bytes(pickle.dumps(found))
    assert main(arguments(source, folder, tmp_path / "ours")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(folder) in said
    assert not (tmp_path / "ours").exists()


def test_torchs_own_readers_are_not_reached(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("a reader that executes pickles was reached")

    for owner, name in (
        (filesystem.FileSystemReader, "read_metadata"), (filesystem.FileSystemReader, "read_data"),
        (default_planner.DefaultLoadPlanner, "load_bytes"), (torch, "load"), (pickle, "load"), (pickle, "loads"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, reached)
    assert main([*arguments(source, source / "theirs", tmp_path / "ours"), "--verify"]) == 0


def test_megatrons_checkpoint_is_read_without_torch(source: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from tools.reshard.__main__ import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'megatron'} & {name.partition('.')[0] for name in sys.modules}; sys.exit(code)"
    )
    given = arguments(source, source / "theirs", tmp_path / "ours")
    subprocess.run([sys.executable, "-c", script, *given, "--verify"], check=True)
