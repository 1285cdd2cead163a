"""The examples of docs/callbacks.md, from its text: on one rank and in layouts, over a resume, to their end."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import runs
from data.prepared import Prepared
from program.errors import UserError
from tools.reshard.options import ReshardOptions
from tools.reshard.rewriting import planned
from tools.reshard.sources import open_source
from training.cli import parse
from training.config.run_config import RunConfig

PAGE = runs.ROOT / "docs/callbacks.md"
EXAMPLES = {"LogWeightNorm": 0, "StopAtLoss": 1, "z_loss": 2, "Lion": 3}
FOUR = "--parallel.tensor_model_parallel_size 2".split()
SHORT = "--train.train_iters 4 --train.global_batch_size 8 --train.micro_batch_size 2".split()
LION = "--optimizer.optimizer page:Lion --optimizer.lr 1e-3".split()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and beside it the page's examples as one module."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "page.py").write_text("\n\n".join(blocks()))
    shutil.copy(runs.DEBUG, folder / "recipe.toml")
    return folder


def configured(folder: Path, name: str, *flags: str) -> RunConfig:
    return runs.configuration(folder / name, *SHORT, *flags, recipe=folder / "recipe.toml")


def test_each_example_is_short_and_stands_by_itself() -> None:
    found = [{node.name for node in ast.parse(text).body if hasattr(node, "name")} for text in blocks()]
    assert found == [{name} for name in EXAMPLES]
    assert all(len([line for line in text.splitlines() if line.strip()]) <= 20 for text in blocks())
    for text in blocks():
        compile(text, "page", "exec")


@pytest.fixture(scope="module")
def alone(folder: Path, prepared: Prepared) -> list[dict[str, Any]]:
    """One rank with all four."""
    flags = ("--train.callbacks", "page:LogWeightNorm", "page:StopAtLoss", "--train.loss", "page:z_loss", *LION)
    return runs.train(prepared, configured(folder, "alone", *flags), 1)


def test_they_compute_the_same_in_a_layout(alone: list[dict[str, Any]], folder: Path, prepared: Prepared) -> None:
    """TP 2 x DP 2, with ZeRO-1; its checkpoint in the middle resumes bit for bit, and on one rank."""
    flags = ("--train.callbacks", "page:LogWeightNorm", "--train.loss", "page:z_loss", *LION)
    four = configured(folder, "four", *flags, *FOUR, "--checkpoint.save_interval", "2")
    straight = runs.train(prepared, four, 4)
    for mine, other in zip(straight, alone, strict=True):
        for name in ("loss", "grad_norm", "cross_entropy"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5), name
    assert straight[0]["weights/largest"] == pytest.approx(alone[0]["weights/largest"], rel=1e-5)
    assert straight[0]["loss"] > straight[0]["cross_entropy"] + 1e-4  # the newline's weight and log(Z)
    assert "weights/largest" not in straight[1]
    saved = folder / "four/checkpoints/iter_0000002"
    for name, ranks, more in (("resumed", 4, FOUR), ("moved", 1, [])):
        shutil.copytree(saved, folder / name / "checkpoints" / saved.name)
        again = runs.train(prepared, configured(folder, name, *flags, *more), ranks)
        found, expected = ([(line["loss"], line["grad_norm"]) for line in lines] for lines in (again, straight[2:]))
        if name == "resumed":
            assert found == expected
        for pair, other in zip(found, expected, strict=True):
            assert pair == pytest.approx(other, rel=1e-5)
    source = open_source(saved, ReshardOptions())
    with pytest.raises(UserError, match=r'"page:Lion", and tools\.reshard rewrites AdamW\'s state only'):
        planned(source, ReshardOptions())
    assert planned(source, ReshardOptions(drop_optimizer=True)).groups
    source.files.close()


@pytest.mark.campaign
def test_a_loss_is_the_same_with_context_ranks_and_further_predictions(folder: Path, prepared: Prepared) -> None:
    """Latent attention, experts and a depth of multi-token prediction, whose own loss stays the cross entropy."""
    flags = "--model.shape deepseek_v3_tiny --train.loss page:z_loss --train.train_iters 1".split()
    flags += "--train.global_batch_size 4 --train.eval_interval 1 --train.eval_iters 1".split()
    layout = "--parallel.context_parallel_size 2 --parallel.pipeline_model_parallel_size 2".split()
    lines = (
        runs.train(prepared, configured(folder, name, *flags, *more), ranks)
        for name, ranks, more in (("one", 1, []), ("stages", 4, layout), ("plain", 1, ["--train.loss", "None"]))
    )
    one, four, plain = (training | validation for training, validation in lines)
    for name in ("loss", "grad_norm", "validation_loss", "mtp_loss", "cross_entropy"):
        assert four[name] == pytest.approx(one[name], rel=1e-5), name
    assert one["mtp_loss"] == plain["mtp_loss"]
    assert one["cross_entropy"] == pytest.approx(plain["loss"], rel=1e-6)
    assert one["loss"] > plain["loss"] + 1e-2
    assert abs(one["validation_loss"] - plain["validation_loss"]) < 0.01  # not the weighted one


@pytest.mark.campaign
def test_a_callback_ends_the_run(alone: list[dict[str, Any]], folder: Path, prepared: Prepared) -> None:
    flags = ("--train.callbacks", "page:StopAtLoss", "--train.train_iters", "500", "--train.eval_interval", "400")
    lines = runs.train(prepared, configured(folder, "finished", *flags, "--train.eval_iters", "1"), 2)
    losses = runs.losses(lines)
    assert losses[-3] < 3.5 and losses[-2] < 3.5 and len(losses) < 200
    assert (folder / "finished/done").read_text() == f"{len(losses)}\n"
    assert (folder / f"finished/checkpoints/iter_{len(losses):07}").is_dir()
    assert "validation_loss" in lines[-1]  # after the last iteration, whichever that is
    assert not (folder / "alone/requeue").exists()


def test_the_page_s_message_is_the_program_s(folder: Path) -> None:
    from training.custom.check import check

    config = parse.parse_config([str(folder / "recipe.toml"), "--train.callbacks", "page:StopAtLos"])
    with pytest.raises(UserError) as refused:
        check(config, "cpu")
    shown = str(refused.value).replace(str(folder / "page.py"), "/home/me/my_module.py").replace("page", "my_module")
    assert shown in PAGE.read_text()
