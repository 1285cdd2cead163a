"""What mixers in plain torch keep for the backward pass: the formulas against autograd's own saved tensors."""

import dataclasses
from typing import Any

import pytest
import torch

from campaign import some
from models.config import ModelConfig
from models.costs.candidate import Candidate
from models.costs.cases import MemoryCase, MemoryColumns
from models.costs.mixers import kind_bytes
from models.costs.program import OURS
from models.costs.sizes import sizes
from models.resolve import resolve
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from ranks import run_ranks

SEQ = 256
WIDTHS: dict[str, dict[str, Any]] = {
    "M": {"mamba_num_heads": 12, "mamba_head_dim": 24, "mamba_num_groups": 3, "mamba_state_dim": 20},
    "G": {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 24,
          "linear_value_head_dim": 20},
}  # fmt: skip


def model(kind: str, layers: int) -> ModelConfig:
    fields = {"hidden_size": 96, "kv_channels": 24, "position_embedding_type": "none", "vocab_size": 257}
    return ModelConfig(
        shape="debug", seq_length=SEQ, hybrid_layer_pattern=kind * layers, **fields | WIDTHS[kind]
    )  # fmt: skip


def saved(ranks: Any, kind: str, dtype: str, layers: int) -> int:
    """Bytes of all storages that autograd keeps of a forward pass, weights aside."""
    from models import gpt

    config = model(kind, layers)
    precision = PrecisionConfig(dtype=dtype)
    (chunk,) = gpt.build(gpt.Blueprint(model=config, shape=resolve(config, None), precision=precision), ranks)
    chunk = chunk.to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = chunk(torch.zeros(1, SEQ, dtype=torch.int64), torch.arange(SEQ)[None], None)
    storages = {place: tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in weights}
    assert kept.requires_grad
    return sum(storages.values())


def _as_predicted(identity: Identity, kind: str, dtype: str) -> None:
    with groups.start(layout_of(ParallelConfig(), 1), identity, device="cpu", seed=1) as ranks:
        measured = (saved(ranks, kind, dtype, 3) - saved(ranks, kind, dtype, 1)) / 2
    case = MemoryCase(
        model=sizes(resolve(model(kind, 1), None), SEQ),
        layout=Candidate(precision=dtype),
        software=dataclasses.replace(OURS, transformer_engine=False),
    )
    assert float(kind_bytes(MemoryColumns([case]), kind).kept[0]) == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"], ["bf16"]))
@pytest.mark.parametrize("kind", WIDTHS)
def test_a_mixer_keeps_what_is_predicted(kind: str, dtype: str) -> None:
    run_ranks(1, _as_predicted, kind, dtype)
