"""Single changes where memory ran out: priced again, legal, what fits first; and the planner's command."""

import dataclasses
import re

import pytest

from campaign import param
from models.costs.predict import fullest
from models.resolve import resolve
from tools.plan.__main__ import main
from training.cli.parse import parse_config
from training.memory.oom_advice import Room, advice, changes
from training.memory.planned import Modules, as_case

GPU = Modules(cuda=True, transformer_engine=True)
H100 = Room(bytes=79.1 * 2**30, words="the card's {}")
SMALL = Room(bytes=39.4 * 2**30, words="the card's {}")
RECOMPUTED = "--train.recompute full:uniform:1"
LLAMA = "--model.shape llama3_8b --model.seq_length 8192 --train.global_batch_size 64 --precision.dtype bf16"
SAFE = 0.8 * 79.1
LONG = (
    f"{LLAMA} --parallel.tensor_model_parallel_size 8 --model.seq_length 98304 --parallel.sequence_parallel True "
    "--train.cross_entropy_chunk_tokens 1024"
)


def printed(flags: str, world_size: int, room: Room = H100) -> list[str]:
    config = parse_config(flags.split())
    assert config.problems(world_size) == []
    return advice(config, world_size, resolve(config.model, None), GPU, room, "config.toml").splitlines()


def priced(flags: str, world_size: int) -> float:
    config = parse_config(flags.split())
    assert config.problems(world_size) == []
    shape = resolve(config.model, None)
    return fullest([as_case(config, world_size, shape, GPU)], shape)[0].total / 2**30


def rows(lines: list[str]) -> list[tuple[str, float, float, bool]]:
    """Flags, GiB less, GiB then, whether it fits."""
    found = [
        re.fullmatch(r"  (--.+): ([\d.]+) GiB less, ([\d.]+) GiB, (fits|not enough alone)", each) for each in lines
    ]
    return [(each[1], float(each[2]), float(each[3]), each[4] == "fits") for each in found if each]


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        (f"{LLAMA} --train.micro_batch_size 2", "recompute full:uniform:1"),
        (f"{LLAMA} --parallel.use_distributed_optimizer False", "optim_grads_params"),
        param((f"{LLAMA} --parallel.tensor_model_parallel_size 2 --train.micro_batch_size 4", "micro_batch_size 1")),
        param((f"{LLAMA.replace('llama3_8b', 'llama3_70b')} --parallel.tensor_model_parallel_size 8", "")),
    ],
    ids=["activations", "states", "batch", "large"],
)
def test_each_change_has_the_bytes_it_says(flags: str, fits: str) -> None:
    lines = printed(flags, 16)
    assert re.match(r"out of memory: predicted are [\d.]+ GiB on a rank of stage 0 \(\w+ [\d.]+ GiB, ", lines[0])
    assert "63.28 GiB (80%" in lines[1]
    before, found = priced(flags, 16), rows(lines)
    assert 3 <= len(found) == len(lines) - 3
    for own, less, held, is_fitting in found:
        assert priced(f"{flags} {own}", 16) == pytest.approx(held, abs=0.006)
        assert before - held == pytest.approx(less, abs=0.011) and less > 0.009 * before
        assert is_fitting == (held <= SAFE)
    assert [row[3] for row in found] == sorted((row[3] for row in found), reverse=True)
    assert [row[1] for row in found if not row[3]] == sorted((row[1] for row in found if not row[3]), reverse=True)
    assert any(fits in row[0] and row[3] for row in found) if fits else not any(row[3] for row in found)


def test_the_mildest_setting_that_fits_is_named() -> None:
    """Where the MLPs' recomputation is enough, not the blocks'; where the distributed optimizer is, not ZeRO-3."""
    assert any("recompute selective:mlp" in own and fits for own, _, _, fits in rows(printed(LONG, 8)))
    flags = f"{LLAMA} --parallel.use_distributed_optimizer False --parallel.tensor_model_parallel_size 2"
    (shards,) = [own for own, _, _, _ in rows(printed(f"{flags} --parallel.sequence_parallel True", 16))
                 if "distributed" in own or "sharding" in own]  # fmt: skip
    assert shards == "--parallel.use_distributed_optimizer True"


def test_the_state_of_a_large_model_goes_to_the_host_of_one_gpu() -> None:
    found = rows(printed(f"{LLAMA} --parallel.use_distributed_optimizer True {RECOMPUTED}", 1))
    assert ("--optimizer.optimizer_cpu_offload True", True) in [(own, fits) for own, _, _, fits in found]


