"""--format megatron: what Megatron-LM's own load_checkpoint makes of it. The only user of megatron.training."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import some
from checkpoint_parts import (
    GLOBAL_BATCH_SIZE,
    SEQ_LENGTH,
    VOCABULARY,
    Parts,
    assembled,
    configuration,
    differing,
    on_ranks,
    sizes,
)
from models.resolve import resolve
from models.sublayers import hybrid_layer_pattern
from parallel.config import ParallelConfig
from parallel.stages import layers_per_chunk
from tests.tools.test_reshard_to_megatron import train_and_save
from tools.reshard.__main__ import main
from training.config import recipe
from training.config.run_config import RunConfig
from training.config.schedules import learning_schedule


def command_line(config: RunConfig, load: Path) -> list[str]:
    """Of the job that goes on. TP and CP above 1 make Megatron-LM ask for a GPU's properties."""
    shape, parallel = resolve(config.model, VOCABULARY), config.parallel
    pattern = hybrid_layer_pattern(shape, layers_per_chunk(parallel, shape.num_layers))
    values = {
        "hybrid-layer-pattern": pattern,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "num-attention-heads": shape.num_attention_heads,
        "max-position-embeddings": shape.max_position_embeddings,
        "tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        "seq-length": SEQ_LENGTH,
        "micro-batch-size": 2,
        "global-batch-size": GLOBAL_BATCH_SIZE,
        "train-iters": config.train.train_iters,
        "lr": config.optimizer.lr,
        "min-lr": config.optimizer.min_lr,
        "lr-decay-style": config.optimizer.lr_decay_style,
        "lr-warmup-iters": config.optimizer.lr_warmup_iters,
        "weight-decay": config.optimizer.weight_decay,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY,
        "transformer-impl": "local",
        "load": load,
    }
    switches = ["use-distributed-optimizer", "exit-on-missing-checkpoint", "disable-bias-linear", "swiglu"]
    if config.precision.dtype == "bf16":
        switches.append("bf16")
    return [*(f"--{name}={value}" for name, value in values.items()), *(f"--{name}" for name in switches)]


def load_and_compare(parts: Parts, config: RunConfig, folder: Path, source: Path) -> None:
    """As pretrain() does it between building the model and its first step."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training import arguments, global_vars
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.training import get_optimizer_param_scheduler

    sys.argv = ["pretrain_hybrid.py", *command_line(config, folder / "theirs")]
    args = arguments.parse_args()
    args.rank, args.world_size = parts.ranks.rank, parts.ranks.layout.world_size  # torchrun would say so
    arguments.validate_args(args)
    global_vars.set_args(args)
    init_num_microbatches_calculator(
        parts.ranks.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    scheduler: OptimizerParamScheduler = get_optimizer_param_scheduler(parts.optimizer)
    iteration, operations = load_checkpoint(list(parts.chunks), parts.optimizer, scheduler)
    assert (iteration, args.consumed_train_samples) == (2, 2 * GLOBAL_BATCH_SIZE)
    assert operations > 0
    assert scheduler.num_steps == 2 * GLOBAL_BATCH_SIZE
    schedule = learning_schedule(config.optimizer, config.train, config.model.seq_length)
    assert {group["lr"] for group in parts.optimizer.param_groups} == {schedule.learning_rate(scheduler.num_steps)}
    whole = assembled(parts, folder / "pieces")
    if whole is not None:
        assert differing(whole, torch.load(source / "global.pt")) == []


CASES: dict[str, tuple[dict[str, Any], ParallelConfig, int, list[str]]] = {
    "by weight": ({}, sizes(), 1, []),
    "flat, PP2": ({"dtype": "bf16"}, sizes(pp=2), 2, [
        "--optimizer_format", "dp_reshardable", "--pipeline_model_parallel_size", "2", "--transformer_impl", "local",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, ["by weight"]))
def test_megatron_lm_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """Iteration, samples, schedule, weights and moments, through every check that it makes."""
    model, parallel, readers, more = CASES[name]
    config = configuration(sizes(), shape="llama2_tiny", **model)
    on_ranks(1, config, train_and_save, tmp_path / "run", recipe.dump(config))
    assert main([str(tmp_path / "run"), str(tmp_path / "theirs"), "--format", "megatron", *more]) == 0
    read = configuration(parallel, shape="llama2_tiny", **model)
    on_ranks(readers, read, load_and_compare, read, tmp_path, tmp_path / "run")
