"""What inspect_checkpoint says of a run's checkpoints: lists, trees, damages, differences, means."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.prepared import Prepared
from runs import ROOT, configuration, losses, train
from tools.convert.__main__ import main as convert
from tools.inspect_checkpoint import contents
from tools.inspect_checkpoint.__main__ import main
from training.checkpoint import model_state, optimizer_state, rng
from training.checkpoint.format.manifest import read_manifest, write_manifest
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.verify import damages

FLAGS = ("--train.train_iters", "4", "--checkpoint.save_interval", "2", "--precision.dtype", "bf16")


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of iterations 2 and 4, by two ranks."""
    folder = tmp_path_factory.mktemp("inspect") / "run"
    train(prepared, configuration(folder, *FLAGS), 2)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What ``--json`` prints."""
    capsys.readouterr()
    main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_prefixes_are_those_of_the_writer() -> None:
    prefixes = (contents.OPTIMIZER, contents.RNG, contents.FP8)
    assert prefixes == (optimizer_state.PREFIX, rng.PREFIX, model_state.FP8_PREFIX)
    assert contents.kind_of(optimizer_state.MASTER + "x.y") == ("master", "x.y")


@pytest.mark.campaign
def test_it_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from tools.inspect_checkpoint.__main__ import main; "
        f"assert main([{str(run)!r}]) == 0; assert not {{'torch', 'megatron'}} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_runs_folder_is_listed_with_what_a_kill_left(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copied / "checkpoints"
    shutil.copytree(root / "iter_0000004", root / "iter_0000006.tmp-9f3a")
    shutil.copytree(root / "iter_0000004", root / "iter_0000008")
    (root / "iter_0000008/manifest.json").unlink()
    assert main([str(copied), "--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[-1]) for line in lines[1:]] == [
        ("iter_0000002", "complete"),
        ("iter_0000004", "latest"),
        ("iter_0000006.tmp-9f3a", "unfinished"),
        ("iter_0000008", "unfinished"),
    ]
    assert main([str(copied), "--verify", "sizes"]) == 0
    expected = (
        f"{root}/iter_0000008 is damaged: {root}/iter_0000008/manifest.json: expected, not found; taking iter_0000004"
    )
    assert expected in capsys.readouterr().err
    first = printed(capsys, copied, "--list")[0]
    assert (first["iteration"], first["consumed_samples"], first["consumed_tokens"]) == (2, 16, 16 * 64)
    assert first["layout"] == "TP 1 x PP 1 x DP 2"
    assert first["bytes"] == sum(path.stat().st_size for path in (root / "iter_0000002").iterdir())


@pytest.mark.parametrize(
    "text", [None, "[1]", '{"progress": [1]}', '{"progress": {"consumed_samples": "x"}}', "[" * 10**5]
)
def test_a_checkpoint_whose_state_is_something_else_is_listed(
    copied: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """None: a FIFO, which nothing waits for."""
    folder = copied / "checkpoints/iter_0000002"
    (folder / "manifest.json").unlink()
    (folder / "config.toml").write_text("model = 3")
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json") if text is None else (folder / "state.json").write_text(text)
    assert main([str(copied), "--list"]) == 0
    assert "iter_0000002" in capsys.readouterr().out


def test_the_tree_folds_blocks_that_are_alike(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("checkpoint ")  # the list comes first
    assert "iteration 4, 32 samples, 2,048 tokens" in text
    assert "parameters 234,048" in text
    assert "float32 master + exp_avg + exp_avg_sq" in text
    (folded,) = [line for line in text.splitlines() if line.startswith("layers.")]
    assert folded.split() == "layers.0-3 4 blocks alike, each 46,208 parameters 541.5 KiB".split()
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert names.index("self_attention.linear_qkv.weight") < names.index("mlp.linear_fc1.weight")

    assert main([str(run), "--all"]) == 0
    blocks = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("layers.")]
    assert blocks == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_json_has_every_tensor_and_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, run)
    states = [state for tensor in found["tensors"] for state in tensor["states"].values()]
    with FileReader(run / "checkpoints/iter_0000004") as reader:
        assert {state["key"] for state in states} == reader.tensors.keys()
        stored = sum(reader.whole(key).nbytes for key in reader.tensors)
    assert sum(state["bytes"] for state in states) == stored
    assert found["versions"].keys() >= {"torch", "megatron-core"}
    assert found["data"]["seed"] == 1234


def test_a_manifest_sends_no_control_characters(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied / "checkpoints/iter_0000004"
    manifest = read_manifest(folder)
    tensors = {name: facts for name, facts in manifest.files.items() if name.endswith(".bin")}
    write_manifest(folder, tensors, {**manifest.about, "versions": {"torch": "\u202egpj.exe"}})
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_verify_names_each_damaged_file_and_tensor(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied / "checkpoints/iter_0000004"
    assert main([str(copied), "--verify", "hashes"]) == 0
    assert "good" in capsys.readouterr().out
    for name in ("rank_00000.bin", "rank_00001.bin"):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
    (folder / "stranger").write_text("")
    assert main([str(copied), "--verify", "hashes"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(f"{name}: expected hash" in lines[at] for at, name in enumerate(("rank_00000.bin", "rank_00001.bin")))
    assert all("(in optimizer.state." in line for line in lines[:2])
    assert "DAMAGED" in lines[2] and "2 of 8 files" in lines[2]
    assert "stranger: not in the manifest" in lines[3]
    (folder / "stranger").unlink()
    assert main([str(copied), "--verify", "sizes"]) == 0
    (folder / "manifest.json").write_text("{")
    assert main([str(copied), "--verify", "sizes"]) == 1
    assert main([str(copied)]) == 1  # shown as far as it can be read
    assert "DAMAGED" in capsys.readouterr().out


def test_diff_of_two_iterations(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = run / "checkpoints/iter_0000002"
    assert main([str(run), "--diff", str(run / "checkpoints")]) == 0  # with itself
    assert capsys.readouterr().out.splitlines()[-1].startswith("same: weights 27 of 27 equal")
    assert main([str(run), "--diff", str(early), "--top", "3"]) == 1
    text = capsys.readouterr().out
    assert ["progress.iteration", "4", "2"] in [line.split() for line in text.splitlines()]
    assert "... and 78 more (--top)" in text
    assert "different: weights 0 of 27 equal" in text
    found = printed(capsys, run, "--diff", early)
    one = next(
        tensor for tensor in found["tensors"] if (tensor["name"], tensor["what"]) == ("output_layer.weight", "exp_avg")
    )
    sides = []
    for folder in (run / "checkpoints/iter_0000004", early):
        with FileReader(folder) as reader:
            sides.append(reader.whole("optimizer.state.exp_avg.output_layer.weight").view(np.float32).astype(float))
    apart = np.linalg.norm(sides[0] - sides[1])
    assert one["max_abs"] == np.abs(sides[0] - sides[1]).max()
    assert one["relative"] == pytest.approx(apart / max(map(np.linalg.norm, sides)))


def test_the_configuration_is_compared_field_by_field(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied / "checkpoints/iter_0000004"
    other = Path(shutil.copytree(folder, copied / "other"))
    text = (other / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("lr = 0.003", "lr = 0.004"))
    assert main([str(folder), "--diff", str(other)]) == 1
    assert ["config.optimizer.lr", "0.003", "0.004"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_mean_is_finetuned_and_exported(
    run: Path, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last, target = run / "checkpoints/iter_0000002", run / "checkpoints/iter_0000004", tmp_path / "mean"
    assert main(["average", str(target), str(first), str(run), "--weights", "1", "3"]) == 0
    assert damages(target, "hashes") == []
    key = "decoder.layers.3.mlp.linear_fc1.weight"
    with FileReader(first) as one, FileReader(last) as other, FileReader(target) as mean:
        sides = [reader.whole(optimizer_state.MASTER + key).view(np.float32) for reader in (one, other)]
        expected = (sides[0].astype(float) + 3 * sides[1].astype(float)) / 4
        assert np.array_equal(mean.whole(key).view(np.float32), expected.astype(np.float32))
        masters = {key for key in other.tensors if key.startswith(optimizer_state.MASTER)}
        assert {optimizer_state.MASTER + key for key in mean.tensors} == masters
    for name in ("config.toml", "state.json"):
        assert (target / name).read_bytes() == (last / name).read_bytes()
    assert printed(capsys, target)["iteration"] == 4

    tuning = ("--train.train_iters", "1", "--checkpoint.load", str(target), "--checkpoint.finetune", "True")
    resumed = train(prepared, configuration(tmp_path / "tuned", *FLAGS[2:], *tuning), 1)
    assert losses(resumed)[0] < 5.2  # 5.6 from initial weights
    assert convert(["export", str(target), str(tmp_path / "hf"), "--verify"]) == 0


def test_mistakes_are_one_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["nowhere"], "nowhere: expected a checkpoint"),
        ([str(run), "--diff", "nowhere"], "nowhere: expected a checkpoint"),
        ([str(run), "--tensor", "layers.0.mlp.linear_fc1.wieght"], "Near: layers.0.mlp.linear_fc1.weight"),
        ([str(run), "--list", "--verify", "sizes"], "--list and --verify: each is an answer by itself"),
        ([str(run), "--diff", str(run), "--top", "0"], "--top 0: expected 1 or more"),
        (["average", str(tmp_path / "x"), str(run)], "two or more checkpoints; found 1"),
        (["average", str(run), str(run), str(run)], "already there"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert message in said[0]
