"""What would fit where memory ran out: priced again, legal, the fewest changes, and only what fits."""

import dataclasses
import re

import pytest

from models.resolve import resolve
from parallel.launch import Identity
from training.cli.parse import parse_config
from training.memory.oom_advice import Room, advice
from training.memory.oom_candidates import altered
from training.memory.planned import Modules, Planned
from training.memory.predicted import fullest

GPU = Modules(cuda=True, transformer_engine=True)
H100 = Room(bytes=79.1 * 2**30, words="the card's {}")
SMALL = Room(bytes=39.4 * 2**30, words="the card's {}")
RECOMPUTED = "--train.recompute_granularity full --train.recompute_method uniform --train.recompute_num_layers 1"
LLAMA = "--model.shape llama3_8b --model.seq_length 8192 --train.global_batch_size 64 --precision.dtype bf16"


def printed(flags: str, world_size: int, room: Room = H100) -> list[str]:
    config = parse_config(flags.split())
    assert config.problems(world_size) == []
    identity = Identity(world_size=world_size, local_world_size=8)
    return advice(config, identity, resolve(config.model, None), GPU, room).splitlines()


def priced(flags: str, world_size: int) -> float:
    config = parse_config(flags.split())
    assert config.problems(world_size) == []
    return fullest([Planned(config=config, world_size=world_size)], resolve(config.model, None), GPU)[0].total / 2**30


@pytest.mark.parametrize(
    "flags",
    [
        f"{LLAMA} --train.micro_batch_size 2",
        f"{LLAMA} --parallel.use_distributed_optimizer False",
        f"{LLAMA} --parallel.tensor_model_parallel_size 2 --train.micro_batch_size 2",
        f"{LLAMA.replace('llama3_8b', 'llama3_70b')} --parallel.tensor_model_parallel_size 8",
    ],
    ids=["activations", "states", "sequence", "large"],
)
def test_each_change_fits_and_has_the_bytes_it_says(flags: str) -> None:
    lines = printed(flags, 16)
    assert re.match(r"out of memory: predicted are [\d.]+ GiB on a rank of stage 0 \(\w+ [\d.]+ GiB, ", lines[0])
    assert "63.28 GiB (80%" in lines[1] and "least speed first" in lines[1]
    changes = lines[2:]
    assert 1 <= len(changes) <= 3
    for line in changes:
        change, _, said = line.strip().rpartition(": ")
        ranks = re.match(r"([\d,]+) ranks ?", change)
        own = change[ranks.end() :] if ranks else change
        world = int(ranks[1].replace(",", "")) if ranks else 16
        assert priced(f"{flags} {own}", world) == pytest.approx(float(said.split()[0]), abs=0.006)
        assert priced(f"{flags} {own}", world) <= 0.8 * 79.1
        fields = own.split(" --")
        pairs = ("sequence_parallel", "recompute", "exp_avg")
        if len(fields) > 1 and not ranks and not any(pair in own for pair in pairs):
            for left in range(len(fields)):  # none is there for nothing
                rest = " ".join(f"--{part.removeprefix('--')}" for at, part in enumerate(fields) if at != left)
                if not parse_config(f"{flags} {rest}".split()).problems(world):  # or another one needs it
                    assert priced(f"{flags} {rest}", world) > 0.8 * 79.1


def test_the_state_of_a_large_model_goes_to_the_host_of_one_gpu() -> None:
    lines = printed(f"{LLAMA} --parallel.use_distributed_optimizer True {RECOMPUTED}", 1)
    assert any(line.strip().startswith("--optimizer.optimizer_cpu_offload True: 5") for line in lines[2:]), lines


