"""Datasets of the Hugging Face Hub, read by its own clients from a server on the loopback: one commit, and no other."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data.shards import Shard, bin_path
from hub import Hub, served

ROOT = Path(__file__).parents[3]
OLD, NEW = [f"old text {number}" for number in range(400)], ["new text"]


def table(texts):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


@pytest.fixture
def run(tmp_path):
    """Runs one of our programs whose Hub has OLD in two files; its argument `hub` is that Hub."""
    hub = Hub()
    card = b"---\nlicense: mit\n---\n"
    files = {f"data/train-0000{number}-of-00002.parquet": table(OLD[number * 200 :][:200]) for number in range(2)}
    run.old = hub.commit("owner/set", {"README.md": card, **files})

    def publish():
        return hub.commit("owner/set", {"README.md": card, "data/train-00000-of-00001.parquet": table(NEW)})

    with served(hub) as address:
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}

        def program(*arguments):
            command = [sys.executable, *map(str, arguments)]
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

        program.old, program.publish, program.hub = run.old, publish, hub
        yield program


def texts(prefix):
    """Of all shards of a prefix, in their order."""
    ids = np.concatenate([Shard(path.with_suffix("")).tokens for path in sorted(prefix.parent.glob("x-*.idx"))])
    return bytes(np.where(ids == 256, 10, ids).astype(np.uint8)).decode().splitlines()


def test_preprocessing_reads_the_commit_that_it_began_with(run, tmp_path):
    def preprocess(name):
        return run("-m", "tools.preprocess", name, "--output", tmp_path / "x", "--tokenizer", "byte", "--workers", 1)

    done = preprocess("hf://owner/set")
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "x") == OLD
    assert "owner/set: how many rows that holds is not known before it is read" in done.stderr
    opened = [line for line in run.hub.asked if line.startswith("HEAD") and line.endswith("dataset_infos.json")]
    assert len(opened) == 2, "by the parent, and by its one worker for both files"
    plan = json.loads((tmp_path / "x.preprocess/plan.json").read_text())
    assert run.old in str(plan["inputs"])
    new = run.publish()
    other = preprocess("hf://owner/set")
    assert other.returncode == 2
    assert run.old in other.stderr and new in other.stderr and "Traceback" not in other.stderr
    lost = sorted(tmp_path.glob("x-*"))
    for path in lost[: len(lost) // 2]:
        path.unlink()  # as if it had been killed before these
    assert not bin_path(tmp_path / "x-00000-of-00002").exists()
    again = preprocess(f"hf://owner/set#{run.old}")
    assert again.returncode == 0, again.stderr
    assert texts(tmp_path / "x") == OLD
    missing = run("-m", "tools.preprocess", "hf://owner/none", "--output", tmp_path / "y", "--tokenizer", "byte")
    assert missing.returncode == 2
    assert "INPUT: dataset owner/none cannot be opened: RepositoryNotFoundError" in missing.stderr


def test_training_goes_on_in_the_commit_that_it_began_with(run, tmp_path):
    def train(name, iters):
        return run(
            "pretrain_gpt.py", "slurm/recipes/debug.toml", "--data.stream", name, "--data.split", "1,0,0",
            "--train.train_iters", iters, "--run_dir", tmp_path / "run", "--data.tokenizer", "byte",
            "--data.stream_count", 8, "--train.generate_tokens", 0,
        )  # fmt: skip

    first = train("hf://owner/set", 1)
    assert first.returncode == 0, first.stderr
    assert f"data: hf://owner/set is at revision {run.old}; hf://owner/set#{run.old} keeps to it" in first.stdout
    new = run.publish()
    other = train("hf://owner/set", 2)
    assert other.returncode == 2
    change = f"shards of source hf://owner/set: owner/set, revision {new} (was: owner/set, revision {run.old})"
    assert change in other.stderr
    assert train(f"hf://owner/set#{run.old}", 2).returncode == 0


GOOD = b'{"text": "gut"}\n'


def damaged(texts):
    """A table whose second half cannot be read."""
    raw = bytearray(table(texts))
    raw[len(raw) // 2 : len(raw) // 2 + 400] = bytes(400)
    return bytes(raw)


BAD = {"b.jsonl": GOOD * 9 + b'{"text": "x\n' + GOOD, "b.parquet": damaged([os.urandom(40).hex() for _ in range(9000)])}


PREPROCESS = ("-m", "tools.preprocess", "hf://owner/bad", "--output", "x", "--tokenizer", "byte")
TRAIN = (
    "pretrain_gpt.py", "slurm/recipes/debug.toml", "--data.stream", "hf://owner/bad", "--data.split", "1,0,0",
    "--train.train_iters", "1", "--run_dir", "run", "--data.tokenizer", "byte", "--data.stream_count", "8",
    "--train.generate_tokens", "0",
)  # fmt: skip


@pytest.mark.parametrize(
    "file, row, why, commands",
    [
        ("b.jsonl", 0, "ArrowInvalid: JSON", (PREPROCESS, TRAIN)),
        ("b.parquet", None, "Error: ", ((*PREPROCESS, "--on_bad_document", "skip"),)),
    ],
    ids=["jsonl", "parquet"],
)
def test_a_row_that_cannot_be_read_is_named_by_its_step(run, tmp_path, file, row, why, commands):
    good = GOOD * 300 if file.endswith("l") else table(["gut"] * 300)
    run.hub.commit("owner/bad", {"README.md": b"", file.replace("b", "a", 1): good, file: BAD[file]})
    for command in commands:
        ended = run(*(tmp_path / word if word in ("x", "run") else word for word in command))
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr and "worker of unit" not in ended.stderr
        assert f"dataset owner/bad: step 1, row {row if row is not None else ''}" in ended.stderr
        assert "or soon after cannot be read: " in ended.stderr and why in ended.stderr


def test_rows_are_as_many_as_the_card_says(run):
    card = "---\ndataset_info:\n  splits:\n  - name: train\n    num_bytes: 9\n    num_examples: 400\n---\n"
    run.hub.commit("owner/card", {"README.md": card.encode(), "a.jsonl": GOOD * 300, "b.jsonl": GOOD * 100})
    program = (
        "from data.raw import inputs, units; from tools.preprocess import estimate\n"
        "sources = inputs.find(('hf://owner/card', 'hf://owner/set'))\n"
        "print(*map(estimate.extent, ([one] for one in units.divide(sources, 1000))), sep='\\n')"
    )
    found = run("-c", program)
    known, unknown = "Extent(file_bytes=0, rows=200.0, unknown=())", "rows=0, unknown=('owner/set',)"
    lines = found.stdout.splitlines()
    assert lines[:2] == [known] * 2 and len(lines) == 4 and all(unknown in line for line in lines[2:]), found
