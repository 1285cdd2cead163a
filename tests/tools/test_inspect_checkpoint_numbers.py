"""Statistics, differences and means of tensors made for it: dtypes, NaNs, blocks, shapes, a killed average."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.layout import Layout
from tools.inspect_checkpoint import average
from tools.inspect_checkpoint.__main__ import main
from tools.inspect_checkpoint.contents import parameters
from tools.inspect_checkpoint.numbers import Statistics, rectangles, values
from tools.inspect_checkpoint.tree import groups, ranges
from tools.shared import resumable
from tools.shared.dtypes import from_numbers
from training.checkpoint.format.coverage import covered_once
from training.checkpoint.format.manifest import write_manifest
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.reader import FileReader, TensorInfo
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.writer import FileWriter
from training.checkpoint.state import State, write_state
from training.progress import Progress

FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.final_norm.weight"


def written(folder: Path, tensors: Mapping[str, np.ndarray], dtype: str = "float32") -> Path:
    """A checkpoint of these tensors, rounded to ``dtype``."""
    folder.mkdir()
    with FileWriter(folder, "rank_00000") as file:
        for key, tensor in tensors.items():
            words = np.ascontiguousarray(from_numbers(tensor.astype(np.float32), dtype))
            file.add(
                TensorGroup((key,), dtype, tensor.shape),
                (0,) * tensor.ndim,
                tensor.shape,
                [memoryview(words).cast("B")],
            )
    facts = merge(folder, ["rank_00000"])
    remove_tables(folder, ["rank_00000"])
    (folder / "config.toml").write_text("[model]\nseq_length = 8\n")
    write_state(folder, State(progress=Progress(iteration=1), layout=Layout(), device="cpu"))
    write_manifest(folder, facts, {"iteration": 1})
    return folder


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """fp32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What ``--json`` prints."""
    capsys.readouterr()
    main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def outcomes(capsys: pytest.CaptureFixture[str], one: Path, other: Path) -> dict[tuple[str, str], str]:
    """(name, what) -> what ``--diff`` finds."""
    found = printed(capsys, one, "--diff", other)["tensors"]
    return {(tensor["name"], tensor["what"]): tensor["outcome"] for tensor in found}


# ---- blocks and numbers


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 60))
def test_rectangles_cover_a_tensor_once_and_are_small(shape: list[int], most: int) -> None:
    found = list(rectangles(tuple(shape), most))
    assert covered_once(tuple(shape), found)
    assert all(np.prod(size) <= most for _, size in found)


@given(st.integers(1, 40))
def test_statistics_of_blocks_are_those_of_the_whole(step: int) -> None:
    tensor = normal(97) * 3 + 1000
    tensor[[3, 50, 51, 96]] = [np.nan, np.inf, -np.inf, 0]
    found = Statistics()
    for start in range(0, len(tensor), step):
        found.add(tensor[start : start + step])
    good = tensor[np.isfinite(tensor)].astype(np.float64)
    assert (found.elements, found.nan, found.inf, found.zeros) == (97, 1, 2, 1)
    assert (found.min, found.max) == (good.min(), good.max())
    assert [found.mean, found.std, found.norm] == pytest.approx([good.mean(), good.std(), np.linalg.norm(good)])


def test_numbers_of_every_small_dtype_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "int8"):
        expected = codes.view(getattr(torch, name)).float().numpy()
        assert np.array_equal(values(codes.numpy(), name).astype(np.float32), expected, equal_nan=True)


def test_tensor_prints_statistics_by_name_and_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fc2 = normal(5, 3)
    fc2[2, 1] = np.nan
    moment = f"optimizer.state.exp_avg.{FC2}"
    folder = written(tmp_path / "a", {FC2: fc2, moment: normal(5, 3, seed=1), NORM: normal(4)})
    found = printed(capsys, folder, "--tensor", "layers.0.*")
    assert [(one["state"], one["nan"]) for one in found] == [("weight", 1), ("exp_avg", 0)]
    assert found[0]["max"] == np.nanmax(fc2)
    assert [one["key"] for one in printed(capsys, folder, "--tensor", "*exp_avg.*")] == [moment]


# ---- the tree


def test_blocks_are_folded_only_where_all_is_alike() -> None:
    """Dense, then experts, then dense ones, one of which has another dtype."""
    tensors = {}
    for block in range(6):
        experts = "mlp.experts.experts.linear_fc2.weight" if block in (1, 3) else "mlp.linear_fc2.weight"
        dtype = "bfloat16" if block == 5 else "float32"
        tensors[f"decoder.layers.{2 * block + 1}.{experts}"] = TensorInfo(dtype, (4, 4), (0, 0), 0)
    assert [ranges(names) for names, _ in groups(parameters(tensors), fold=True)] == [
        "layers.0, 2, 4",
        "layers.1, 3",
        "layers.5",
    ]


# ---- differences


def test_weights_are_compared_with_masters_after_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {FC2: normal(6, 4), NORM: normal(4)}
    masters = written(tmp_path / "a", {f"optimizer.state.param.{key}": tensor for key, tensor in tensors.items()})
    rounded = written(tmp_path / "b", tensors, "bfloat16")
    assert set(outcomes(capsys, masters, rounded).values()) == {"rounded"}
    assert main([str(masters), "--diff", str(rounded)]) == 0
    assert "same: weights 2 of 2 equal (2 once rounded)" in capsys.readouterr().out

    tensors[FC2][1, 1] *= 1.02
    changed = written(tmp_path / "c", tensors, "bfloat16")
    assert outcomes(capsys, masters, changed)["layers.0.mlp.linear_fc2.weight", "weights"] == "differs"
    assert main([str(masters), "--diff", str(changed)]) == 1


def test_tensors_of_one_side_and_of_other_shapes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = written(tmp_path / "a", {FC2: normal(6, 4), NORM: normal(4), f"optimizer.state.exp_avg.{NORM}": normal(4)})
    other = written(tmp_path / "b", {FC2: normal(6, 5), NORM: normal(4), "output_layer.weight": normal(3)})
    assert main([str(one), "--diff", str(other)]) == 1
    text = capsys.readouterr().out
    assert "other shape: layers.0.mlp.linear_fc2.weight (weights): float32 [6, 4], float32 [6, 5]" in text
    assert "only in the first: 1 of exp_avg: final_layernorm.weight" in text
    assert "only in the second: 1 of weights: output_layer.weight" in text


def test_the_largest_difference_comes_first_and_nan_before_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {f"decoder.layers.{2 * block + 1}.mlp.linear_fc2.weight": normal(8) + 10 for block in range(3)}
    changed = {key: tensor.copy() for key, tensor in base.items()}
    first, second, third = changed.values()
    first[0] += 0.1
    second[0] += 1
    third[0] = np.nan
    assert main([str(written(tmp_path / "a", base)), "--diff", str(written(tmp_path / "b", changed))]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("layers.")]
    assert [row[0][:8] for row in rows] == ["layers.2", "layers.1", "layers.0"]
    assert rows[0][2:] == ["inf", "inf"]
    assert rows[1][3] == "1"


def test_the_same_nan_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = normal(8)
    tensor[3] = np.nan
    one, other = written(tmp_path / "a", {NORM: tensor}), written(tmp_path / "b", {NORM: tensor})
    assert main([str(one), "--diff", str(other)]) == 0
    tensor[4] += 1
    found = printed(capsys, one, "--diff", written(tmp_path / "c", {NORM: tensor}))["tensors"]
    assert found[0]["max_abs"] == pytest.approx(1)
    assert 0 < found[0]["relative"] < 1


def test_an_index_that_lies_is_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (written(tmp_path / name, {NORM: normal(8)}) for name in "ab")
    text = (one / "index.json").read_text()
    lies = {"float32": "float31", "8": "9"}
    for true, false in lies.items():
        (one / "index.json").write_text(text.replace(true, false, 1))
        assert main([str(one), "--tensor", "*"]) == 1
        assert "tools.inspect_checkpoint: damaged: " in capsys.readouterr().err
    assert main([str(other), "--tensor", "*"]) == 0


# ---- means


def test_the_mean_of_the_same_is_the_same(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", {FC2: normal(50, 30), NORM: normal(4)})
    assert main(["average", str(tmp_path / "mean"), str(folder), str(folder), str(folder)]) == 0
    assert main([str(folder), "--diff", str(tmp_path / "mean")]) == 0


def test_masters_are_averaged_where_there_are_both(tmp_path: Path) -> None:
    master = normal(4)
    folder = written(tmp_path / "a", {NORM: normal(4, seed=1), f"optimizer.state.param.{NORM}": master})
    assert main(["average", str(tmp_path / "mean"), str(folder), str(folder)]) == 0
    with FileReader(tmp_path / "mean") as reader:
        assert list(reader.tensors) == [NORM]
        assert np.array_equal(reader.whole(NORM).view(np.float32), master)


def test_other_shapes_names_and_damages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = written(tmp_path / "a", {FC2: normal(6, 4), NORM: normal(4)})
    other = written(tmp_path / "b", {FC2: normal(6, 5), "output_layer.weight": normal(4)})
    assert main(["average", str(tmp_path / "mean"), str(one), str(other)]) == 2
    said = capsys.readouterr().err
    assert f"layers.0.mlp.linear_fc2.weight is [6, 4] in {one} and [6, 5] in {other}" in said
    assert f"only {one} has final_layernorm.weight" in said
    assert f"only {other} has output_layer.weight" in said
    for shares in (["1"], ["1", "-1"], ["0", "0"], ["nan", "1"]):
        assert main(["average", str(tmp_path / "mean"), str(one), str(one), "--weights", *shares]) == 2
    data = (one / "rank_00000.bin").read_bytes()
    (one / "rank_00000.bin").write_bytes(data[:-1])
    capsys.readouterr()
    assert main(["average", str(tmp_path / "mean"), str(one), str(one)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("mean*"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_changed_byte_does_not_become_part_of_a_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setattr(average, "FILE_BYTES", 200)
    moment = f"optimizer.state.exp_avg.{FC2}"
    one, other = (written(tmp_path / name, {moment: normal(6, 4), FC2: normal(6, 4), NORM: normal(4)}) for name in "ab")
    path, command = other / "rank_00000.bin", ["average", str(tmp_path / "mean"), str(one), str(other)]
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])  # of the moment, which has no part in it
    assert main([*command, "--workers", workers]) == 0
    shutil.rmtree(tmp_path / "mean")
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    capsys.readouterr()
    assert main([*command, "--workers", workers]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"tools.inspect_checkpoint: {other} is damaged: {path}: expected hash ")
    assert said.endswith(f"(in {FC2}). Take another checkpoint, or bring these files back.")
    assert not list(tmp_path.glob("mean*"))


def test_an_average_that_ended_early_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average, "FILE_BYTES", 1000)
    tensors = {
        f"decoder.layers.{2 * block + 1}.mlp.linear_fc2.weight": normal(20, 10, seed=block) for block in range(6)
    }
    one = written(tmp_path / "a", tensors)
    other = written(tmp_path / "b", {key: tensor + 1 for key, tensor in tensors.items()}, "bfloat16")
    assert main(["average", str(tmp_path / "whole"), str(one), str(other)]) == 0
    done = []

    def run_out_of_power(job: resumable.ConversionJob, *_: object) -> None:
        def report(count: int) -> None:
            done.append(count)
            if len(done) == 4:
                raise KeyboardInterrupt

        job.run_worker(0, 1, report)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(resumable, "run", run_out_of_power)
        main(["average", str(tmp_path / "mean"), str(one), str(other)])
    assert not (tmp_path / "mean").exists()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "mean.tmp-convert").glob("*.pieces.json")}
    assert len(kept) == 3
    assert main(["average", str(tmp_path / "mean"), str(one), str(other), "--workers", "2"]) == 0
    for path, changed in kept.items():
        part = path.name.replace(".pieces.json", ".bin")
        assert (tmp_path / "mean" / part).stat().st_mtime_ns <= changed
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "mean").iterdir())
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "mean" / name).read_bytes() for name in names)
    with FileReader(tmp_path / "mean") as reader:
        assert len(reader.tensors) == 6
