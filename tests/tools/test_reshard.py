"""tools.reshard between Triplane checkpoints: what training wrote, rewritten, goes on bit by bit."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaign import param
from checkpoint_parts import Parts, configuration, on_ranks, sizes
from programs import Program
from tools.reshard.__main__ import main
from tools.shared.dtypes import cast
from training.checkpoint.folders import STATE
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.verify import damages
from training.config import recipe

EMBEDDING = "embedding.word_embeddings.weight"
STATES = ("param", "exp_avg", "exp_avg_sq")


def train_and_save(parts: Parts, folder: Path, toml: str) -> None:
    parts.train(2)
    parts.keep(folder / "checkpoints", texts={"config.toml": toml})


def restore_and_train(parts: Parts, folder: Path, output: Path) -> None:
    parts.restore(folder)
    losses = parts.train(4)
    if parts.ranks.rank == 0:
        output.write_text(json.dumps(losses))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: experts on two ranks, bf16, with moments that are not zero."""
    folder = tmp_path_factory.mktemp("run")
    config = configuration(sizes(expert_model_parallel_size=2), dtype="bf16", shape="qwen3_moe_tiny")
    on_ranks(2, config, train_and_save, folder, recipe.dump(config))
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with FileReader(folder) as reader:
        return {key: reader.whole(key) for key in reader.tensors}


def dtypes(folder: Path) -> dict[str, str]:
    with FileReader(folder) as reader:
        return {key: info.dtype for key, info in reader.tensors.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def source_of(run: Path) -> Path:
    return run / "checkpoints" / "iter_0000002"


def test_files_of_another_size_hold_the_same(run: Path, tmp_path: Path) -> None:
    assert main([str(run), str(tmp_path / "iter_0000002"), "--max_file_size", "200KB", "--verify"]) == 0
    target, source = tmp_path / "iter_0000002", source_of(run)
    assert damages(target, "hashes") == []
    assert same(tensors(source), tensors(target))
    assert max(path.stat().st_size for path in target.glob("*.bin")) <= 210_000  # and their tables
    assert len(list(target.glob("*.bin"))) > 10
    assert json.loads((target / STATE).read_text()) == json.loads((source / STATE).read_text())
    assert (target / "config.toml").read_bytes() == (source / "config.toml").read_bytes()
    config = configuration(sizes(), dtype="bf16", shape="qwen3_moe_tiny")
    losses = []
    for folder, name in ((tmp_path, "ours"), (run / "checkpoints", "theirs")):
        on_ranks(1, config, restore_and_train, folder, tmp_path / f"{name}.json")
        losses.append((tmp_path / f"{name}.json").read_text())
    assert losses[0] == losses[1]


def test_without_the_optimizer_weights_are_its_fp32_ones(run: Path, tmp_path: Path) -> None:
    source, target = tensors(source_of(run)), tmp_path / "weights"
    assert main([str(run), str(target), "--drop_optimizer", "--dtype", "bfloat16", "--verify"]) == 0
    found, kinds = tensors(target), dtypes(target)
    masters = {key.removeprefix("optimizer.state.param."): words for key, words in source.items() if ".param." in key}
    assert masters.keys() == {key for key in found if not key.startswith("rng.")}
    for key, words in masters.items():
        assert kinds[key] == "bfloat16"
        assert np.array_equal(found[key], cast(words, "float32", "bfloat16"))
    assert json.loads((target / STATE).read_text())["optimizer"] == {}
    assert main([str(target), str(tmp_path / "wide"), "--dtype", "float32", "--verify"]) == 0
    assert dtypes(tmp_path / "wide")[EMBEDDING] == "float32"


def test_a_larger_vocabulary_has_rows_of_zeros_and_goes_back(run: Path, tmp_path: Path) -> None:
    wide, back = tmp_path / "wide", tmp_path / "back"
    assert main([str(run), str(wide), "--make_vocab_size_divisible_by", "512", "--verify"]) == 0
    source, found = tensors(source_of(run)), tensors(wide)
    for part in STATES:
        key = f"optimizer.state.{part}.{EMBEDDING}"
        assert source[key].shape[0] == 384
        assert found[key].shape[0] == 512
        assert np.array_equal(found[key][:384], source[key])
        assert not found[key][384:].any()
    assert recipe.load(wide / "config.toml").model.make_vocab_size_divisible_by == 512
    assert main([str(wide), str(back), "--make_vocab_size_divisible_by", "128", "--verify"]) == 0
    assert same(source, tensors(back))
    assert main([str(run), str(tmp_path / "narrow"), "--make_vocab_size_divisible_by", "1"]) == 0
    narrow = tensors(tmp_path / "narrow")[f"optimizer.state.exp_avg.{EMBEDDING}"]
    assert np.array_equal(narrow, source[f"optimizer.state.exp_avg.{EMBEDDING}"][:257])
    config = configuration(sizes(), dtype="bf16", shape="qwen3_moe_tiny", make_vocab_size_divisible_by=512)
    (tmp_path / "in").mkdir()
    wide.rename(tmp_path / "in" / "iter_0000002")
    on_ranks(1, config, restore_and_train, tmp_path / "in", tmp_path / "losses.json")


def killed(arguments: list[str], unfinished: Path) -> int:
    """Start it, kill it hard when a few of its files are done: how many were."""
    process = Program(arguments, unfinished.with_name("killed"), module="tools.reshard")
    try:
        while process.poll() is None and len(list(unfinished.rglob("*.pieces.json"))) < 3:
            time.sleep(0.001)
    finally:
        process.kill()
        process.communicate()
    return len(list(unfinished.rglob("*.pieces.json")))


@pytest.mark.parametrize("more", [["--workers", "2"], param(["--format", "megatron"])], ids=["ours", "megatron"])
def test_what_is_killed_goes_on_to_the_same_bytes(run: Path, tmp_path: Path, more: list[str]) -> None:
    arguments = [str(run), str(tmp_path / "out"), "--max_file_size", "40KB", *more]
    unfinished = tmp_path / "out.tmp-convert"
    assert 3 <= killed(arguments, unfinished) < 100
    kept = {path: path.stat().st_mtime_ns for path in unfinished.rglob("*.pieces.json")}
    assert main([*arguments, "--verify"]) == 0
    for path, changed in kept.items():  # what was done was not done again
        ending = ".distcp" if "megatron" in more else ".bin"
        name = path.relative_to(unfinished).with_name(path.name.replace(".pieces.json", ending))
        assert (tmp_path / "out" / name).stat().st_mtime_ns <= changed
    plain = [argument for argument in arguments if argument not in ("--workers", "2")]
    assert main([plain[0], str(tmp_path / "once"), *plain[2:]]) == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "once")


