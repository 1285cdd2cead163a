"""Transformer Engine's own code makes userbuffers for a model of two TP ranks, and forgets them.

The buffers themselves are the compiled extension's and are noted only: no product has run in one.
"""

import dataclasses
import os
from typing import Any

import torch
from transformer_engine.pytorch.module import base

from models import gpt
from models.config import ModelConfig
from models.layers.userbuffers import userbuffers
from models.resolve import resolve
from parallel import groups, launch
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import Layout
from program.errors import SharedMistake

made: list[str] = []


def buffer(shape: list[int], dtype: torch.dtype, helper: Any, tp_size: int, *_: Any, **__: Any) -> None:
    made.append(f"{shape} {dtype} TP {tp_size}")


extension: Any = base.tex
vars(extension).update(CommOverlapHelper=lambda *_: None, CommOverlap=buffer, CommOverlapP2P=buffer)
identity = launch.detect(os.environ)
assert identity is not None
parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
model = ModelConfig(shape="llama3_tiny", seq_length=64)
shape, bf16 = resolve(model, None), PrecisionConfig()
fusions = frozenset({"tp_comm_overlap"})
fp8 = dataclasses.replace(bf16, fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True)
with groups.start(Layout(tp=2), identity, device="cuda", seed=1) as ranks:
    found: list[str] = []
    try:
        with userbuffers(ranks, bf16, 128, shape.hidden_size):
            pass
    except SharedMistake as error:
        found.append(str(error))
    extension.device_supports_multicast = lambda *_: True
    for precision in (bf16, fp8):
        with userbuffers(ranks, precision, 128, shape.hidden_size):
            assert base.is_ub_initialized()
            found += sorted({f"{made.count(one)} of {one}" for one in made})
            made.clear()
            blueprint = gpt.Blueprint(
                model=model, shape=shape, parallel=parallel, precision=precision, kernels=gpt.Kernels(fusions=fusions)
            )
            (chunk,) = gpt.build(blueprint, ranks)
            names = {module.ub_name for module in chunk.modules() if getattr(module, "ub_name", None)}
            found.append(" ".join(sorted(names)))
        assert not base.is_ub_initialized() and base._ub_communicators is None
if identity.rank == 0:
    print("\n".join(found))
