"""The layout does not change the result: loss, gradient norm, every gradient of step 1, data order and resume."""

import dataclasses
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from data.prepare import Prepared
from parallel.errors import UserError
from tools.parity.compare import TOLERANCE, Observed, compare, furthest, observe, worst_gradient
from tools.parity.layouts import shrink, with_layout
from training import cli
from training.config import RunConfig

RECIPE = Path(__file__).resolve().parent.parent / "slurm/recipes/debug.toml"
LLAMA = ["tp2", "tp4", "tp2sp", "pp2", "pp4", "pp2vpp2", "dp2", "dp4overlapbucket20000", "dp2zero0", "tp2sppp2dp2",
         "tp2pp2vpp2dp2", "cp2", "mbs2", "mbs8"]  # fmt: skip


def shrunk(shape: str = "debug", num_layers: int = 4) -> RunConfig:
    config = shrink(cli.load(RECIPE), num_layers=num_layers)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, shape=shape))


@pytest.fixture(scope="module")
def llama(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """One rank: RMSNorm, SwiGLU, RoPE, 2 query groups, untied."""
    return observe(shrunk(), prepared, "tp1", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("layout", LLAMA)
def test_layout_trains_as_one_rank(layout: str, llama: Observed, prepared: Prepared, tmp_path: Path) -> None:
    verdict = compare(shrunk(), prepared, layout, llama, tmp_path)
    assert not verdict.problems, verdict


def test_uneven_stages_train_as_one_rank(prepared: Prepared, tmp_path: Path) -> None:
    config = shrunk(num_layers=6)
    reference = observe(config, prepared, "tp1", tmp_path / "one")
    assert not compare(config, prepared, "pp4first1last1", reference, tmp_path / "uneven").problems


@pytest.mark.parametrize("layout", ["pp2", "tp2sppp2dp2"])
def test_tied_embeddings_biases_and_learned_positions_train_as_one_rank(
    layout: str, prepared: Prepared, tmp_path: Path
) -> None:
    config = shrunk("gpt2_tiny")
    reference = observe(config, prepared, "tp1", tmp_path / "one")
    verdict = compare(config, prepared, layout, reference, tmp_path / "tied")
    assert not verdict.problems, verdict


def test_a_wrong_gradient_is_named(llama: Observed) -> None:
    """The proof itself can fail: one element of one gradient off by 1e-3 of the largest is found and named."""
    spoiled = {
        name: [dataclasses.replace(piece, data=piece.data.clone()) for piece in pieces]
        for name, pieces in llama.gradients.items()
    }
    victim = spoiled["layers.2.mlp.linear_fc2.weight"][0].data
    victim[3, 5] += victim.abs().max() * 1e-3
    worst, name, _ = worst_gradient(spoiled, llama.gradients)
    assert name == "layers.2.mlp.linear_fc2.weight"
    assert worst > TOLERANCE


def test_a_missing_piece_and_a_lost_loss_are_noticed(llama: Observed) -> None:
    holes = {name: pieces for name, pieces in llama.gradients.items() if name != "output_layer.weight"}
    assert worst_gradient(holes, llama.gradients)[2] == ["output_layer.weight exists in only one of the two"]
    assert furthest(llama.loss[:-1], llama.loss) > 1
    assert furthest([float("nan")], [1.0]) > 1


def test_layout_names() -> None:
    config, world_size = with_layout(shrunk(), "tp2sppp2vpp2dp2overlapmbs2")
    parallel = config.parallel
    assert world_size == 8
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert (parallel.virtual_pipeline_model_parallel_size, parallel.sequence_parallel) == (2, True)
    assert (parallel.overlap_grad_reduce, parallel.overlap_param_gather, config.train.micro_batch_size) == (
        True,
        True,
        2,
    )
    with pytest.raises(UserError, match="cannot read"):
        with_layout(shrunk(), "tp2xx")
