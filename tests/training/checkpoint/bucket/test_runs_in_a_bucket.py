"""Whole runs whose checkpoints are in a bucket: uploaded while training goes on, continued from there alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import buckets
from buckets import BUCKET, Server
from data.prepared import Prepared
from parallel.layout import Layout
from program.buckets import client
from program.errors import UserError
from runs import configuration, losses, train, train_or_fail
from small_checkpoints import committed
from training.checkpoint.bucket import stored, uploading
from training.checkpoint.bucket.callback import Uploader
from training.checkpoint.bucket.uploading import UploadOrder
from training.checkpoint.format.verify import damages
from training.checkpoint.stage_entry import position
from training.checkpoint.start import first_of_all, has_own
from training.checkpoint.state import State, encoded
from training.config.checkpoint_config import CheckpointConfig
from training.config.recipe import load
from training.progress import Progress
from training.run_dir.history import read_history
from training.start.prepare import prepare

URL = f"s3://{BUCKET}/run"
SAVES = ("--checkpoint.save_interval", "2", "--train.train_iters", "6", "--log.report", "False")


def in_bucket(url: str, folder: Path) -> dict[str, Path]:
    """Every complete checkpoint of a bucket, downloaded; each must be whole, byte by byte."""
    found = {}
    for one in stored.stored(stored.root_of(url)):
        if one.is_complete:
            target = folder / one.name.partition("-")[0]
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            stored.fetched(one, target, one.files)
            assert damages(target, "hashes") == []
            found[target.name] = target
    return found


@pytest.fixture(scope="module")
def run(prepared: Prepared, s3: Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of 6 iterations on 2 ranks, which wait for the bucket. Their folder is lost."""
    folder = tmp_path_factory.mktemp("lost")
    there = ("--checkpoint.bucket", URL, "--checkpoint.bucket_keep", "2")
    with buckets.environment(s3):
        metrics = train(prepared, configuration(folder, *SAVES, *there), 2)
    uploaded = [event for event in read_history(folder) if event.event == "uploaded"]
    assert [event.iteration for event in uploaded] == [2, 4, 6] and uploaded[0].number("bytes") > 10_000
    shutil.rmtree(folder)
    return metrics


