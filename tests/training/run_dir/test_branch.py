"""A branch goes on as its trunk would have, but for its learning rate, and leaves the trunk alone."""

from dataclasses import replace
from pathlib import Path

import pytest

import buckets
from data.prepared import Prepared
from program.errors import UserError
from runs import configuration, losses, train, train_or_fail
from tools.report.__main__ import main as write_report
from training.checkpoint.bucket import stored, uploading
from training.checkpoint.bucket.uploading import UploadOrder
from training.cli import dry_run
from training.metrics.jsonl import read_jsonl
from training.run_dir.branch import branched
from training.run_dir.history import read_history

TRUNK = ("--optimizer.lr_decay_style", "constant", "--checkpoint.save_interval", "2", "--log.report", "False")
FALL = ("--optimizer.lr_wsd_decay_style", "linear", "--train.decay_iters", "4", "--optimizer.min_lr", "1e-3")


@pytest.fixture(scope="module")
def trunk(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 iterations at 3e-3, with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("branches") / "trunk"
    train(prepared, configuration(folder, *TRUNK, "--train.train_iters", "4"), 1)
    return folder


def test_a_branch_falls_from_where_its_trunk_was_and_resumes_in_another_layout(
    trunk: Path, prepared: Prepared, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in trunk.rglob("*")}
    flags = (*TRUNK, *FALL, "--optimizer.lr", "1.0", "--checkpoint.finetune", "True", "--checkpoint.load", "elsewhere")
    middle = ("--train.decay_from", str(trunk / "checkpoints/iter_0000002"))
    planned = dry_run.describe(configuration(tmp_path / "run", *flags, *middle, "--dry_run"), frozenset())
    assert "6 iterations" in planned and "WSD from 0.003 to 0.001 at 48 samples" in planned
    lines = train(prepared, configuration(tmp_path / "run", *flags, *middle, "--train.exit_interval", "3"), 1)
    assert losses(lines)[0] == losses(read_jsonl(trunk / "metrics.jsonl"))[2]
    # from here on, the trunk's newest checkpoint is another one
    again = configuration(tmp_path / "run", *flags, "--train.decay_from", str(trunk))
    assert again.train.train_iters == 6 and again.checkpoint.load == middle[1]
    lines = train(prepared, again, 2)
    assert [line["learning_rate"] for line in lines] == pytest.approx([3e-3, 2.5e-3, 2e-3, 1.5e-3], rel=1e-12)
    late = replace(again.schedule, lr_decay_style="constant", lr=3e-3, waited_samples=8)  # train.iterations_to_skip
    fall = branched(late, again, 16)
    assert [fall.learning_rate(at) for at in (16, 24, 48)] == pytest.approx([3e-3, 2.5e-3, 1e-3])
    assert [event.text("text") for event in read_history(tmp_path / "run") if event.event == "branched"] == [
        f"from {middle[1]}"
    ]
    # its checkpoints start other runs from themselves
    text = (tmp_path / "run/checkpoints/iter_0000006/config.toml").read_text()
    assert "decay_from" not in text and "decay_iters" not in text
    report = tmp_path / "branches.html"  # python -m tools.report
    assert write_report([str(trunk), str(tmp_path / "run"), "--output", str(report)]) == 0
    assert middle[1] in report.read_text()
    assert {path: path.stat().st_mtime_ns for path in trunk.rglob("*")} == before


def test_a_branch_of_what_is_in_a_bucket(trunk: Path, prepared: Prepared, s3: buckets.Server, tmp_path: Path) -> None:
    url = f"s3://{buckets.BUCKET}/trunk"
    order = UploadOrder(root=str(trunk / "checkpoints"), url=url, attempt="me")
    with buckets.environment(s3):
        uploading.claim(url, "me")
        for number in (2, 4):
            uploading.upload(order, trunk / f"checkpoints/iter_000000{number}")
        newest, middle = (one.url for one in stored.find(url, ""))
        config = configuration(tmp_path / "run", *TRUNK, *FALL, "--train.decay_from", middle,
                               "--train.exit_interval", "1")  # fmt: skip
        assert losses(train(prepared, config, 1)) == losses(read_jsonl(trunk / "metrics.jsonl"))[2:3]
        again = configuration(tmp_path / "run", *TRUNK, *FALL, "--train.decay_from", url)
        assert (again.train.train_iters, again.checkpoint.load) == (6, middle), "as it has begun"
        other = configuration(tmp_path / "other", *TRUNK, *FALL, "--train.decay_from", url)
        assert (other.train.train_iters, other.checkpoint.load) == (8, newest)
        with pytest.raises(UserError, match="is this run itself"):
            configuration(tmp_path / "other", *TRUNK, *FALL, "--train.decay_from", url, "--checkpoint.bucket", url)


def test_what_cannot_fall_is_refused(trunk: Path, prepared: Prepared, tmp_path: Path) -> None:
    for flags, words in (
        (("--optimizer.min_lr", "3e-3"), "its learning rate is 0.003 already, at most optimizer.min_lr 0.003"),
        (
            ("--optimizer.decoupled_lr", "1e-3"),
            "this configuration has a learning rate for embeddings and output layer",
        ),
    ):
        asked = configuration(tmp_path / "run", *TRUNK, *FALL, "--train.decay_from", str(trunk), *flags)
        _, failure = train_or_fail(prepared, asked, 1)
        assert failure is not None and words in failure.text


def test_what_is_no_branch_is_refused(trunk: Path, prepared: Prepared, tmp_path: Path) -> None:
    def refused(run_dir: Path, *flags: str) -> str:
        with pytest.raises(UserError) as caught:
            configuration(run_dir, *TRUNK, *FALL, *flags)
        return str(caught.value)

    assert "is this run itself. Give the branch a --run_dir" in refused(trunk, "--train.decay_from", str(trunk))
    assert "found nothing there" in refused(tmp_path, "--train.decay_from", str(tmp_path / "nowhere"))
    override = ("--checkpoint.override_opt_param_scheduler", "True")
    assert "Set one of them" in refused(tmp_path, "--train.decay_from", str(trunk), *override)
    (tmp_path / "checkpoints").symlink_to(trunk / "checkpoints")
    assert "has checkpoints of no branch" in refused(tmp_path, "--train.decay_from", str(trunk))
    assert configuration(tmp_path, "--train.decay_iters", "4").problems(1) == [
        "train.decay_from and train.decay_iters go together: give both, or neither."
    ]
