"""What ``train.recompute`` says: which activations are computed again, by Megatron's words or by a budget."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]
MOST_LAYERS = 10_000
FORMS = '"selective:core_attn,mlp", "full:uniform:1", "full:block:2" or "auto:70GiB"'
_FULL = re.compile(r"full:(uniform|block):(\d{1,5})")
_SELECTIVE = re.compile(r"selective(?::([a-z_,]*))?")
_BUDGET = re.compile(r"auto:(\d+(?:\.\d+)?)([GM])(i?)B")


@dataclass(kw_only=True, slots=True, frozen=True)
class Recomputation:
    """By Megatron's fields; or a budget, which is Triplane's own."""

    granularity: Granularity | None = None
    method: Method | None = None
    num_layers: int | None = None
    modules: tuple[RecomputeModule, ...] = ("core_attn",)
    budget: float | None = None
    """Bytes that no rank is to be predicted to hold more of."""

    def spelled(self) -> str | None:
        """As ``train.recompute`` says it; None: nothing is recomputed. A budget has its own spelling."""
        if self.granularity == "full":
            return f"full:{self.method}:{self.num_layers}"
        return f"selective:{','.join(self.modules)}" if self.granularity == "selective" else None


@cache
def read_recompute(text: str | None) -> Recomputation | None:
    """None for what is no form of it."""
    if text is None:
        return Recomputation()
    if full := _FULL.fullmatch(text):
        method: Method = "block" if full[1] == "block" else "uniform"
        layers = int(full[2])
        return (
            Recomputation(granularity="full", method=method, num_layers=layers) if 0 < layers <= MOST_LAYERS else None
        )
    if selective := _SELECTIVE.fullmatch(text):
        named = "core_attn" if selective[1] is None else selective[1]
        modules = cast(tuple[RecomputeModule, ...], tuple(named.split(",")))
        known = set(modules) <= set(get_args(RecomputeModule))
        return Recomputation(granularity="selective", modules=modules) if known else None
    if budget := _BUDGET.fullmatch(text):
        number, unit, binary = budget.groups()
        return Recomputation(budget=float(number) * (1024 if binary else 1000) ** {"M": 2, "G": 3}[unit])
    return None


def recompute_form_problems(text: str | None) -> list[str]:
    """A sentence where it is no form of it."""
    if read_recompute(text) is not None:
        return []
    return [
        f"train.recompute: expected {FORMS} (modules: {', '.join(get_args(RecomputeModule))}; layers from 1), found "
        f'"{text}".'
    ]