MISTAKES: dict[str, tuple[list[str], str]] = {
    "real rows": (["--vocab_size", "200"], "--vocab_size 200: .* has 257 token ids"),
    "masters": (["--dtype", "bfloat16"], "Add --drop_optimizer"),
    "no size": (["--max_file_size", "many"], '"many" is no size'),
    "no workers": (["--workers", "0"], "--workers 0: expected 1 or more"),
    "recipe": (["--recipe", "nowhere.toml"], "--recipe nowhere.toml: no such file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_one_message(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    more, message = MISTAKES[name]
    assert main([str(run), str(tmp_path / "out"), *more]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_no_damage_is_copied(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert main([str(run), str(tmp_path / "there")]) == 2
    assert "already there" in capsys.readouterr().err
    assert main([str(tmp_path / "there"), str(tmp_path / "out")]) == 2
    assert "found an empty folder" in capsys.readouterr().err
    assert main([str(run), str(tmp_path / "copy")]) == 0
    path = next((tmp_path / "copy").glob("*.bin"))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert main([str(tmp_path / "copy"), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_finds_a_changed_number(run: Path, tmp_path: Path) -> None:
    from program.errors import UserError
    from tools.reshard.__main__ import compare
    from tools.reshard.options import ReshardOptions
    from tools.reshard.rewriting import planned
    from tools.reshard.sources import open_source

    assert main([str(run), str(tmp_path / "copy")]) == 0
    path = next((tmp_path / "copy").glob("*.bin"))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    options = ReshardOptions()
    source: Any = open_source(run, options)
    with pytest.raises(UserError, match=r"differs from .* in optimizer\.state\.param"):
        compare(source, planned(source, options), tmp_path / "copy", options)
    source.files.close()
