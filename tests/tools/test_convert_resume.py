"""A conversion that is killed goes on; the number of workers changes no byte; a folder's other files are carried."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from campaign import some
from data.tokenizers.sentencepiece_training import builtin_model
from models.families import TINY
from program.errors import UserError
from programs import Program
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main
from tools.shared import resumable
from tools.shared.hf_folder.source import HfFolder
from training.checkpoint.format.manifest import write_manifest
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.verify import damages
from training.checkpoint.format.writer import FileWriter

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WIDE = dataclasses.replace(TINY["llama2_tiny"], num_layers=16, hidden_size=256, ffn_hidden_size=1024, kv_channels=64)


def hashes(folder: Path) -> dict[str, str]:
    """Of each file, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def killed(arguments: list[str], unfinished: Path, ending: str) -> int:
    """Start a conversion, kill it hard when a few of its files are done: how many were."""
    process = Program(arguments, unfinished.with_name("killed"), module="tools.convert")
    try:
        while process.poll() is None:
            done = list(unfinished.glob(f"*{ending}")) if unfinished.is_dir() else []
            if len(done) >= 3:
                break
            time.sleep(0.001)
    finally:
        process.kill()
        process.communicate()
    return len(list(unfinished.glob(f"*{ending}")))


class DiesWhenAsked(SpawnProcess):
    """A worker that dies right before its exit code is read for the ``reading``-th time."""

    reading: int

    @property
    def exitcode(self) -> int | None:
        self.reading -= 1
        if self.reading == 0:
            self.kill()
            self.join()
        return super().exitcode


@pytest.mark.parametrize("reading", some(range(1, 8), (1, 3, 7)))
def test_a_worker_that_dies_at_any_moment_is_seen(reading: int) -> None:
    """The last one's end between two looks at it was a StopIteration, or success."""
    worker = DiesWhenAsked(target=time.sleep, args=(60,))
    worker.reading = reading
    worker.start()
    with pytest.raises(UserError, match=r"exit code -9\. What is done is kept"):
        resumable._wait_for([worker], SimpleQueue(ctx=multiprocessing.get_context("spawn")), lambda: None)


@pytest.mark.parametrize("workers", some("12", "2"))
def test_ctrl_c_ends_it_with_a_line(tmp_path: Path, workers: str) -> None:
    """A terminal sends it to all processes of the command, whatever they are at: here while workers start."""
    write_folder(tmp_path / "hf", WIDE, dtype=torch.float32)
    command = [
        "import",
        "--no_logits",
        str(tmp_path / "hf"),
        str(tmp_path / "checkpoint"),
        "--max_file_size",
        "20KB",
        "--workers",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.convert", *command, workers], start_new_session=True, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (tmp_path / "checkpoint.tmp-convert").exists() or (
        workers == "2" and len(children.read_text().split()) < 3
    ):
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    assert said.splitlines()[-1].startswith("tools.convert: interrupted; ")


@pytest.mark.parametrize("workers", some("12", "1"))
def test_a_killed_import_and_export_go_on_to_the_same_bytes(tmp_path: Path, workers: str) -> None:
    """Two workers are the campaign's: in the suite tests/tools/test_reshard.py kills those."""
    write_folder(tmp_path / "hf", WIDE, dtype=torch.float32)
    imported = [str(tmp_path / "hf"), str(tmp_path / "checkpoint"), "--max_file_size", "300KB", "--workers", workers]
    unfinished = tmp_path / "checkpoint.tmp-convert"
    assert 3 <= killed(["import", "--no_logits", *imported], unfinished, ".pieces.json") < 100
    kept = {path.name: path.stat().st_mtime_ns for path in unfinished.glob("*.pieces.json")}
    assert main(["import", "--no_logits", *imported, "--verify"]) == 0
    assert not unfinished.exists()
    assert damages(tmp_path / "checkpoint", "hashes", (0, 1)) == []
    for name, changed in kept.items():  # what was done was not done again
        path = tmp_path / "checkpoint" / name.replace(".pieces.json", ".bin")
        assert path.stat().st_mtime_ns <= changed
    assert main(["import", "--no_logits", imported[0], str(tmp_path / "other"), *imported[2:4], "--workers", "1"]) == 0
    assert hashes(tmp_path / "checkpoint") == hashes(tmp_path / "other")

    exported = [
        str(tmp_path / "checkpoint"),
        str(tmp_path / "again"),
        "--max_shard_size",
        "300KB",
        "--workers",
        workers,
    ]
    assert 3 <= killed(["export", *exported], tmp_path / "again.tmp-convert", ".safetensors") < 100
    assert main(["export", *exported, "--verify"]) == 0
    assert main(["export", exported[0], str(tmp_path / "once"), *exported[2:4], "--workers", "1"]) == 0
    assert hashes(tmp_path / "again") == hashes(tmp_path / "once")


def test_other_flags_start_over(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    target, unfinished = tmp_path / "checkpoint", tmp_path / "checkpoint.tmp-convert"
    unfinished.mkdir()
    (unfinished / "part_00000.pieces.json").write_text("left by another job")
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(target), "--dtype", "float32", "--verify"]) == 0
    with FileReader(target) as reader:
        assert {info.dtype for info in reader.tensors.values()} == {"float32"}


def test_a_changed_byte_is_found_by_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.convert.verify import verify

    write_folder(tmp_path / "hf", TINY["qwen2_tiny"])
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    path = tmp_path / "hf" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"differ in model\."):
        verify(tmp_path / "hf", tmp_path / "checkpoint", "checkpoint")


