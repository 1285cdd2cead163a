"""What is wrong with a configuration is found before any rank starts: all of it, with the fix."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from training.cli.parse import parse_config
from training.config.recipe import dump, dump_changed, load, sections
from training.config.run_config import RunConfig
from training.config.schedules import learning_schedule

DEBUG = "slurm/recipes/debug.toml"


def problems(flags: str, world_size: int = 1) -> str:
    """The problems of the debug recipe with these flags over it, one a line."""
    return "\n".join(parse_config([DEBUG, *flags.split()]).problems(world_size))


@pytest.mark.parametrize("flags", ["", "--data.paths a b --eval.validation_sets x y --model.window_size 3 0 --nproc 2"])
def test_what_is_not_at_its_default_says_all(flags: str, tmp_path: Path) -> None:
    config, path = parse_config([DEBUG, *flags.split()]), tmp_path / "short.toml"
    path.write_text(dump_changed(config))
    assert load(path) == config
    assert len(path.read_text().splitlines()) < len(dump(config).splitlines()) / 2
    path.write_text(dump_changed(RunConfig()))
    assert path.read_text() == '[model]\nshape = "debug"\n' and load(path) == RunConfig()


def test_the_debug_recipe_has_none() -> None:
    assert problems("") == ""


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        # layout
        (
            "--parallel.tensor_model_parallel_size 2",
            3,
            ["3 ranks", "TP 2 x CP 1 x PP 1 = 2", "Launch 2 or 4"],
        ),
        ("--parallel.pipeline_model_parallel_size 4", 2, ["2 ranks", "Launch 4 ranks"]),
        # precision
        (
            "--precision.dtype bf16 --precision.fp8 hybrid --precision.fp8_recipe mxfp8",
            1,
            ['precision.fp8_recipe = "mxfp8" needs precision.fp8 = "e4m3"', 'found "hybrid"'],
        ),
        ("--model.megatron fp8_param=True", 1, ["model.megatron: fp8_param is set by Triplane's own fields"]),
        ("--parallel.megatron fp8_param_gather=True", 1, ["fp8_param_gather is set by Triplane's own fields"]),
        ("--precision.fp8_param_gather True", 1, ["precision.fp8_param_gather needs precision.fp8"]),
        (
            "--device cuda --precision.fp8 hybrid --precision.fp8_param_gather True --model.ffn_hidden_size 192 "
            "--parallel.use_distributed_optimizer False",
            1,
            ["precision.fp8_param_gather needs parallel.use_distributed_optimizer = true, found false"],
        ),
        (
            "--device cuda --precision.fp8 e4m3 --precision.fp8_recipe mxfp8 --precision.fp8_param_gather True "
            "--model.ffn_hidden_size 192 --parallel.overlap_grad_reduce True --parallel.overlap_param_gather True",
            1,
            ["gathers weights in the gradients' memory", "parallel.overlap_param_gather"],
        ),
        ("--parallel.megatron fp4_param_gather=True", 1, ["parallel.megatron: fp4_param_gather is refused"]),
        ("--precision.fp8_shadow warn:10", 1, ["precision.fp8_shadow needs precision.fp8"]),
        ("--precision.fp4 e2m1", 1, ['precision.fp4 needs precision.dtype = "bf16", found "fp32"']),
        (
            "--precision.dtype bf16 --precision.fp8 e4m3 --precision.fp4 e2m1",
            1,
            ['precision.fp8 = "e4m3" and precision.fp4 = "e2m1" exclude each other'],
        ),
        ("--model.megatron fp4=e2m1", 1, ["model.megatron: fp4 is set by Triplane's own fields"]),
        (
            "--device cuda --precision.dtype bf16 --precision.fp4 e2m1 --model.ffn_hidden_size 192 "
            "--kernels.tp_comm_overlap True --parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel True",
            2,
            ["kernels.tp_comm_overlap cannot run: Transformer Engine 2.19 has no buffers for fp4"],
        ),
        (
            "--precision.dtype bf16 --precision.fp8 hybrid --precision.fp8_shadow warn:0",
            1,
            ['such as "warn:500" or "stop:500:0.25", found "warn:0".'],
        ),
        (
            "--device cuda --precision.dtype bf16 --precision.fp8 hybrid --precision.fp8_recipe delayed "
            "--model.shape deepseek_v3_tiny --model.qk_pos_emb_head_dim 32 --train.recompute "
            "full:uniform:1",
            1,
            ['precision.fp8_recipe = "delayed" with model.mtp_num_layers', "recomputes with wrong scales"],
        ),
        ("--precision.first_last_layers_bf16 True", 1, ["precision.first_last_layers_bf16 needs precision.fp8"]),
        (
            "--precision.dtype bf16 --precision.fp8 hybrid --precision.fp8_recipe delayed "
            "--precision.first_last_layers_bf16 True --precision.num_layers_at_start_in_bf16 -1",
            1,
            ['needs another precision.fp8_recipe than "delayed"', "num_layers_at_start_in_bf16 must be 0 or more"],
        ),
        # heads and groups
        (
            "--parallel.tensor_model_parallel_size 3 --model.num_query_groups 1 --model.ffn_hidden_size 177 "
            "--model.make_vocab_size_divisible_by 129",
            3,
            ["model.num_attention_heads 4 is not divisible", "size 3", "1, 2, 4"],
        ),
        (
            "--model.num_attention_heads 12 --model.num_query_groups 4 --model.hidden_size 96 "
            "--model.ffn_hidden_size 192 --model.make_vocab_size_divisible_by 384 "
            "--parallel.tensor_model_parallel_size 6",
            6,
            ["model.num_query_groups 4 neither divides nor is divided", "size 6", "1, 2, 4, 12"],
        ),
        (
            "--model.kv_channels 1 --model.num_query_groups 1 --model.position_embedding_type none "
            "--parallel.tensor_model_parallel_size 4",
            4,
            ["1 groups make 6 rows", "size 4"],
        ),
        ("--model.ffn_hidden_size 177 --parallel.tensor_model_parallel_size 2", 2, ["177", "Use 176 or 178"]),
        (
            "--model.make_vocab_size_divisible_by 3 --parallel.tensor_model_parallel_size 2",
            2,
            ["model.make_vocab_size_divisible_by 3", "Use 128"],
        ),
        # layers
        (
            "--parallel.pipeline_model_parallel_size 3",
            3,
            ["model.num_layers 4", "PP 3 x VPP 1 = 3", "3 or 6"],
        ),
        (
            "--parallel.pipeline_model_parallel_size 4 --parallel.virtual_pipeline_model_parallel_size 2",
            4,
            ["model.num_layers 4", "PP 4 x VPP 2 = 8 chunks"],
        ),
        # sequence
        (
            "--model.seq_length 63 --parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel",
            2,
            ["model.seq_length 63", "TP 2 x CP 1 (parallel.sequence_parallel)", "62 or 64"],
        ),
        (
            "--model.seq_length 66 --parallel.context_parallel_size 2",
            2,
            ["seq_length 66", "2 x CP 2", "64 or 68"],
        ),
        (
            "--model.shape gpt2_tiny --model.seq_length 2048",
            1,
            ["model.seq_length 2048 exceeds model.max_position_embeddings 1024"],
        ),
        # batch
        (
            "--train.micro_batch_size 3",
            1,
            ["train.global_batch_size 8", "micro_batch_size 3 x DP 1", "6 or 9"],
        ),
        ("", 3, ["train.global_batch_size 8", "train.micro_batch_size 1 x DP 3 = 3", "6 or 9"]),
        ("--train.rampup_batch_size 3 2 10", 1, ["rampup_batch_size", "8 - 3 = 5"]),
        (
            "--train.global_batch_size 9 --parallel.pipeline_model_parallel_size 2 "
            "--parallel.virtual_pipeline_model_parallel_size 2",
            2,
            ["train.global_batch_size 9 makes 9 microbatches", "size 2", "8 or 10"],
        ),
        (
            "--train.rampup_batch_size 2 1 10 --parallel.pipeline_model_parallel_size 2 "
            "--parallel.virtual_pipeline_model_parallel_size 2",
            2,
            ["train.global_batch_size 7 makes 7 microbatches"],
        ),
        # schedule
        ("--optimizer.lr_warmup_iters 10", 1, ["optimizer.lr_warmup_iters", "optimizer.lr_decay_iters"]),
        ("--optimizer.lr_wsd_decay_iters -1", 1, ["optimizer.lr_wsd_decay_iters must not be negative, found -1"]),
        ("--optimizer.lr_decay_iters 0", 1, ["optimizer.lr_decay_iters must be 1 or more, found 0"]),
        ("--optimizer.start_weight_decay -1", 1, ["optimizer.start_weight_decay must not be negative"]),
        ("--optimizer.adam_eps 0", 1, ["optimizer.adam_eps must be above 0"]),
        (
            "--optimizer.clip_grad nan --optimizer.lr inf",
            1,
            ["clip_grad must be a finite", "lr must be a finite"],
        ),
        # recomputation
        ("--train.recompute full", 1, ['"full:uniform:1"', 'found "full"']),
        ("--train.recompute block:1", 1, ['found "block:1"']),
        (
            "--train.recompute full:block:0",
            1,
            ['found "full:block:0"'],
        ),
        ("--train.recompute selective:", 1, ['found "selective:"']),
        ("--train.recompute selective:core_attn,attn", 1, ["modules: core_attn, mlp,"]),
        (
            "--train.recompute selective:moe,mla_up_proj",
            1,
            [
                '"selective:moe" needs a model with model.num_moe_experts',
                'mla_up_proj" needs a model with model.multi_la',
            ],
        ),
        (
            "--model.shape pythia_tiny --train.recompute full:block:1",
            1,
            ['train.recompute "full:block" cannot be with model.parallel_residual'],
        ),
        (
            "--device cuda --model.shape deepseek_v3_tiny --precision.dtype bf16 --precision.fp8 e4m3 "
            "--precision.fp8_recipe delayed --train.recompute auto:0GiB",
            1,
            ["recomputes with wrong scales"],
        ),
        # the rest
        ("--train.generate_tokens -1", 1, ["train.generate_tokens"]),
        ("--train.sample_interval 5", 1, ["train.sample_interval needs train.generate_tokens"]),
        ("--train.sample_interval 0 --train.generate_tokens 5", 1, ["train.sample_interval must be 1 or more"]),
        ("--train.generate_tokens 5 --train.sample_prompts", 1, ["train.generate_tokens needs train.sample_prompts"]),
        ("--nproc 0", 1, ["nproc must be 1 or more, found 0"]),
        ("--nproc -2", -2, ["nproc must be 1 or more, found -2"]),
        ("--world_size 8", 1, ["world_size is what --dry_run plans for"]),
        ("--checkpoint.finetune", 1, ["checkpoint.load"]),
        ("--parallel.expert_model_parallel_size 2", 2, ["a model with experts"]),
        (
            "--device cpu --parallel.megatron high_priority_stream_groups=['dp_cp']",
            1,
            ["high_priority_stream_groups cannot be"],
        ),
        (
            "--device cpu --parallel.megatron use_sharp=True",
            1,
            ["parallel.megatron: use_sharp cannot be: it needs GPUs"],
        ),
        ("--device cpu --parallel.megatron nccl_ub=True", 1, ["parallel.megatron: nccl_ub cannot be: it needs GPUs"]),
        (
            "--model.shape mixtral_tiny --parallel.megatron nccl_ub=True --parallel.pipeline_model_parallel_size 2",
            2,
            ["parallel.megatron: nccl_ub cannot be with experts and pipeline"],
        ),
        ("--device cpu --kernels.cuda_graph_impl local", 1, ["kernels.cuda_graph_impl", "cannot run: it needs a GPU"]),
        (
            "--device cuda --kernels.cuda_graph_impl local --data.reset_attention_mask",
            1,
            ['"local" cannot be with data.reset_attention_mask or reset_position_ids: documents start elsewhere'],
        ),
        (
            "--device cuda --kernels.cuda_graph_impl local --train.recompute selective",
            1,
            ['"local" cannot be with train.recompute: what'],
        ),
        (
            "--device cuda --kernels.cuda_graph_impl local --model.shape deepseek_v2_tiny --precision.dtype fp16",
            1,
            ['"local" cannot be with model.multi_latent_attention', 'cannot be with precision.dtype = "fp16"'],
        ),
        (
            "--device cuda --kernels.cuda_graph_impl local --precision.dtype bf16 --precision.fp4 e2m1 "
            "--parallel.megatron nccl_ub=True --model.ffn_hidden_size 192",
            1,
            ['"local" cannot be with precision.fp4', '"local" cannot be with nccl_ub'],
        ),
        (
            "--device cuda --kernels.cuda_graph_impl local --train.rampup_batch_size 2 2 10 "
            "--parallel.pipeline_model_parallel_size 2",
            2,
            ['"local" cannot be with train.rampup_batch_size in a pipeline'],
        ),
        (
            "--device cuda --train.compile --precision.dtype bf16 --precision.fp8 hybrid",
            1,
            ["train.compile cannot be with precision.fp8"],
        ),
        (
            "--device cuda --train.compile --kernels.cuda_graph_impl local",
            1,
            ["train.compile cannot be with kernels.cuda_graph_impl"],
        ),
        ("--parallel.sequence_parallel", 1, ["tensor_model_parallel_size > 1"]),
        ("--model.megatron moe_router_topk", 1, ['model.megatron: expected "field=value"']),
        ("--optimizer.megatron use_precision_aware_optimizer=True", 1, ["is set by Triplane's own fields"]),
        ("--optimizer.exp_avg_dtype bf16", 1, ['exp_avg_dtype "bf16" needs optimizer.use_precision_aware_optimizer']),
        (
            "--device cpu --precision.dtype bf16 --optimizer.use_precision_aware_optimizer",
            1,
            ["Transformer Engine's FusedAdam needs a GPU"],
        ),
        ("--device cuda --optimizer.use_precision_aware_optimizer", 1, ["weights in fp32 are their own main weights"]),
        (
            "--device cuda --precision.dtype bf16 --optimizer.use_precision_aware_optimizer "
            "--parallel.data_parallel_sharding_strategy optim_grads_params",
            2,
            ['needs ZeRO-1 (such as parallel.use_distributed_optimizer = true), found "optim_grads_params"'],
        ),
        (
            "--device cuda --precision.dtype bf16 --optimizer.use_precision_aware_optimizer "
            "--optimizer.exp_avg_dtype fp8 --optimizer.optimizer_cpu_offload",
            1,
            ['exp_avg_dtype "fp8" cannot be with optimizer.optimizer_cpu_offload: the host\'s Adam keeps fp32'],
        ),
        ("--device cpu --optimizer.optimizer_cpu_offload", 1, ["is in the host's memory already"]),
        (
            "--device cuda --optimizer.optimizer_cpu_offload --no-parallel.use_distributed_optimizer",
            1,
            ["optimizer_cpu_offload needs ZeRO-1", 'found "no_shard"'],
        ),
        (
            "--device cuda --optimizer.optimizer_cpu_offload --optimizer.optimizer torch.optim:SGD",
            1,
            ['optimizer_cpu_offload needs optimizer.optimizer = "adam"'],
        ),
        (
            "--device cuda --precision.dtype bf16 --precision.fp8 hybrid --precision.fp8_param_gather "
            "--optimizer.optimizer_cpu_offload --model.ffn_hidden_size 192",
            1,
            ["optimizer_cpu_offload cannot be with precision.fp8_param_gather: the host has no fp8"],
        ),
        (
            "--device cuda --parallel.data_parallel_sharding_strategy zero3 --optimizer.optimizer_cpu_offload "
            "--optimizer.optimizer_offload_fraction 0.5 --optimizer.megatron overlap_cpu_optimizer_d2h_h2d=True",
            2,
            ['optimizer.optimizer_offload_fraction needs ZeRO-1, found "zero3"', "overlap_cpu_optimizer_d2h_h2d needs"],
        ),
        ("--optimizer.optimizer_offload_fraction 0", 1, ["optimizer_offload_fraction must be in (0, 1], found 0"]),
        ("--model.megatron cpu_offloading=true", 1, ["train.cpu_offloading_num_layers"]),
        ("--model.megatron hidden_size=3", 1, ["hidden_size is set by Triplane's own fields"]),
        ("--parallel.megatron a=1 a=2", 1, ["parallel.megatron: a is given twice"]),
        ("--model.shape lama3_8b", 1, ['model.shape "lama3_8b" is unknown', "llama3_8b"]),
    ],
)
def test_a_problem_says_the_numbers_and_the_way_out(flags: str, world_size: int, words: list[str]) -> None:
    found = problems(flags, world_size)
    assert all(word in found for word in words), found
    assert len(found.splitlines()) <= 2, found


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--parallel.tensor_model_parallel_size 4", 4),  # 2 query groups: each is held by two ranks
        ("--parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel", 8),
        ("--parallel.context_parallel_size 2 --parallel.tensor_model_parallel_size 2 "
         "--parallel.sequence_parallel --model.seq_length 60", 4),
        ("--parallel.pipeline_model_parallel_size 4 --parallel.num_layers_in_first_pipeline_stage 1", 4),
        ("--train.rampup_batch_size 2 2 10 --parallel.pipeline_model_parallel_size 2 "
         "--parallel.virtual_pipeline_model_parallel_size 2", 2),
        ("--optimizer.lr_warmup_iters 9", 1),
        ("--device cuda --optimizer.optimizer_cpu_offload --optimizer.optimizer_offload_fraction 0.5", 1),
        ("--device cuda --optimizer.optimizer_cpu_offload --parallel.data_parallel_sharding_strategy zero2 "
         "--optimizer.optimizer torch.optim:SGD", 2),
        ("--device cuda --precision.dtype bf16 --optimizer.use_precision_aware_optimizer "
         "--optimizer.exp_avg_dtype fp8", 1),
        ("--optimizer.lr_warmup_iters 20 --optimizer.lr_decay_style constant", 1),
        ("--world_size 8 --dry_run", 8),
    ],
)  # fmt: skip
def test_what_works_is_not_refused(flags: str, world_size: int) -> None:
    assert problems(flags, world_size) == ""


def test_all_problems_are_found_at_once() -> None:
    found = problems(
        "--model.shape nope --parallel.pipeline_model_parallel_size 3 --train.micro_batch_size 3 "
        "--checkpoint.keep 0 --log.log_interval 0 --data.split x --optimizer.lr -1",
        world_size=4,
    )
    for word in (
        "nope",
        "4 ranks",
        "micro_batch_size 3",
        "checkpoint.keep",
        "log.log_interval",
        "split",
        "lr -1",
    ):
        assert word in found
    assert len(found.splitlines()) == 7


def test_a_broken_section_hides_no_other() -> None:
    found = problems("--parallel.tensor_model_parallel_size 0 --model.num_query_groups 3 --train.micro_batch_size 3")
    assert "parallel.tensor_model_parallel_size must be 1 or more" in found
    assert "model.num_query_groups 3" in found
    assert "train.micro_batch_size 3" in found


def test_iterations_become_samples() -> None:
    config = parse_config([DEBUG, "--optimizer.lr_warmup_iters", "4", "--optimizer.lr_decay_iters", "8"])
    schedule = learning_schedule(config.optimizer, config.train, config.model.seq_length)
    assert (schedule.warmup_samples, schedule.decay_samples) == (32, 64)
    assert schedule.learning_rate(32) == config.optimizer.lr
    assert schedule.learning_rate(65) == config.optimizer.min_lr


def test_a_length_has_one_unit() -> None:
    config = parse_config([
        DEBUG, *"--optimizer.lr_warmup_fraction 0.25 --optimizer.lr_decay_samples 70".split(),
        *"--optimizer.weight_decay_incr_samples 30 --optimizer.lr_wsd_decay_samples 0".split(),
    ])  # fmt: skip
    schedule = learning_schedule(config.optimizer, config.train, config.model.seq_length)
    assert (schedule.warmup_samples, schedule.decay_samples, schedule.wsd_decay_samples) == (17.5, 70, 0)
    assert schedule.weight_decay_samples == 30
    for length, one, other in (("warmup", "iters", "samples"), ("warmup", "samples", "fraction"),
                               ("decay", "iters", "samples"), ("wsd_decay", "iters", "samples")):  # fmt: skip
        found = problems(f"--optimizer.lr_{length}_{one} 1 --optimizer.lr_{length}_{other} 0.5".replace(
            "samples 0.5", "samples 2"))  # fmt: skip
        assert f"can only specify one of lr_{length}_{one} 1 and lr_{length}_{other}" in found, (one, other)
    assert "set lr_wsd_decay_samples instead" in problems(
        "--optimizer.lr_wsd_decay_iters 1 --optimizer.lr_decay_samples 9"
    )


def test_only_what_defaults_to_none_may_be_none() -> None:
    def check(kind: Any) -> None:
        for field in dataclasses.fields(kind):
            if "None" in str(field.type) and field.default is not dataclasses.MISSING:
                assert field.default is None, f"{kind.__name__}.{field.name}: TOML cannot say None"

    for kind in [RunConfig, *sections().values()]:
        check(kind)


def test_no_number_of_a_recipe_is_beyond_all_that_its_kind_can_be() -> None:
    """Every field with a fraction, of every section: 1e18 minutes were an OverflowError in a rank, without a name."""
    config = parse_config([DEBUG])
    fields = [
        (section, field.name)
        for section in (one.name for one in dataclasses.fields(config))
        if dataclasses.is_dataclass(getattr(config, section))
        for field in dataclasses.fields(getattr(config, section))
        if type(getattr(getattr(config, section), field.name)) is float
    ]
    assert len(fields) > 15
    for section, name in fields:
        for value in (1e18, -1e18, float("nan"), float("-inf"), 1e308):
            changed = dataclasses.replace(getattr(config, section), **{name: value})
            found = dataclasses.replace(config, **{section: changed}).problems(1)
            assert any(f"{section}.{name} must be" in problem for problem in found), (section, name, value, found)
