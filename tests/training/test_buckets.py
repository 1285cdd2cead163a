"""Text in a bucket becomes shards in a bucket, and a model is trained on them: with the losses of a disk."""

import json
import random
from pathlib import Path

import pytest

import buckets
from buckets import BUCKET, Server
from program.buckets import client, transfer
from runs import configuration, losses, train
from tools.preprocess.__main__ import main as preprocess
from training.start.prepare import prepare

URL = f"s3://{BUCKET}/training"


def test_from_text_to_losses(s3: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """python -m tools.preprocess, its verify, and a run that is stopped and goes on."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(["alpha", "beta", "gamma"], k=draw.randrange(5, 300))) for _ in range(400))
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    with buckets.environment(s3):
        client.write(f"{URL}/raw/a.jsonl", data.encode())
        work = ("--tokenizer", "byte", "--unit_mb", "0.1", "--workers", "1")
        there, here = f"{URL}/corpus/web", str(tmp_path / "web")
        assert preprocess([f"{URL}/raw", "--output", there, "--work_dir", str(tmp_path / "work"), *work]) == 0
        assert preprocess(["verify", there]) == 0
        for one in client.listed(there):  # which are those of a disk: tests/tools/preprocess/test_to_bucket.py
            transfer.download(one, tmp_path / Path(one.url).name)
        found = {}
        for name, path, stops in (("there", there, True), ("here", here, False)):
            flags = (
                "--data.paths", path, "--data.tokenizer", "byte", "--data.cache_dir", str(tmp_path / "cache"),
                "--train.train_iters", "4", "--log.report", "False",
                *(("--checkpoint.bucket", f"{URL}/run") if stops else ()),
            )  # fmt: skip
            run = tmp_path / name
            if stops:
                config = configuration(run, *flags, "--train.exit_interval", "2")
                train(prepare(config, None), config, 1)
            config = configuration(run, *flags)
            found[name] = losses(train(prepare(config, None), config, 1))
    assert len(found["there"]) == 4 and found["there"] == found["here"]
    written = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert not [path for path in written if buckets.SECRET.encode() in path.read_bytes()]
    assert buckets.SECRET not in "".join(capfd.readouterr())