def test_tokenizers_go_along_and_back(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY["llama2_tiny"], vocab_size=512)
    write_folder(tmp_path / "hf", shape, config={"bos_token_id": 7, "auto_map": {"AutoModel": "x.py"}})
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    builtin_model(512, tmp_path / "cache", lambda _: None).rename(tmp_path / "hf" / "tokenizer.model")
    (tmp_path / "hf" / "modeling_own.py").write_text("raise SystemExit")
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    assert 'tokenizer = "tokenizer.model"' in (tmp_path / "checkpoint" / "config.toml").read_text()
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 0
    assert {"tokenizer.json", "tokenizer.model"} <= {path.name for path in (tmp_path / "again").iterdir()}
    assert not list(tmp_path.glob("[ac]*/*.py"))
    with HfFolder(tmp_path / "again") as source:
        assert source.config["bos_token_id"] == 7
        assert "auto_map" not in source.config


def test_the_hubs_gpt2_has_shorter_names_and_masks(tmp_path: Path) -> None:
    shape = TINY["gpt2_tiny"]
    tensors = write_folder(tmp_path / "full", shape)
    (tmp_path / "hf").mkdir()
    (tmp_path / "full" / "config.json").rename(tmp_path / "hf" / "config.json")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(short | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "hf" / "model.safetensors")
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint"), "--verify"]) == 0
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 0
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8, the inverse scales of 128 x 128 blocks, and what torch makes of both: bfloat16."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3)) + 0.5
    quantised = weight.float().to(torch.float8_e4m3fn)
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return quantised, scales, (quantised.float() * whole).to(torch.bfloat16)


def test_deepseek_v3_as_on_the_hub(tmp_path: Path) -> None:
    """fp8 with scales, and the block after the last, which repeats the embedding and the output layer."""
    shape = dataclasses.replace(TINY["deepseek_v3_tiny"], ffn_hidden_size=176, hidden_size=192)
    tensors = write_folder(tmp_path / "plain", shape)
    expected, stored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "proj.weight" in name and "eh_proj" not in name:
            stored[name], stored[f"{name}_scale_inv"], expected[name] = fp8_blocks(weight)
        if "e_score_correction_bias" in name:
            stored[name] = expected[name] = weight.float() + 1e-4
    for name, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        copy = f"model.layers.4.{name}.weight"
        stored[copy] = expected[copy] = tensors[f"{original}.weight"].clone()
    (tmp_path / "plain" / "model.safetensors").unlink()
    save_file(stored, tmp_path / "plain" / "model.safetensors")
    config = tmp_path / "plain" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": FP8}))
    assert main(["import", "--no_logits", str(tmp_path / "plain"), str(tmp_path / "checkpoint"), "--verify"]) == 0
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again"), "--dtype", "bfloat16"]) == 0
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(file.get_tensor(name), tensor), name


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_is_refused(copy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {f"model.layers.4.{copy}.weight": torch.zeros(257, 64, dtype=torch.bfloat16)}
    write_folder(tmp_path / "hf", TINY["deepseek_v3_tiny"], tensors=other)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    assert f"model.layers.4.{copy}.weight differs from" in capsys.readouterr().err


def as_masters(source: Path, target: Path) -> None:
    """A copy of a checkpoint that computes in bf16, whose weights are the optimizer's, with its moments in a group."""
    target.mkdir()
    with FileReader(source) as reader, FileWriter(target, "rank_00000") as file:
        for key, info in reader.tensors.items():
            keys = tuple(f"optimizer.state.{state}.{key}" for state in ("param", "exp_avg", "exp_avg_sq"))
            words = memoryview(reader.whole(key).reshape(-1).view(np.uint8))
            moment = memoryview(bytes(words.nbytes))
            file.add(
                TensorGroup(keys, info.dtype, info.shape), (0,) * len(info.shape), info.shape, [words, moment, moment]
            )
    facts = merge(target, ["rank_00000"])
    remove_tables(target, ["rank_00000"])
    (target / "state.json").write_bytes((source / "state.json").read_bytes())
    text = (source / "config.toml").read_text()
    (target / "config.toml").write_text(text.replace('dtype = "fp32"', 'dtype = "bf16"'))
    write_manifest(target, facts, {})


def test_weights_come_from_the_optimizer_where_there_are_no_others(tmp_path: Path) -> None:
    """As in a run's checkpoint: fp32 under optimizer.state.param, rounded on export to what the model computes in."""
    write_folder(tmp_path / "hf", TINY["llama2_tiny"], dtype=torch.float32)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    as_masters(tmp_path / "checkpoint", tmp_path / "run")
    path = tmp_path / "run" / "rank_00000.bin"
    with FileReader(tmp_path / "run") as reader:
        (piece,) = reader.pieces("optimizer.state.exp_avg.embedding.word_embeddings.weight")
        size = reader.whole("optimizer.state.exp_avg.embedding.word_embeddings.weight").nbytes
    data = bytearray(path.read_bytes())
    data[piece.position + size] ^= 1  # of a moment, which is not read here
    path.write_bytes(data)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--verify"]) == 0
    with HfFolder(tmp_path / "hf") as one, HfFolder(tmp_path / "again") as other:
        for name, place in one.places.items():
            assert other.places[name].dtype == "bfloat16"
            rows = [side.rows(name, 0, place.shape[0], "bfloat16") for side in (one, other)]
            assert np.array_equal(rows[0], rows[1]), name
