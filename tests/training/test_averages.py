"""Averages of weights: what plain torch makes of each iteration's, in any layout, over a resume, and by name."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import checkpoint_parts
from data.prepared import Prepared
from program.errors import UserError
from runs import configuration, train
from tools.convert.__main__ import main as convert
from tools.inspect_checkpoint.__main__ import main as inspect_checkpoint
from tools.reshard.__main__ import main as reshard
from tools.shared.loaded_model import LoadedModel, on_ranks
from tools.shared.opened_checkpoint import ModelFlags, open_checkpoint
from training.averages import Averages
from training.checkpoint import optimizer_state
from training.checkpoint.chosen_weights import prefix_of
from training.checkpoint.storage import TensorReader
from training.config.train_config import TrainConfig

FLAGS = (
    "--train.ema_decay", "0.5", "--train.average_last", "2", "--checkpoint.save_interval", "1",
    "--checkpoint.keep", "9", "--log.report", "False", "--train.train_iters", "4",
)  # fmt: skip
WORDS = "embedding.word_embeddings.weight"
BF16, TP2 = ("--precision.dtype", "bf16"), ("--parallel.tensor_model_parallel_size", "2")
ZERO3 = ("--parallel.data_parallel_sharding_strategy", "optim_grads_params", "--parallel.overlap_grad_reduce", "True",
         "--parallel.overlap_param_gather", "True")  # fmt: skip


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 iterations with shards over 4 ranks, which cut tensors (2 ranks cut none), and 2 with TP, from bf16 weights; a
    checkpoint of each."""
    folder = tmp_path_factory.mktemp("averages") / "run"
    train(prepared, configuration(folder, *FLAGS, *BF16, "--train.exit_interval", "2"), 4)
    train(prepared, configuration(folder, *FLAGS, *BF16, *TP2), 2)
    return folder


def checkpoint(run: Path, iteration: int) -> Path:
    return run / f"checkpoints/iter_{iteration:07}"


def kept(run: Path, iteration: int, name: str) -> dict[str, Tensor]:
    """Global tensors of a checkpoint: of the optimizer's fp32 weights ("param") or of an average."""
    prefix, found = f"optimizer.state.{name}.", dict[str, Tensor]()
    with TensorReader(checkpoint(run, iteration)) as reader:
        for key, shape in reader.shapes.items():
            if key.startswith(prefix):
                found[key.removeprefix(prefix)] = torch.empty(shape)
                reader.read_into(key, (0,) * len(shape), found[key.removeprefix(prefix)])
    assert found
    return found


def test_averages_are_those_of_every_iteration_s_weights(run: Path) -> None:
    weights = {iteration: kept(run, iteration, "param") for iteration in (1, 2, 3, 4)}
    ema = kept(run, 1, "ema")
    for iteration in (2, 3, 4):
        ema = {key: 0.5 * value + 0.5 * weights[iteration][key] for key, value in ema.items()}
        for key, value in kept(run, iteration, "ema").items():
            torch.testing.assert_close(value, ema[key], rtol=1e-6, atol=1e-7, msg=f"{iteration}: {key}")
    for key, value in kept(run, 4, "average_last").items():
        torch.testing.assert_close(value, (weights[3][key] + weights[4][key]) / 2, rtol=1e-6, atol=1e-7, msg=key)
    counts = [json.loads((checkpoint(run, one) / "state.json").read_text())["optimizer"]["averaged"] for one in (2, 4)]
    begins = {"average_last_begins": 2}
    assert counts == [{"ema": 2, "average_last": 0, **begins}, {"ema": 4, "average_last": 2, **begins}]


