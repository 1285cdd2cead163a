"""Checkpoints as megatron-core itself writes them, on forked ranks; and as torch itself reads them."""

import argparse
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from torch.distributed.checkpoint import FileSystemReader, load

from checkpoint_parts import Parts
from models.gpt import Blueprint, transformer_config
from models.resolve import resolve
from parallel import ddp, groups
from parallel.ddp import unwrap
from ranks import run_ranks
from training import optimizer
from training.checkpoint import optimizer_state
from training.config.run_config import RunConfig
from training.step import RankParts


def states(parts: Parts) -> dict[str, Any]:
    """The sharded state dict of the model, as Megatron-LM names its parts."""
    several = len(parts.chunks) > 1
    return {
        f"model{number}" if several else "model": unwrap(chunk).sharded_state_dict()
        for number, chunk in enumerate(parts.chunks)
    }


def optimizer_states(parts: Parts, model: dict[str, Any], metadata: dict[str, Any], is_loading: bool = False) -> Any:
    """The optimizer's, which mcore wants flat for one chunk."""
    of = model if len(model) > 1 else model["model"]
    return parts.optimizer.sharded_state_dict(of, is_loading=is_loading, metadata=metadata)


def save(parts: Parts, folder: Path, form: str, consumed: int | None = None, **metadata: Any) -> None:
    """What Megatron-LM's save_checkpoint asks of megatron-core. consumed: samples, of which its arguments tell."""
    if parts.ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # Else each rank starts a server process for a queue that only background saves need, and leaves it behind.
    filesystem_async._results_queue = queue.Queue()
    content = {"distrib_optim_sharding_type": form, **metadata}
    model = states(parts)
    everything = model | {
        "optimizer": optimizer_states(parts, model, content),
        "iteration": 2,
        "checkpoint_version": 3.0,
        "args": consumed and argparse.Namespace(consumed_train_samples=consumed),
    }
    dist_checkpointing.save(everything, str(folder), content_metadata=content, async_strategy="mcore")


def train_and_save(parts: Parts, folder: Path, form: str, *metadata: tuple[str, Any]) -> None:
    parts.train(2)
    save(parts, folder, form, **dict(metadata))


def gpt_on_ranks(world_size: int, config: RunConfig, check: Any, *args: Any) -> None:
    """Call ``check(parts, *args)`` on every rank with a GPTModel of local modules, which cannot be trained on a CPU."""

    def run(identity: Any) -> None:
        with groups.start(config.layout(world_size), identity, device="cpu", seed=7) as ranks:
            model = gpt_model(config, ranks)
            chunks = ddp.wrap([model], config.parallel, config.precision, ranks)
            chunks[0].broadcast_params()  # each rank has drawn its own
            optim = optimizer.build(chunks, config.optimizer, config.parallel, config.precision, ranks, 64)
            check(Parts(RankParts(config=config, chunks=chunks, optimizer=optim, ranks=ranks)), *args)

    run_ranks(world_size, run)


def gpt_model(config: RunConfig, ranks: Any) -> GPTModel:
    """GPTModel of the same shape, blocks rather than sublayers, with random weights."""
    shape = resolve(config.model, 257)
    blueprint = Blueprint(model=config.model, shape=shape, parallel=config.parallel, precision=config.precision)
    of_blocks = transformer_config(blueprint, ranks)
    of_blocks.num_layers, of_blocks.is_hybrid_model = shape.num_layers, False
    of_blocks.perform_initialization = True
    is_mixed = shape.num_moe_experts and not all(shape.moe_blocks)
    if shape.num_moe_experts:
        of_blocks.moe_layer_freq = [int(moe) for moe in shape.moe_blocks] if is_mixed else 1
    if is_mixed:
        spec = get_gpt_decoder_block_spec(of_blocks, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=shape.num_moe_experts or None, qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"
        )
    return GPTModel(
        of_blocks,
        spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        pre_process=ranks.is_first_stage,
        post_process=ranks.is_last_stage,
        pg_collection=ranks.pgs,
    )


def fill(parts: Parts, seed: int) -> None:
    """Moments as if it had been trained for two steps, and weights that are their fp32 ones."""
    generator = torch.Generator().manual_seed(seed + parts.ranks.rank)
    optimizer_state.allocate(parts.optimizer)
    with torch.no_grad():
        for _, piece in optimizer_state.held_slices(parts.optimizer):
            for name in ("exp_avg", "exp_avg_sq"):
                piece.tensors[name].copy_(torch.rand(piece.tensors[name].shape, generator=generator))
    for part in optimizer_state.parts(parts.optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = 2


def fill_and_save(parts: Parts, folder: Path, form: str) -> None:
    fill(parts, 1)
    save(parts, folder, form)


def as_torch_reads(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist folder, by torch's own reader."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "chunks")
    }
    load(found, storage_reader=reader, no_dist=True)
    return found
