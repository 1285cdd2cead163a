"""--bundle: what a bug report needs is there, and no secret is, wherever in a run's folder one lies."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.tools.page_checks import check_page
from tests.tools.report_folder import write_run
from tools.report.__main__ import main
from tools.report.bundle import HEAD_BYTES, TAIL_BYTES
from tools.report.secrets_in_text import scrubbed

CANARY = "c4n4ry-9f8e7d6c5b4a"
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"
NAMED = "n4med-5b6c7d8e"
"""Of a service that the environment knows nothing of."""
HF_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz"
AWS_SECRET = "aws+S3cret/0123456789abcdefghijklmnopqrs"
AWS_IDS = ("AKIA" + "IOSFODNN7EXAMPLE", "ASIA" + "IOSFODNN7EXAMPLE")
SIGNED = "5d672d79c15b13162d9279b0855cfba6"
BUCKETS = (AWS_SECRET, *AWS_IDS, SIGNED)
"""What a client of object storage may leave in a log."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in whose folder secrets lie in every way that they could come there."""
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("NCCL_SECRET", CANARY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    folder = tmp_path / "run"
    write_run(folder, f" {CANARY}")
    with (folder / "config.toml").open("a") as file:
        file.write(f'[data]\nhub_token = "{CANARY}-of-the-recipe"\n')
    (folder / "logs").mkdir()
    log = f"env: WANDB_API_KEY={WANDB_KEY}\nGET https://me:{CANARY}-url@host/x\nAuthorization: Bearer {CANARY}-bearer\n"
    log += f'api_key="{NAMED}"\nHUB_PASSWORD: {NAMED}\nusing {HF_TOKEN}\nloaded 5 shards, eod_token: 50256\n'
    log += f"403 of {AWS_IDS[0]}: secret was {AWS_SECRET}; as {AWS_IDS[1]}: GET https://host/k?X-Amz-Signature={SIGNED}&a=1\n"
    log += f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}-pem\n-----END RSA PRIVATE KEY-----\n"
    (folder / "logs/node-a.log").write_text(log + "x" * (HEAD_BYTES + TAIL_BYTES) + "\nthe end\n")
    (folder / "logs/rank-00003.failed.log").write_text(f"RuntimeError: {WANDB_KEY}\n")
    (folder / "watch/start-1").mkdir(parents=True)
    (folder / "watch/start-1/verdict.json").write_text(json.dumps({"line": "rank 1 hangs", "api_key": CANARY}))
    (folder / "watch/start-1/stacks-a.txt").write_text("File train.py, line 3\n")
    (folder / "checkpoints/iter_0000100").mkdir(parents=True)
    (folder / "checkpoints/iter_0000100/rank_00000.bin").write_bytes(b"tensors")
    (tmp_path / "elsewhere").write_text(f"{CANARY} of another file")
    (folder / "logs/link.log").symlink_to(tmp_path / "elsewhere")
    return folder


def contents(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        found = {entry.name: tar.extractfile(entry) for entry in tar.getmembers()}
        return {name.partition("/")[2]: file.read().decode() for name, file in found.items() if file is not None}


def test_the_archive_has_what_helps_and_no_secret(run: Path, tmp_path: Path) -> None:
    archive = tmp_path / "bug.tar.gz"
    assert main([str(run), "--bundle", str(archive)]) == 0
    found = contents(archive)
    assert {
        "about.txt", "checkpoints.txt", "config.toml", "evaluations.jsonl", "history.jsonl", "logs/node-a.log",
        "logs/rank-00003.failed.log", "machine.txt", "metrics.jsonl", "profile/timeline.jsonl", "report.html",
        "versions.txt", "watch/start-1/stacks-a.txt", "watch/start-1/verdict.json",
    } <= found.keys()  # fmt: skip
    assert not any("link.log" in name for name in found)
    for name, text in found.items():
        assert CANARY not in text and WANDB_KEY not in text and HF_TOKEN not in text and NAMED not in text, name
        assert not [secret for secret in BUCKETS if secret in text], name
    assert "rank 1 hangs" in found["watch/start-1/verdict.json"] and "torch 2" in found["versions.txt"]
    assert "7  " in found["checkpoints.txt"] and "rank_00000.bin" in found["checkpoints.txt"]
    assert "NCCL_DEBUG=WARN" in found["machine.txt"] and "NCCL_SECRET" not in found["machine.txt"]
    assert "loaded 5 shards, eod_token: 50256" in found["logs/node-a.log"]
    assert found["logs/node-a.log"].endswith("the end\n") and "bytes are left out" in found["logs/node-a.log"]
    assert len(found["logs/node-a.log"]) < HEAD_BYTES + TAIL_BYTES + 1000
    assert 'shape = "mixtral_8x7b' in found["config.toml"]
    check_page(found["report.html"])
    for line in found["metrics.jsonl"].splitlines():
        assert json.loads(line)["iteration"]
    assert archive.stat().st_mode & 0o077 == 0


def test_a_bundle_without_a_name_lies_beside_the_folder(run: Path) -> None:
    assert main([str(run), "--bundle"]) == 0
    found = contents(run.with_name("run-bundle.tar.gz"))
    assert "def read(self, path)" in found["samples.jsonl"] and "hellaswag" in found["evaluations.jsonl"]


def test_what_is_no_secret_stays() -> None:
    text = "tokens/wiki: 12345678, tokenizer = byte, moe_token_dispatcher_type: alltoall, key 3, monkey: bananas1"
    assert scrubbed(text, {"HOME_TOKEN": "ab"}) == text
    assert scrubbed('{"consumed_tokens": 123456789, "last_token": 123456}', {}).count("[redacted]") == 0
