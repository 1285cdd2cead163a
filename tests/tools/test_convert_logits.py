"""Logits are compared with transformers' own before anything is converted; what was compared and differs does not stay.

The comparisons are subprocesses, some seconds each: a campaign runs them, test_convert_transformers what they do.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.families import TINY
from models.hf.shapes import read_shape
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main
from tools.convert.checking import check
from tools.convert.cut import cut_of, write_cut
from tools.convert.exporting import export_folder
from tools.convert.importing import import_folder
from tools.shared import resumable
from tools.shared.hf_folder.source import HfFolder, architecture

SETTINGS: dict[str, Any] = {"dtype": None, "workers": 1}
MIXED = dataclasses.replace(
    TINY["qwen3_moe_tiny"], moe_layer_freq="[0,0,1,0]", num_moe_experts=8, vocab_size=2000, ffn_hidden_size=96
)


@pytest.mark.campaign
def test_one_block_of_each_kind_is_compared_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the first and the third block, in this order, of the first 1024 ids and 4 of 8 experts."""
    write_folder(tmp_path / "hf", MIXED)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    said = capsys.readouterr().out
    assert "\nnote: logits of 64 tokens agree within " in said
    assert ", of blocks 0 and 2, 4 experts. " in said
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint"]
    assert not list((tmp_path / "checkpoint").glob("logits*"))


def test_without_transformers_a_note_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    monkeypatch.setitem(sys.modules, "transformers", None)  # as Python has it where nothing is installed
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    assert "note: logits were not compared with transformers' own: it is not installed." in capsys.readouterr().out


def test_where_a_side_cannot_run_a_note_says_why_and_the_import_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    said = capsys.readouterr().out
    assert "note: logits were not compared, of block 0: transformers' logits could not be computed (" in said
    assert main(["import", "--logits", str(tmp_path / "hf"), str(tmp_path / "again")]) == 2


@pytest.mark.parametrize("direction", ["import", "export"])
def test_what_is_rejected_before_it_has_its_name_does_not_stay(tmp_path: Path, direction: str) -> None:
    """As --verify and --logits do it."""
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])

    def reject(folder: Path) -> list[str]:
        assert (folder / ("manifest.json" if direction == "import" else "model.safetensors")).is_file()
        raise resumable.Rejected(f"{folder} differs.")

    with pytest.raises(resumable.Rejected, match=r"/out differs\. .*/out was removed\.$"):
        if direction == "import":
            import_folder(tmp_path / "hf", tmp_path / "out", **SETTINGS, max_file_bytes=1 << 30, accept=reject)
        else:
            import_folder(tmp_path / "hf", tmp_path / "checkpoint", **SETTINGS, max_file_bytes=1 << 30)
            export_folder(
                tmp_path / "checkpoint", tmp_path / "out", **SETTINGS, max_shard_bytes=1 << 30, like=None, accept=reject
            )
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", [name for name in TINY if name != "gpt3_tiny"])
def test_a_cut_folder_is_a_folder_of_the_same_weights(name: str, tmp_path: Path) -> None:
    """Of every architecture: its configuration and tensors fit together, and rows come from the right places."""
    shape = dataclasses.replace(TINY[name], vocab_size=1500)
    write_folder(tmp_path / "hf", shape)
    with HfFolder(tmp_path / "hf") as whole:
        cut = cut_of(*architecture(whole))
        kinds = set(zip(shape.blocks, shape.window_blocks, shape.no_rope_blocks, strict=True))
        assert len(cut.blocks) == len(kinds)
        write_cut(whole, cut, tmp_path / "cut")
        with HfFolder(tmp_path / "cut") as source:
            assert check(source, *architecture(source)) == []
            found = read_shape(source.config)[1]
            assert (found.num_layers, found.vocab_size) == (len(cut.blocks), 1024)
            for router in (name for name in source.places if name.endswith(("mlp.gate.weight", "moe.gate.weight"))):
                place = source.places[router]
                rows = source.rows(router, 0, place.shape[0], place.dtype)
                theirs = f"model.layers.{cut.blocks[int(router.split('.')[2])]}.{router.split('.', 3)[3]}"
                for row, expert in enumerate(cut.experts):
                    assert np.array_equal(rows[row], whole.rows(theirs, expert, 1, place.dtype)[0])