def test_offloaded_activations_are_offered_and_counted_by_their_share() -> None:
    """Between those of a run that keeps all and of one that recomputes all; on a CPU nothing is saved."""
    kept, half, gone = (priced(f"{LLAMA} --train.cpu_offloading_num_layers {blocks}", 16) for blocks in (0, 16, 32))
    assert kept - half == pytest.approx(half - gone) and kept - gone > 10
    assert gone == pytest.approx(priced(f"{LLAMA} {RECOMPUTED}", 16), rel=0.01)
    long = "--model.seq_length 131072 --train.cross_entropy_chunk_tokens 1024 --parallel.sequence_parallel True"
    lines = printed(f"{LLAMA} --parallel.tensor_model_parallel_size 8 {long}", 8)
    assert any("--train.cpu_offloading_num_layers 32" in line for line in lines[2:]), lines
    config = parse_config(f"{LLAMA} --device cpu --train.cpu_offloading_num_layers 32".split())
    shape, cpu = resolve(config.model, None), Modules(cuda=False, transformer_engine=False)
    plain = parse_config(f"{LLAMA} --device cpu".split())
    found = [fullest([Planned(config=each, world_size=16)], shape, cpu)[0].total for each in (config, plain)]
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
    flags = f"{LLAMA.replace('llama3_8b', model)} {sharded}"
    config = parse_config(flags.split())
    shape, asked = resolve(config.model, None), Planned(config=config, world_size=8)
    words = f"--train.fine_grained_activation_offloading True --train.offload_modules {named}"
    (found,) = (choice for choice in altered(asked, shape, 8) if str(choice) == words)
    for modules, less in ((GPU, True), (Modules(cuda=True, transformer_engine=False), False)):
        plain, away = (fullest([each], shape, modules)[0] for each in (asked, found.planned))
        assert (away.total < plain.total) == less and (away.host > plain.host) == less
    assert not [choice for choice in altered(found.planned, shape, 8) if "offload_modules" in str(choice)]
    on_a_cpu = Planned(config=dataclasses.replace(config, device="cpu"), world_size=8)
    assert not [choice for choice in altered(on_a_cpu, shape, 8) if "offload_modules" in str(choice)]


def test_modules_are_offered_on_long_sequences() -> None:
    long = "--model.seq_length 98304 --train.cross_entropy_chunk_tokens 1024 --parallel.sequence_parallel True"
    lines = printed(f"{LLAMA} --parallel.tensor_model_parallel_size 8 {long}", 8)
    assert any("--train.offload_modules qkv_linear core_attn attn_proj: " in line for line in lines[2:]), lines


def test_nothing_goes_to_a_host_without_the_room() -> None:
    """Of 16 GiB a rank, 9.6 are safe."""
    long = "--model.seq_length 98304 --train.cross_entropy_chunk_tokens 1024 --parallel.sequence_parallel True"
    flags = f"{LLAMA} --parallel.tensor_model_parallel_size 8 {long}"
    poor = dataclasses.replace(H100, host_bytes=16 * 2**30)
    with_room, without = ("\n".join(printed(flags, 8, room)) for room in (H100, poor))
    assert "offload" in with_room and "offload" not in without and "recompute" in without


def test_state_in_fewer_bits_can_go_to_the_host_in_fp32() -> None:
    low = "--optimizer.use_precision_aware_optimizer True"
    moments = "--optimizer.exp_avg_dtype bf16 --optimizer.exp_avg_sq_dtype bf16"
    config = parse_config(f"{LLAMA} --parallel.use_distributed_optimizer True {RECOMPUTED} {low} {moments}".split())
    found = [str(one) for one in altered(Planned(config=config, world_size=1), resolve(config.model, None), 1)]
    assert (
        "--optimizer.optimizer_cpu_offload True --optimizer.use_precision_aware_optimizer False "
        "--optimizer.exp_avg_dtype fp32 --optimizer.exp_avg_sq_dtype fp32"
    ) in found


def test_the_cheapest_comes_first() -> None:
    """Sharding the optimizer costs nothing, recomputing everything a third of the products."""
    lines = printed(f"{LLAMA} --parallel.use_distributed_optimizer False --parallel.tensor_model_parallel_size 2 "
                 "--parallel.sequence_parallel True", 16)  # fmt: skip
    assert "--parallel.use_distributed_optimizer True" in lines[2]
    assert not any("granularity full" in line for line in lines)


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


def test_where_nothing_fits_the_ranks_that_would() -> None:
    lines = printed("--model.shape llama31_405b --model.seq_length 8192 --train.global_batch_size 64 "
                 "--precision.dtype fp16", 8, Room(bytes=14 * 2**30, words="the card's {}"))  # fmt: skip
    assert lines[1].startswith("No change of this configuration fits below 11.20 GiB on 8 ranks")
    ranks = int(re.match(r"([\d,]+) ranks would do", lines[2])[1].replace(",", ""))  # type: ignore[index]
    assert 256 <= ranks <= 8192 and "TP 8" in lines[2]


def test_what_should_have_fitted_is_said() -> None:
    lines = printed(LLAMA, 64, Room(bytes=400 * 2**30, words="the card's {}"))
    assert lines[1].startswith("By that it should have fitted")
    assert "a tenth less" in lines[2] and len(lines) == 6
