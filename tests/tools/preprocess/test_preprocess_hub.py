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

from campaign import param
from data.shards import Shard, bin_path
from hub import Hub, served

ROOT = Path(__file__).parents[3]
OLD, NEW = [f"old text {number}" for number in range(400)], ["new text"]


def table(texts):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


SERVER = """
import json, sys
from pathlib import Path
import datasets
import tools.preprocess.__main__
from programs import Program
for line in sys.stdin:
    arguments, output, module, folder = json.loads(line)
    program = Program(arguments, Path(output), module=module, folder=Path(folder))
    program.communicate(timeout=230)
    print(program.returncode, flush=True)
"""
"""Runs programs with the Hub that its variables name: the Hub's client reads them when it is imported, once for all."""


@pytest.fixture(scope="module")
def served_hub(tmp_path_factory):
    """A Hub, and a process that runs programs with it."""
    hub = Hub()
    with served(hub) as address:
        own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", SERVER]
        path = f"{ROOT}:{ROOT}/tests/support"
        with subprocess.Popen(command, env=os.environ | own | {"PYTHONPATH": path}, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as server:  # fmt: skip
            yield hub, server
            server.stdin.close()


@pytest.fixture
def run(served_hub, tmp_path, request):
    """Runs one of our programs whose Hub has OLD in the two files of a dataset, its argument `name`."""
    hub, server = served_hub
    card = b"---\nlicense: mit\n---\n"
    files = {f"data/train-0000{number}-of-00002.parquet": table(OLD[number * 200 :][:200]) for number in range(2)}
    name = f"owner/{request.node.originalname}"[:60]

    def program(what, *arguments, folder=ROOT):
        module = "" if what == "pretrain_gpt.py" else what
        words = json.dumps([[str(one) for one in arguments], str(tmp_path / "said"), module, str(folder)])
        server.stdin.write(f"{words}\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        said = ((tmp_path / "said").with_suffix(end).read_text() for end in (".out", ".err"))
        return subprocess.CompletedProcess(arguments, code, *said)

    def publish():
        return hub.commit(name, {"README.md": card, "data/train-00000-of-00001.parquet": table(NEW)})

    program.old = hub.commit(name, {"README.md": card, **files})
    program.publish, program.hub, program.name = publish, hub, name
    return program


def texts(prefix):
    """Of all shards of a prefix, in their order."""
    ids = np.concatenate([Shard(path.with_suffix("")).tokens for path in sorted(prefix.parent.glob("x-*.idx"))])
    return bytes(np.where(ids == 256, 10, ids).astype(np.uint8)).decode().splitlines()


def test_preprocessing_reads_the_commit_that_it_began_with(run, tmp_path):
    def preprocess(name):
        return run("tools.preprocess", name, "--output", tmp_path / "x", "--tokenizer", "byte", "--workers", 1)

    done = preprocess(f"hf://{run.name}")
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "x") == OLD
    assert f"{run.name}: how many rows that holds is not known before it is read" in done.stderr
    opened = [line for line in run.hub.asked if line.startswith("HEAD") and line.endswith("dataset_infos.json")
              and run.name in line]  # fmt: skip
    assert len(opened) == 2, "by the parent, and by its one worker for both files"
    plan = json.loads((tmp_path / "x.preprocess/plan.json").read_text())
    assert run.old in str(plan["inputs"])
    new = run.publish()
    other = preprocess(f"hf://{run.name}")
    assert other.returncode == 2
    assert run.old in other.stderr and new in other.stderr and "Traceback" not in other.stderr
    lost = sorted(tmp_path.glob("x-*"))
    for path in lost[: len(lost) // 2]:
        path.unlink()  # as if it had been killed before these
    assert not bin_path(tmp_path / "x-00000-of-00002").exists()
    again = preprocess(f"hf://{run.name}#{run.old}")
    assert again.returncode == 0, again.stderr
    assert texts(tmp_path / "x") == OLD
    missing = run("tools.preprocess", "hf://owner/none", "--output", tmp_path / "y", "--tokenizer", "byte")
    assert missing.returncode == 2
    assert "INPUT: dataset owner/none cannot be opened: RepositoryNotFoundError" in missing.stderr


PLAIN = ("--log.tensorboard", "False", "--log.report", "False", "--train.eval_interval", "None")


@pytest.mark.campaign
def test_training_goes_on_in_the_commit_that_it_began_with(run, tmp_path):
    def train(name, iters):
        return run(
            "pretrain_gpt.py", "slurm/recipes/debug.toml", "--data.stream", name, "--data.split", "1,0,0",
            "--train.train_iters", iters, "--run_dir", tmp_path / "run", "--data.tokenizer", "byte",
            "--data.stream_count", 8, "--train.generate_tokens", 0, "--train.global_batch_size", 1, *PLAIN,
        )  # fmt: skip

    first = train(f"hf://{run.name}", 1)
    assert first.returncode == 0, first.stderr
    name = f"hf://{run.name}"
    assert f"data: {name} is at revision {run.old}; {name}#{run.old} keeps to it" in first.stdout
    new = run.publish()
    other = train(f"hf://{run.name}", 2)
    assert other.returncode == 2
    change = f"shards of source {name}: {run.name}, revision {new} (was: {run.name}, revision {run.old})"
    assert change in other.stderr
    assert train(f"hf://{run.name}#{run.old}", 2).returncode == 0


GOOD = b'{"text": "gut"}\n'


def damaged(texts):
    """A table whose second half cannot be read."""
    raw = bytearray(table(texts))
    raw[len(raw) // 2 : len(raw) // 2 + 400] = bytes(400)
    return bytes(raw)


BAD = {"b.jsonl": GOOD * 9 + b'{"text": "x\n' + GOOD, "b.parquet": damaged([os.urandom(40).hex() for _ in range(9000)])}


PREPROCESS = ("tools.preprocess", "hf://owner/bad", "--output", "x", "--tokenizer", "byte")
TRAIN = (
    "pretrain_gpt.py", "slurm/recipes/debug.toml", "--data.stream", "hf://owner/bad", "--data.split", "1,0,0",
    "--train.train_iters", "1", "--run_dir", "run", "--data.tokenizer", "byte", "--data.stream_count", "8",
    "--train.generate_tokens", "0",
)  # fmt: skip


@pytest.mark.parametrize(
    "file, row, why, commands",
    [
        ("b.jsonl", 0, "ArrowInvalid: JSON", (PREPROCESS,)),
        param(("b.jsonl", 0, "ArrowInvalid: JSON", (TRAIN,))),
        ("b.parquet", None, "Error: ", ((*PREPROCESS, "--on_bad_document", "skip"),)),
    ],
    ids=["jsonl", "jsonl-train", "parquet"],
)
def test_a_row_that_cannot_be_read_is_named_by_its_step(run, tmp_path, file, row, why, commands):
    good = GOOD * 300 if file.endswith("l") else table(["gut"] * 300)
    bad = f"owner/bad-{file.rpartition('.')[2]}"
    run.hub.commit(bad, {"README.md": b"", file.replace("b", "a", 1): good, file: BAD[file]})
    for command in commands:
        ended = run(*(tmp_path / word if word in ("x", "run") else word.replace("owner/bad", bad) for word in command))
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr and "worker of unit" not in ended.stderr
        assert f"dataset {bad}: step 1, row {row if row is not None else ''}" in ended.stderr
        assert "or soon after cannot be read: " in ended.stderr and why in ended.stderr


@pytest.mark.campaign
def test_rows_are_as_many_as_the_card_says(run, tmp_path):
    card = "---\ndataset_info:\n  splits:\n  - name: train\n    num_bytes: 9\n    num_examples: 400\n---\n"
    run.hub.commit("owner/card", {"README.md": card.encode(), "a.jsonl": GOOD * 300, "b.jsonl": GOOD * 100})
    program = (
        "from data.raw import inputs, units; from tools.preprocess import estimate\n"
        "sources = inputs.find(('hf://owner/card', 'hf://NAME'))\n"
        "print(*map(estimate.extent, ([one] for one in units.divide(sources, 1000))), sep='\\n')"
    )
    (tmp_path / "rows.py").write_text(program.replace("NAME", run.name))
    found = run("rows", folder=tmp_path)
    known, unknown = "Extent(file_bytes=0, rows=200.0, unknown=())", f"rows=0, unknown=('{run.name}',)"
    lines = found.stdout.splitlines()
    assert lines[:2] == [known] * 2 and len(lines) == 4 and all(unknown in line for line in lines[2:]), found
