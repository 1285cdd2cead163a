"""Layouts by short names (``tp2pp2dp2``), and a recipe's architecture shrunk to laptop size. No torch here."""

import dataclasses
import re

from models.shapes import resolve
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.layout import expert_replica_size, replica_size
from training.config import CheckpointConfig, RunConfig

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "bucket": "ddp_bucket_size",
}
WORD = re.compile(r"(vpp|etp|ep|tp|pp|cp|dp|mbs|first|last|bucket)(\d+)|(sp|overlap|zero0|allgather)")


def with_layout(config: RunConfig, name: str) -> tuple[RunConfig, int]:
    """The configuration on layout ``name``, and its world size.

    A name is made of tpN, ppN, vppN, cpN, dpN, epN, etpN, mbsN (micro-batch), firstN and lastN (layers of the first
    and last stage), bucketN (elements), sp (sequence parallel), overlap (of both gradient reduce and parameter gather),
    zero0 (no distributed optimizer) and allgather (experts' dispatcher). Without dpN there is one replica, or as many
    as the experts need. Raises UserError for anything else.
    """
    if WORD.sub("", name):
        raise UserError(
            f'layout "{name}": cannot read "{WORD.sub("", name)}". Write it like tp2sp, pp2vpp2 or tp2pp2dp2overlap.'
        )
    changes: dict[str, object] = {}
    dp, micro_batch_size = None, config.train.micro_batch_size
    for size_name, number, switch in WORD.findall(name):
        if size_name == "dp":
            dp = int(number)
        elif size_name == "mbs":
            micro_batch_size = int(number)
        elif size_name:
            changes[SIZES[size_name]] = int(number)
        elif switch == "sp":
            changes["sequence_parallel"] = True
        elif switch == "overlap":
            changes |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
        elif switch == "allgather":
            changes["moe_token_dispatcher_type"] = "allgather"
        else:
            changes["use_distributed_optimizer"] = False
    parallel = ParallelConfig(**changes)  # type: ignore[arg-type]
    changed = dataclasses.replace(
        config, parallel=parallel, train=dataclasses.replace(config.train, micro_batch_size=micro_batch_size)
    )
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    replicas = dp or max(1, expert_replica_size(parallel) // dense)
    return changed, replica_size(parallel) * replicas


def shrink(config: RunConfig, num_layers: int = 4, train_iters: int = 4) -> RunConfig:
    """The recipe's architecture (norms, biases, activation, positions, ties) at 4 layers of width 64, in fp32.

    Vocabulary 257 is no multiple of 128, so padding is exercised; dropout is off, since its draws depend on the layout.
    """
    shape = resolve(config.model, None)
    grouped = shape.num_query_groups < shape.num_attention_heads
    model = dataclasses.replace(
        config.model,
        num_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2 if grouped else 4,
        kv_channels=16,
        ffn_hidden_size=176,
        seq_length=64,
        vocab_size=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=max(64, min(shape.max_position_embeddings, 512)),
    )
    return dataclasses.replace(
        config,
        model=model,
        run_dir=None,
        nproc=None,
        device="cpu",
        parallel=ParallelConfig(),
        precision=dataclasses.replace(config.precision, dtype="fp32", fp8=None, loss_scale=None),
        data=dataclasses.replace(config.data, paths=(), tokenizer="byte"),
        optimizer=dataclasses.replace(config.optimizer, lr=3e-3, min_lr=0.0, lr_warmup_iters=0, lr_decay_iters=None),
        train=dataclasses.replace(
            config.train,
            train_iters=train_iters,
            exit_interval=None,
            global_batch_size=8,
            micro_batch_size=1,
            rampup_batch_size=None,
            eval_interval=None,
        ),
        checkpoint=CheckpointConfig(),
    )
