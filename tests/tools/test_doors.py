"""From what users have to two steps of training, and back: a pile of text, and a Hugging Face folder."""

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from models.shapes import GPTShape
from parallel.launch import Identity
from programs import Program
from ranks import run_ranks
from runs import DEBUG, ROOT
from tests.tools.hf_folders import write_folder
from tests.tools.test_convert_training import SHAPE
from tools.convert.__main__ import main as convert
from tools.preprocess.__main__ import main as preprocess

TEXTS = [f'document {number}, of "words"\nand lines' for number in range(60)]
STEPS = (
    "--train.train_iters", "2", "--train.global_batch_size", "2", "--train.micro_batch_size", "2", "--nproc", "1",
    "--device", "cpu", "--log.log_interval", "1", "--data.split", "1",
)  # fmt: skip


def trained(run_dir: Path, recipe: Path | str, *flags: str) -> str:
    """Two steps: what was printed."""
    program = Program(
        [str(recipe), *STEPS, "--run_dir", str(run_dir), *flags], run_dir.with_name(f"{run_dir.name}.log")
    )
    printed, said = program.communicate()
    assert program.returncode == 0, said
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [1, 2]
    assert (run_dir / "done").read_text() == "2\n"
    return printed


def write_texts(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """The same documents as files of each kind, and the flags that name where the documents are in them."""
    import pyarrow
    import pyarrow.parquet

    paths = {"jsonl": folder / "a.jsonl.zst", "parquet": folder / "a.parquet", "csv": folder / "a.csv.gz"}
    rows = [{"id": number, "doc": {"text": text}} for number, text in enumerate(TEXTS)]
    import zstandard

    paths["jsonl"].write_bytes(zstandard.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths["parquet"])
    with gzip.open(paths["csv"], "wt", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *enumerate(TEXTS)])
    keys = {"jsonl": ["jsonl_key", "doc.text"], "parquet": ["jsonl_key", "doc.text"], "csv": ["csv_column", "body"]}
    return {kind: (path, keys[kind]) for kind, path in paths.items()}


COMMON = ("--data.tokenizer", "byte", "--model.seq_length", "32")


def test_text_becomes_tokens_and_two_steps(tmp_path: Path) -> None:
    files, shards = write_texts(tmp_path), {}
    for kind, (path, (flag, name)) in files.items():
        output = str(tmp_path / "shards" / kind)
        assert preprocess([str(path), "--output", output, "--tokenizer", "byte", f"--{flag}", name]) == 0
        shards[kind] = [Path(f"{output}-00000-of-00001{half}").read_bytes() for half in (".bin", ".idx")]
    assert shards["jsonl"] == shards["parquet"] == shards["csv"]
    data = ("--data.cache_dir", str(tmp_path / "cache"), "--data.paths", str(tmp_path / "shards/csv"))
    trained(tmp_path / "run", DEBUG, *COMMON, *data)


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "field"), [("parquet", "paths"), ("csv", "stream")])
def test_text_itself_becomes_two_steps(kind: str, field: str, tmp_path: Path) -> None:
    """In the suite: tests/data reads such files, tests/training/test_streaming.py trains on them."""
    path, (flag, name) = write_texts(tmp_path)[kind]
    data = ("--data.cache_dir", str(tmp_path / "cache"), f"--data.{field}", str(path), f"--data.{flag}", name)
    trained(tmp_path / "run", DEBUG, *COMMON, *data, "--data.stream_count", "2")


def write_pair(folder: Path, shape: GPTShape) -> None:
    """A tokenizer as GPT-2's, in as many ids as the model has; and its chat template, which no one reads here."""
    from tokenizers import ByteLevelBPETokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        TEXTS, vocab_size=shape.vocab_size, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": "{{ x }}"})
    )


def generated(folder: Path) -> dict[str, Any]:
    """What transformers continues a text with, with an exported model and its tokenizer."""

    def generate(_: Identity) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        ids = tokenizer("a b", return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=200, do_sample=True)[0, ids["input_ids"].shape[1] :].tolist()
        found = {"new": new, "eos": tokenizer.eos_token_id, "text": tokenizer.decode(new)}
        folder.with_suffix(".json").write_text(json.dumps(found))

    run_ranks(1, generate)
    found: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text())
    return found


def changed_line(printed: str) -> str:
    [line] = [line for line in printed.splitlines() if line.startswith("  changed ")]
    return line


@pytest.mark.campaign
def test_a_hugging_face_folder_trains_two_steps_and_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DIR", raising=False)
    folder = tmp_path / "models--owner--Tiny-1M" / "snapshots" / "0123abcd"
    write_folder(folder, SHAPE, config={"bos_token_id": 0, "eos_token_id": 0})
    write_pair(folder, SHAPE)
    imported, run_dir, exported = tmp_path / "imported", tmp_path / "run", tmp_path / "exported"
    assert convert(["import", "--no-logits", str(folder), str(imported)]) == 0
    command = "python pretrain_gpt.py CHECKPOINT/config.toml --data.paths YOUR_DATA --run_dir runs/YOUR_NAME"
    assert command in (imported / "config.toml").read_text()
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a b", "b"] * 200))
    printed = trained(
        run_dir, imported / "config.toml", "--checkpoint.load", str(imported), "--data.paths",
        str(tmp_path / "short.jsonl"), "--data.cache_dir", str(tmp_path / "cache"), "--model.seq_length", "64",
        "--optimizer.lr", "0.02", "--log.wandb", "offline",
    )  # fmt: skip
    assert "model owner/Tiny-1M: " in printed
    assert "model.seq_length" in changed_line(printed) and len(changed_line(printed)) <= 120
    run_id = (run_dir / "wandb_id").read_text().strip()
    assert list((run_dir / "wandb").glob(f"offline-run-*{run_id}")) and not list(ROOT.glob(f"wandb/*{run_id}"))
    assert "Model owner/Tiny-1M." in (run_dir / "report.html").read_text()
    _described(run_dir, imported, capsys)
    assert convert(["export", str(run_dir), str(exported), "--verify"]) == 0
    assert f"the newest checkpoint is {run_dir}/checkpoints/iter_0000002." in capsys.readouterr().out
    found = generated(exported)
    assert found["new"][-1] == found["eos"] == 0 and len(found["new"]) < 200, found
    assert convert(["export", str(tmp_path), str(tmp_path / "none")]) == 2
    assert f"CHECKPOINT {tmp_path}: expected a checkpoint (iter_..., with manifest.json)" in capsys.readouterr().err


def _described(run_dir: Path, imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.inspect_checkpoint.__main__ import main as inspect

    for path in (run_dir, imported):
        assert inspect([str(path)]) == 0
        assert "  model      owner/Tiny-1M\n" in capsys.readouterr().out