def test_shards_of_weights_are_averaged_as_whole_ones(prepared: Prepared, tmp_path: Path) -> None:
    flags = (*FLAGS, "--train.exit_interval", "2")
    train(prepared, configuration(tmp_path / "whole", *flags), 1)
    train(prepared, configuration(tmp_path / "shards", *flags, *ZERO3), 2)
    for key, value in kept(tmp_path / "whole", 2, "ema").items():
        torch.testing.assert_close(kept(tmp_path / "shards", 2, "ema")[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_their_memory_is_divided_over_the_ranks_that_share_the_optimizer_s() -> None:
    checkpoint_parts.on_ranks(2, checkpoint_parts.configuration(checkpoint_parts.sizes()), _is_divided)


def _is_divided(parts: checkpoint_parts.Parts) -> None:
    Averages(parts.optimizer, TrainConfig(global_batch_size=1, ema_decay=0.9))
    kept = [kept["ema"] for part in optimizer_state.parts(parts.optimizer) for kept in part.averages.values()]
    held = torch.tensor(sum(one.untyped_storage().nbytes() for one in kept))
    torch.distributed.all_reduce(held)
    assert held == 4 * sum(param.numel() for chunk in parts.chunks for param in chunk.parameters())


def test_a_checkpoint_without_them_starts_them_from_its_weights(run: Path, prepared: Prepared, tmp_path: Path) -> None:
    plain = ("--train.train_iters", "1", "--log.report", "False", *BF16)
    train(prepared, configuration(tmp_path / "run", *plain), 1)
    first = kept(tmp_path / "run", 1, "param")
    train(prepared, configuration(tmp_path / "run", *FLAGS, *BF16, "--train.exit_interval", "2"), 1)
    second = kept(tmp_path / "run", 2, "param")
    for key, value in kept(tmp_path / "run", 2, "ema").items():
        torch.testing.assert_close(value, (first[key] + second[key]) / 2, rtol=1e-6, atol=1e-7, msg=key)
    # the mean of a run that is made longer is that of its own last iterations
    train(prepared, configuration(tmp_path / "run", *FLAGS, *BF16, "--train.train_iters", "2"), 1)
    longer = ("--train.train_iters", "4", "--train.exit_interval", "3")
    train(prepared, configuration(tmp_path / "run", *FLAGS, *BF16, *longer), 1)
    third = kept(tmp_path / "run", 3, "param")
    assert all(torch.equal(value, third[key]) for key, value in kept(tmp_path / "run", 3, "average_last").items())
    # and a run that keeps none goes on without them
    train(prepared, configuration(tmp_path / "run", *plain, "--train.train_iters", "4"), 1)
    with pytest.raises(AssertionError):
        kept(tmp_path / "run", 4, "ema")


def test_they_are_resharded_and_listed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reshard([str(checkpoint(run, 4)), str(tmp_path / "checkpoints/iter_0000004")]) == 0
    for name in ("ema", "average_last"):
        before, after = kept(run, 4, name), kept(tmp_path, 4, name)
        assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    assert inspect_checkpoint([str(checkpoint(run, 4))]) == 0
    assert "average_last" in capsys.readouterr().out
    assert inspect_checkpoint([str(checkpoint(run, 4)), "--diff", str(checkpoint(run, 3))]) == 1
    assert "ema" in capsys.readouterr().out


def test_they_are_taken_by_name(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    newest = checkpoint(run, 4)
    exported = {}
    for name in ("trained", "ema"):
        words = ["export", str(newest), str(tmp_path / name), "--weights", name, "--dtype", "float32", "--verify"]
        assert convert(words) == 0
        exported[name] = load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"]
    rows = len(exported["ema"])
    assert torch.equal(exported["ema"], kept(run, 4, "ema")[WORDS][:rows])
    assert not torch.equal(exported["ema"], exported["trained"])
    opened = open_checkpoint(ModelFlags(checkpoint=newest, layout="tp2", dtype="fp32", weights="ema"))

    def work(model: LoadedModel) -> None:
        assert model.numbers == "fp32, weights ema"
        held = model.chunks[0].module.embedding.word_embeddings.weight
        torch.save(held, tmp_path / f"{model.ranks.at.tp}.pt")

    assert on_ranks(opened, "a test", work) == 0  # as tools.generate and tools.evaluate
    assert torch.equal(torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]), kept(run, 4, "ema")[WORDS])
    with pytest.raises(UserError, match=r"--weights average_last: .*iter_0000002 has ema"):
        prefix_of("average_last", checkpoint(run, 2))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for flags, words in (
        (("--train.ema_decay", "1.0"), "train.ema_decay must be between 0 and 1, found 1.0"),
        (("--train.average_last", "0"), "train.average_last must be 1 or more, found 0"),
        (("--train.averages_on_host", "True"), "there are none"),
    ):
        assert any(words in problem for problem in configuration(tmp_path, *flags).problems(1))
