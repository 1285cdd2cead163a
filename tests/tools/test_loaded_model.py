"""A checkpoint's model on ranks of any layout: the same logits everywhere, results alone on stdout, one message for
what is wrong."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import ranks  # noqa: F401  (imports torch and megatron once)
from data.prepared import Prepared
from program.errors import UserError
from program.untrusted import InputError
from runs import configuration, train
from tools.convert.__main__ import main as convert
from tools.inspect_checkpoint.__main__ import main as inspect_checkpoint
from tools.parity.compared_model import open_model
from tools.reshard.__main__ import main as reshard
from tools.shared import held_checkpoint
from tools.shared.loaded_model import LoadedModel, on_ranks
from tools.shared.opened_checkpoint import ModelFlags, open_checkpoint
from training.checkpoint.format import index
from training.generation.forward import WindowLogits, evaluating

FLAGS = ("--model.shape", "mixtral_tiny", "--train.train_iters", "1", "--precision.dtype", "bf16")


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, of two ranks in bf16: its checkpoint holds the optimizer's fp32 weights alone."""
    folder = tmp_path_factory.mktemp("loaded") / "run"
    train(prepared, configuration(folder, *FLAGS), 2)
    return folder


def logits(run: Path, output: Path, layout: str | None, dtype: str | None = "fp32") -> torch.Tensor:
    """Those after 20 tokens."""
    opened = open_checkpoint(ModelFlags(checkpoint=run, layout=layout, device="cpu", dtype=dtype))  # type: ignore[arg-type]

    def work(model: LoadedModel) -> None:
        with evaluating(model.chunks):
            found = WindowLogits(model.chunks, model.ranks, 64, [0])([range(20)])
        assert not any(param.requires_grad for chunk in model.chunks for _, param in chunk.module.named_parameters())
        if found is not None and model.ranks.at.dp == model.ranks.at.tp == 0:
            torch.save(found[0][0, : model.shape.vocab_size], output)
        os.write(1, b"noise of a library\n")
        model.ranks.say(f"{model.ranks.layout}")
        model.write("result\n")

    assert on_ranks(opened, "a test", work) == 0
    return torch.load(output)  # type: ignore[no-any-return]


@pytest.mark.campaign
def test_every_layout_computes_the_same_model(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = logits(run, tmp_path / "one", "dp2")
    assert one.std() > 0
    for layout in ("pp2vpp2", "tp2spep2etp1", "dp2zero3"):
        torch.testing.assert_close(logits(run, tmp_path / layout, layout), one, rtol=0, atol=1e-5)
    out, err = capfd.readouterr()
    assert out == "result\n" * 4
    assert "TP 2 x PP 1 x EP 2 x DP 1\n" in err and "noise" not in err
    assert not torch.equal(logits(run, tmp_path / "bf16", "pp2", None), one), "precision.dtype is bf16"


def test_a_folder_without_a_checkpoint_and_a_layout_that_cannot_be_are_refused(run: Path) -> None:
    for flags, words in (
        (ModelFlags(checkpoint=run / "logs"), "/logs: expected a checkpoint"),
        (ModelFlags(checkpoint=run / "nothing"), "found nothing there"),
        (ModelFlags(checkpoint=run, layout="tpp2"), 'layout "tpp2": cannot read "t"'),
        (ModelFlags(checkpoint=run, layout="tp3"), "model.num_attention_heads 4 is not divisible"),
    ):
        with pytest.raises(UserError, match=words):
            open_checkpoint(flags)


def test_damage_is_named_before_anything_is_computed(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints/iter_0000001", tmp_path / "iter_0000001")
    data = max(tmp_path.glob("iter_0000001/*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    opened = open_checkpoint(ModelFlags(checkpoint=tmp_path, layout="dp2", device="cpu"))
    with pytest.raises(UserError, match=r"iter_0000001 is damaged: .*\.bin: expected hash"):
        on_ranks(opened, "a test", lambda _: sys.exit("nothing may be computed"))


def test_a_checkpoint_that_retention_deletes_meanwhile_is_read_all_the_same(run: Path, tmp_path: Path) -> None:
    """Between finding it and reading its tensors a tool imports torch for seconds, and may fetch tasks for minutes."""
    path = Path(shutil.copytree(run / "checkpoints/iter_0000001", tmp_path / "iter_0000001"))
    opened, against = open_checkpoint(ModelFlags(checkpoint=path, layout="dp2", device="cpu")), open_model(path)
    links = opened.held.files
    shutil.rmtree(path)
    assert on_ranks(opened, "a test", lambda model: model.write("")) == 0
    found = against.weight("word_embeddings.weight")
    assert found is not None and found.shape == (384, 64)
    del opened
    assert not links.exists(), "what was held is let go of"


def test_one_that_went_is_not_called_damaged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where more files are in it than a process may hold open, and in tools that read as they go."""
    path = Path(shutil.copytree(run / "checkpoints/iter_0000001", tmp_path / "iter_0000001"))
    said = f"{path} was deleted or replaced while it was read"
    with monkeypatch.context() as patch:
        patch.setattr(held_checkpoint, "SPARE_FILES", 1 << 40)
        opened = open_checkpoint(ModelFlags(checkpoint=path, layout="dp2", device="cpu"))
    path.rename(tmp_path / "gone")
    with pytest.raises(UserError, match=said):
        on_ranks(opened, "a test", lambda _: sys.exit("nothing may be computed"))
    read = index.read_bytes

    def read_late(file: Path, *most: int) -> bytes:
        if file.parent == path and path.exists():
            path.rename(tmp_path / "gone")
        return read(file, *most)

    monkeypatch.setattr(index, "read_bytes", read_late)
    for main, arguments in (
        (inspect_checkpoint, [str(path)]), (inspect_checkpoint, [str(path), "--verify", "hashes"]),
        (inspect_checkpoint, [str(run), "--diff", str(path)]), (convert, ["export", str(path), str(tmp_path / "hf")]),
        (reshard, [str(path), str(tmp_path / "ours")]),
    ):  # fmt: skip
        (tmp_path / "gone").rename(path)
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert said in err and "damaged" not in err, err


def test_what_is_raised_while_reading_names_the_checkpoint_by_its_own_path(run: Path) -> None:
    held = held_checkpoint.HeldCheckpoint.of(run)
    with pytest.raises(InputError, match=f"^{held.folder}/x: no weights"), held.reading() as files:
        raise InputError(files / "x", "no weights")


def test_what_fails_on_a_rank_fails_the_tool(run: Path) -> None:
    def work(model: LoadedModel) -> None:
        if model.ranks.rank == 1:
            raise ValueError("on one rank")

    opened = open_checkpoint(ModelFlags(checkpoint=run, layout="dp2", device="cpu"))
    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 failed: ValueError: on one rank\nTraceback"):
        on_ranks(opened, "a test", work)