def test_offloaded_activations_are_counted_by_their_share() -> None:
    """Between those of a run that keeps all and of one that recomputes all; on a CPU nothing is saved."""
    kept, half, gone = (priced(f"{LLAMA} --train.cpu_offloading_num_layers {blocks}", 16) for blocks in (0, 16, 32))
    assert kept - half == pytest.approx(half - gone) and kept - gone > 10
    assert gone == pytest.approx(priced(f"{LLAMA} {RECOMPUTED}", 16), rel=0.01)
    config = parse_config(f"{LLAMA} --device cpu --train.cpu_offloading_num_layers 32".split())
    shape, cpu = resolve(config.model, None), Modules(cuda=False, transformer_engine=False)
    plain = parse_config(f"{LLAMA} --device cpu".split())
    found = [fullest([as_case(each, 16, shape, cpu)], shape)[0].total for each in (config, plain)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("llama3_8b", "qkv_linear core_attn attn_proj"),
        ("gpt3_175b", "qkv_linear"),  # TE could not read queries, keys and values that are one tensor
        ("mixtral_8x7b", "qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"),
    ],
)
def test_modules_of_the_model_are_offloaded_where_transformer_engine_is(model: str, named: str) -> None:
    sharded = "--parallel.tensor_model_parallel_size 8 --parallel.sequence_parallel True --model.seq_length 2048"
    config = parse_config(f"{LLAMA.replace('llama3_8b', model)} {sharded} --train.micro_batch_size 8".split())
    shape = resolve(config.model, None)
    away = {"train.offload_modules": tuple(named.split())}
    for device, modules, there in (("auto", GPU, True), ("cpu", GPU, False), ("auto", PLAIN, False)):
        asked = dataclasses.replace(config, device=device)
        found = changes(asked, 8, shape, modules, 1e15, 1e15)  # where all fits, the mildest setting
        assert (away in [fields for fields, _ in found]) == there


PLAIN = Modules(cuda=True, transformer_engine=False)


def test_nothing_goes_to_a_host_without_the_room() -> None:
    """Of 4 GiB a rank, 2.4 are safe."""
    poor = dataclasses.replace(H100, host_bytes=4 * 2**30)
    with_room, without = ("\n".join(printed(LONG, 8, room)) for room in (H100, poor))
    assert "--train.offload_modules qkv_linear core_attn attn_proj: " in with_room
    assert "offload" not in without and "recompute" in without


def test_state_in_fewer_bits_can_go_to_the_host_in_fp32() -> None:
    low = "--optimizer.use_precision_aware_optimizer True"
    moments = "--optimizer.exp_avg_dtype bf16 --optimizer.exp_avg_sq_dtype bf16"
    flags = f"{LLAMA} --parallel.use_distributed_optimizer True {RECOMPUTED} {low} {moments}"
    assert (
        "--optimizer.optimizer_cpu_offload True --optimizer.use_precision_aware_optimizer False "
        "--optimizer.exp_avg_dtype fp32 --optimizer.exp_avg_sq_dtype fp32"
    ) in [own for own, _, _, _ in rows(printed(flags, 1))]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "--parallel.data_parallel_sharding_strategy optim_grads_params: "),
        ("--parallel.ddp_bucket_size 40000000", "strategy optim_grads_params --parallel.ddp_bucket_size None: "),
        (
            "--parallel.data_parallel_sharding_strategy zero2 --parallel.num_distributed_optimizer_instances 4",
            "strategy optim_grads_params --parallel.num_distributed_optimizer_instances 1: ",
        ),
    ],
    ids=["ZeRO-1", "buckets of DDP", "copies"],
)
def test_weights_in_shards_are_among_the_changes(more: str, words: str) -> None:
    assert any(words in line for line in printed(f"{LLAMA} {more}", 8))


def test_logits_in_pieces_are_among_the_changes() -> None:
    """Of 262,144 ids and 16,384 tokens, logits are what does not fit."""
    lines = printed("--model.shape gemma3_1b --model.seq_length 16384 --precision.dtype bf16 " + RECOMPUTED, 1, SMALL)
    assert any(line.strip().startswith("--train.cross_entropy_chunk_tokens 1024: ") for line in lines), lines


def test_lower_budgets_are_among_the_changes() -> None:
    """Where none fits the lowest that still saves something."""
    found = rows(printed(f"{LLAMA} --train.recompute auto:70GiB", 16))
    assert [own for own, _, _, fits in found if "recompute" in own and fits] == ["--train.recompute auto:64512MiB"]


def test_the_planner_is_asked_for_other_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """By a command that it reads."""
    command = printed(LLAMA, 64)[-1].partition("python -m tools.plan ")[2].partition(" (of slurm/clusters)")[0]
    words = command.replace("config.toml", "slurm/recipes/llama3_8b.toml").replace("CLUSTER", "h100_ib").split()
    assert main([*words, "--zero", "3"]) == 0
    assert "llama3_8b on 64 x " in capsys.readouterr().out


def test_what_should_have_fitted_is_said() -> None:
    lines = printed(LLAMA, 64, Room(bytes=400 * 2**30, words="the card's {}"))
    assert lines[1].startswith("By that it should have fitted")
    assert "a tenth less" in lines[2] and any(fits for _, _, _, fits in rows(lines))