def test_a_run_goes_on_from_its_bucket_alone(
    prepared: Prepared, run: list[dict[str, Any]], s3: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While training goes on; from the one before the newest, which is damaged there."""
    assert len([line for line in run if line.get("bucket_sent_gib", 0) > 0]) >= 2
    assert all(line["bucket_age_s"] >= 0 for line in run[1:] if "loss" in line)
    there = ("--checkpoint.bucket", URL, "--checkpoint.bucket_keep", "2", "--checkpoint.async_save", "True")
    with buckets.environment(s3):
        seen = in_bucket(URL, tmp_path / "seen")
        assert list(seen) == ["iter_0000004", "iter_0000006"]
        assert load(seen["iter_0000006"] / "config.toml").checkpoint.bucket is None, "it is this run's alone"
        newest = stored.newer(None, URL)[0]
        assert client.read(f"{URL}/checkpoints/latest", 99).decode().strip() == newest.name
        facts = newest.files["rank_00000.bin"]
        client.write(facts.url, bytes(facts.size))
        assert losses(train(prepared, configuration(tmp_path / "run", *SAVES, *there), 2)) == losses(run)[4:]
        said = capfd.readouterr().out
        assert f"checkpoint {newest.url} is damaged: {newest.url}/rank_00000.bin: expected hash" in said
        assert list(in_bucket(URL, tmp_path / "seen")) == ["iter_0000004", "iter_0000006"]


def test_another_run_loads_from_a_bucket(
    prepared: Prepared, run: list[dict[str, Any]], s3: Server, tmp_path: Path
) -> None:
    flags = ("--checkpoint.load", URL, "--checkpoint.finetune", "True", "--train.train_iters", "1")
    with buckets.proxied(s3) as (before, proxy), buckets.environment(before):
        for _ in range(2):
            shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
            train(prepared, configuration(tmp_path / "run", *flags, "--log.report", "False"), 1)
        fetched = [one.path for one in proxy.requests if one.method == "GET" and "rank_00000.bin" in one.path]
        assert len(fetched) == 1, "once"
        with pytest.raises(UserError, match=r"checkpoint.load s3://triplane/nothing: expected a checkpoint"):
            prepare(configuration(tmp_path / "other", "--checkpoint.load", f"s3://{BUCKET}/nothing"), None)


@pytest.mark.campaign  # every day: test_uploading.py
def test_a_failing_server_ends_no_training(prepared: Prepared, s3: Server, tmp_path: Path) -> None:
    """But a start; the next one brings there what was missing. No credential is in anything that a run leaves."""
    url, run_dir = f"s3://{BUCKET}/failing", tmp_path / "run"
    flags = ("--train.train_iters", "3", "--log.report", "False", "--checkpoint.bucket", url)
    with buckets.proxied(s3, lambda _: "denied") as (before, proxy), buckets.environment(before):
        code, failure = train_or_fail(prepared, configuration(tmp_path / "first", *flags), 1)
        assert code == 2 and failure is not None
        assert f"checkpoint.bucket: {url}/: list: 403 AccessDenied (made to fail). Give" in failure.text
        proxy.rule = lambda request: "expired" if request.method == "PUT" and "rank_" in request.path else None
        train(prepared, configuration(run_dir, *flags, "--train.exit_interval", "2"), 1)
        assert not stored.newer(None, url)
        failed = [event.text("text") for event in read_history(run_dir) if event.event == "upload_failed"]
        assert "upload: 400 ExpiredToken (made to fail). The credentials have expired" in failed[0] and url in failed[0]
        assert proxy.failures
        proxy.rule = lambda _: None
        train(prepared, configuration(run_dir, *flags), 1)
        assert max(in_bucket(url, tmp_path / "seen")) == "iter_0000003"
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) > 20 and not [path for path in left if buckets.SECRET.encode() in path.read_bytes()]


def test_the_process_list_shows_no_credential(s3: Server, tmp_path: Path) -> None:
    with buckets.environment(s3):
        order = UploadOrder(root=str(tmp_path), url=f"s3://{BUCKET}/shown", attempt="me")
        uploader = Uploader(order)
        words = b""
        while not words:  # it is yet to become the other program
            words = Path(f"/proc/{uploader.process.pid}/cmdline").read_bytes()
        uploader.close()
    assert b"s3://" in words and buckets.SECRET.encode() not in words and buckets.KEY.encode() not in words


def test_stages_and_a_dry_run_look_into_the_bucket(s3: Server, tmp_path: Path) -> None:
    url, here = f"s3://{BUCKET}/position", tmp_path / "here"
    state = State(progress=Progress(iteration=7, consumed_samples=56), layout=Layout(), device="cpu")
    with buckets.environment(s3):
        uploading.claim(url, "me")
        path = committed(tmp_path / "there", 7, state=encoded(state))
        uploading.upload(UploadOrder(root=str(path.parent), url=url, attempt="me"), path)
        for flags in (CheckpointConfig(bucket=url), CheckpointConfig(load=url)):
            found = position(here, flags)
            assert found is not None and (found.now.iteration, found.now.samples) == (7, 56)
        assert has_own(here, CheckpointConfig(bucket=url)) and not has_own(here, CheckpointConfig())
        assert position(here, CheckpointConfig(bucket=f"{url}/nothing")) is None
        assert not here.exists()


@pytest.mark.parametrize(("flags", "said"), [
    ({"bucket": "s3://KEY:HUSH@b/x"}, "credentials do not belong in a URL"), ({"bucket": "/data"}, "must be s3://"),
    ({"bucket": "hf://datasets/a/b/c"}, "must be s3://"), ({"bucket_keep": 1}, "which is not set"),
    ({"bucket": "s3://b/x", "bucket_keep": 0}, "must be 1 or more"), ({"load": "s3:///x"}, "found no bucket"),
])  # fmt: skip
def test_settings_that_are_none(flags: dict[str, object], said: str) -> None:
    config = CheckpointConfig(**flags)  # type: ignore[arg-type]
    [found] = config.problems()
    assert said in found and "HUSH" not in found
    if "bucket_keep" not in flags:  # what stages look into before a recipe is checked
        with pytest.raises(UserError) as caught, first_of_all(Path("/nothing"), config):
            pass
        assert str(caught.value) == found
