"""Predicted memory of a configuration: the program's own bytes, said after the first steps of a run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import runs
from campaign import param
from data.prepared import Prepared
from models.config import ModelConfig
from models.costs.predict import Predicted, fullest, of_stage, of_stages
from models.costs.stage_parameters import stages
from models.families import SHAPES
from models.resolve import resolve
from parallel.config import PrecisionConfig
from tests.models.costs.by_hand import rank_bytes
from training.cli.parse import parse_config
from training.config.run_config import RunConfig
from training.memory.measured import MeasuredBytes, sentence
from training.memory.planned import Modules, as_case

CPU = Modules(cuda=False, transformer_engine=False)
GPU = Modules(cuda=True, transformer_engine=True)
LLAMA = "--model.shape llama3_8b --model.seq_length 8192 --train.global_batch_size 64 --precision.dtype bf16"
MIB = {"MiB": 2**20, "GiB": 2**30}


def asked(flags: str) -> RunConfig:
    return parse_config(f"{LLAMA} {flags}".split())


def held(flags: str, world_size: int = 16, modules: Modules = GPU) -> Predicted:
    config = asked(flags)
    assert config.problems(world_size) == []
    shape = resolve(config.model, None)
    return fullest([as_case(config, world_size, shape, modules)], shape)[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--parallel.tensor_model_parallel_size 2 --parallel.pipeline_model_parallel_size 4",
        "--parallel.pipeline_model_parallel_size 4 --parallel.account_for_embedding_in_pipeline_split True "
        "--model.num_layers 31",
        "--parallel.pipeline_model_parallel_size 2 --parallel.pipeline_model_parallel_layout Et*15|t*17L",
        "--parallel.use_distributed_optimizer False --precision.grad_reduce_in_fp32 False",
        "--precision.dtype fp32 --parallel.context_parallel_size 2",
    ],
)
def test_states_are_those_of_the_dry_run(flags: str) -> None:
    config = asked(flags)
    assert config.problems(16) == []
    layout, shape = config.layout(16), resolve(config.model, None)
    for number, stage in enumerate(stages(shape, config.parallel)):
        expected = rank_bytes(stage, config.precision, config.parallel, layout)
        found = of_stage(as_case(config, 16, shape, GPU), shape, number)
        states = (found.weights, found.gradients, found.optimizer)
        assert states == pytest.approx((expected.weights, expected.gradients, expected.optimizer), rel=1e-12)


def test_what_is_recomputed_holds_less() -> None:
    kept, selected, some, half, whole = (
        held(flags).activations
        for flags in (
            "",
            "--train.recompute selective:core_attn,mlp",
            "--train.recompute full:block:8",
            "--train.recompute full:block:16",
            "--train.recompute full:uniform:1",
        )
    )
    assert kept > selected > whole and kept > some > half > whole
    assert half == pytest.approx((kept + whole) / 2)


def test_a_fused_cross_entropy_has_no_fp32_logits() -> None:
    """llama3_8b on one stage: 4 bytes less of each of 8,192 x 128,256 logits; where it cannot run, all of them."""
    fused, plain = held(""), held("--kernels.off cross_entropy_loss_fusion")
    logits = 8192 * 128256
    assert plain.activations - fused.activations == pytest.approx(4 * logits, rel=1e-6)
    for otherwise in (Modules(cuda=True, transformer_engine=False), CPU):
        apart = held("", modules=otherwise), held("--kernels.off cross_entropy_loss_fusion", modules=otherwise)
        assert apart[0] == apart[1]
    deterministic = "--train.deterministic_mode True"
    assert held(deterministic) == held(f"{deterministic} --kernels.off cross_entropy_loss_fusion")


def test_depths_of_multi_token_prediction_keep_their_activations() -> None:
    """Where those of all blocks wait on the host."""
    depth, away = "--model.mtp_num_layers 1", "--train.cpu_offloading_num_layers 32"
    kept, deeper, gone, left = (held(flags).activations for flags in ("", depth, away, f"{away} {depth}"))
    assert gone < kept < deeper and left - gone == pytest.approx(deeper - kept)


def test_a_stage_without_blocks_has_nothing_to_leave_to_the_host() -> None:
    layout = "--parallel.pipeline_model_parallel_size 4 --parallel.pipeline_model_parallel_layout E|t*16|t*16|L"
    shape = resolve(asked(layout).model, None)
    kept, away = (
        of_stages(as_case(asked(f"{layout} {more}"), 4, shape, GPU), shape, range(4))
        for more in ("", "--train.cpu_offloading_num_layers 16")
    )
    assert away[1].activations < kept[1].activations
    assert [away[stage].activations for stage in (0, 3)] == [kept[stage].activations for stage in (0, 3)]


@pytest.mark.parametrize("modules", [CPU, GPU], ids=["own", "te"])
def test_every_shape_has_a_prediction(modules: Modules) -> None:
    """A run of any of them reports it, and must not end by that."""
    for name in SHAPES:
        config = RunConfig(model=ModelConfig(shape=name), precision=PrecisionConfig(dtype="bf16"))
        shape = resolve(config.model, None)
        found = of_stage(as_case(config, 8, shape, modules), shape, 0)
        assert found.activations > 0 and found.optimizer == pytest.approx(12 / 8 / 4 * found.gradients), name


def test_only_a_gpu_has_libraries_beside() -> None:
    assert held("").workspace > 2e9 > held("", modules=CPU).workspace == 0


RUN = ("--train.train_iters", "2", "--train.eval_interval", "None", "--train.global_batch_size", "4")


def reports(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("memory of the fullest rank")]


@pytest.mark.parametrize(
    "flags",
    [
        "--parallel.tensor_model_parallel_size 2 --parallel.pipeline_model_parallel_size 2 --precision.dtype bf16",
        param("--parallel.use_distributed_optimizer False --precision.dtype fp16"),
        param("--parallel.data_parallel_sharding_strategy zero2"),
        param("--parallel.data_parallel_sharding_strategy zero2 --precision.dtype bf16"),
        param(
            "--parallel.data_parallel_sharding_strategy zero3 --precision.dtype bf16 "
            "--precision.grad_reduce_in_fp32 False"
        ),
    ],
    ids=["stages", "replicas", "ZeRO-2 fp32", "ZeRO-2", "ZeRO-3"],
)
def test_a_run_says_what_its_fullest_rank_holds(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: str
) -> None:
    runs.train(prepared, runs.configuration(tmp_path / "run", *RUN, *flags.split()), 4 if "pipeline" in flags else 2)
    (line,) = reports(capfd.readouterr().out)
    found = re.search(
        r"\(rank (\d), stage (\d)\): predicted ([\d.]+) (...) \(weights .*, activations ([\d.]+) (...)\), measured "
        r"([\d.]+) (...) of weights, gradients and optimizer \(([-+][\d.]+)%\), and the process grew by",
        line,
    )
    assert found, line
    assert int(found[2]) == (int(found[1]) // 2 if "pipeline" in flags else 0)
    states = float(found[3]) * MIB[found[4]] - float(found[5]) * MIB[found[6]]
    assert float(found[7]) * MIB[found[8]] == pytest.approx(states, rel=0.03)
    assert abs(float(found[9])) < 1.0  # DDP pads its buffers


def test_a_gpu_compares_its_peak() -> None:
    gib = 2.0**30
    expected = Predicted(
        stage=1,
        weights=2 * gib,
        gradients=4 * gib,
        optimizer=1 * gib,
        activations=3 * gib,
        workspace=5 * gib,
        host=0,
    )
    found = MeasuredBytes(2 * gib, 4 * gib, 1 * gib, 2.5 * gib, gib / 32, 11 * gib, 80 * gib)
    line = sentence(3, expected, found, cuda=True)
    assert "(rank 3, stage 1): predicted 10.00 GiB" in line and "measured 9.50 GiB (-5.0%: " in line
    assert "activations 2.50 GiB" in line and "keeps 11.00 GiB of the card's 80.00 GiB" in line
    assert "host" not in line
    away = sentence(3, replace(expected, host=gib), found._replace(host=1.25 * gib), cuda=True)
    assert "in the host's memory predicted 1.00 GiB, measured 1.25 GiB" in away
    unknown = sentence(3, expected, found._replace(activations=-1.0), cuda=True)
    assert "measured 7.00 GiB of weights, gradients and optimizer (+0.0%)" in unknown and "not measured" in unknown
