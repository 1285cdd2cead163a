"""Ranks of a recipe, one after the other, with tensors that have no values.

    python -m tools.plan.trace.one_rank RECIPE WORLD_SIZE MICROBATCHES RANK ...

Prints a JSON object for each: bytes of weights, gradients, optimizer and activations at the peak, the collectives,
and what tracing itself took. torch and megatron are imported once, and each rank is traced in a fork of its own.
"""

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from parallel.lean_imports import lean
from program.untrusted import parse_json


def main() -> int:
    """Exit code 0: all are traced; 1: one could not be, and the others are left."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    recipe, world_size, microbatches, *numbers = sys.argv[1:]
    with lean("cpu"):
        import torch._dynamo  # noqa: F401  (by torch's own decompositions for "meta": 0.6 CPU s a rank)

        import tools.plan.trace.meta
        import tools.plan.trace.spots  # noqa: F401  (all that a trace imports, once)
        import training.train  # noqa: F401
    for number in numbers:
        found = _forked(Path(recipe), int(world_size), int(number), int(microbatches))
        if found is None:
            return 1
        print(json.dumps(found), flush=True)
    return 0


def _forked(recipe: Path, world_size: int, rank: int, microbatches: int) -> dict[str, Any] | None:
    """In a child, since megatron-core's groups are a process's own; None where it failed, and said why."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writing, json.dumps(trace(recipe, world_size, rank, microbatches)).encode())
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status, used = os.wait4(child, 0)
    if status:
        return None
    took = {"cpu_s": used.ru_utime + used.ru_stime, "resident_bytes": used.ru_maxrss * 1024}
    return dict(parse_json(text)) | took


def trace(recipe: Path, world_size: int, rank: int, microbatches: int, *, real: bool = False) -> dict[str, Any]:
    """The real model, DDP buffers, distributed optimizer and schedule. real: with values, for a test."""
    from models.resolve import resolve
    from parallel import groups
    from parallel.launch import Identity
    from tools.plan.trace import spots
    from tools.plan.trace.meta import Meta
    from training.config.recipe import load
    from training.parts.model import build_parts

    config = load(recipe)
    layout = config.layout(world_size)
    with groups.pretend(layout, Identity(rank=rank, world_size=world_size)) as ranks:
        if not real:
            spots.install()
        with nullcontext() if real else Meta():
            parts = build_parts(config, resolve(config.model, None), ranks)
            found = _held(parts.chunks, parts.optimizer)
            found |= _step(config, parts.chunks, ranks, microbatches)
    return found


def _held(chunks: Any, optim: Any) -> dict[str, Any]:
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    masters = stepped = 0
    for one in getattr(optim, "chained_optimizers", [optim]):
        groups = one.optimizer.param_groups if getattr(one, "optimizer", None) is not None else []
        stepped += sum(tensor.nbytes for group in groups for tensor in group["params"])
        for kind in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            masters += sum(tensor.nbytes for group in getattr(one, kind, []) for tensor in group if tensor is not None)
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "weights": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "main_weights": masters,
        "moments": 2 * stepped,  # of the fp32 weights that it steps: main ones, or this rank's shard of the weights
    }


def _step(config: Any, chunks: Any, ranks: Any, microbatches: int) -> dict[str, Any]:
    """Forward and backward over the microbatches, as the program's own step runs them."""
    from tools.plan.trace.ledger import Ledger
    from training.forward_backward import run_schedule

    held = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            held += [data for data in (buffer.grad_data, buffer.param_data) if data is not None]
        chunk.config.finalize_model_grads_func = None  # reductions of gradients are counted by formula
    batches = [_batch(config, ranks)] * microbatches
    with Ledger(held) as ledger:
        run_schedule(chunks, batches, ranks, config.model.seq_length, config.train.micro_batch_size, forward_only=False)
    return {"activations": ledger.peak, "collectives": ledger.collectives}


def _batch(config: Any, ranks: Any) -> Any:
    import torch

    from data.loader import Batch

    shape = (config.train.micro_batch_size, config.model.seq_length // ranks.layout.cp)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return Batch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(shape), position_ids=torch.zeros(shape, dtype=torch.int64),
        starts=None,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
