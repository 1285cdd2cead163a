"""Whether a case hangs on rounding: two experts that a router holds for all but equally good, of which fp32 may take
either, on every layout another one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracle.batches import Microbatch
from tests.oracle.reference import Reference

TRIALS = 8
NOISE = 2.0**-20
"""Relative, of each weight: eight times what rounding to fp32 does to it."""


@torch.no_grad()
def hangs_on_rounding(reference: Reference, batches: Sequence[Sequence[Microbatch]]) -> bool:
    """Whether some token of a global batch takes another expert where all weights have a little noise."""
    if not reference.shape.num_moe_experts:
        return False
    modules = [reference.model, *([reference.mtp] if reference.mtp is not None else [])]
    params = list({id(param): param for module in modules for param in module.parameters()}.values())
    kept, draw = [param.clone() for param in params], torch.Generator().manual_seed(0)
    exact = _choices(reference, batches)
    try:
        for _ in range(TRIALS):
            for param, value in zip(params, kept, strict=True):
                noise = torch.rand(param.shape, generator=draw) - 0.5
                param.copy_(value * (1 + NOISE * noise))
            if any(not torch.equal(one, other) for one, other in zip(exact, _choices(reference, batches), strict=True)):
                return True
    finally:
        for param, value in zip(params, kept, strict=True):
            param.copy_(value)
    return False


def _choices(reference: Reference, batches: Sequence[Sequence[Microbatch]]) -> list[Tensor]:
    """Experts of each token, sorted: those that compute it, and those that balancing counts."""
    found, topk = [], reference.shape.moe_router_topk
    for batch in (batch for replicas in batches for batch in replicas):
        for output in reference.outputs(batch):
            counted = [logits.topk(topk, dim=-1).indices for logits in output.routers]
            found += [one.sort(dim=-1).values for one in [*output.chosen, *counted]]
    return found
