"""QK-clip (MuonClip's, arXiv:2507.20534, section 2.1): no head's attention logits grow without bound.

After an update, the weights and biases of queries and keys are scaled by powers of eta = threshold / the largest logit
of the global batch, where that was larger: queries by eta^alpha and keys by eta^(1 - alpha), so that with the weights
before the update that logit would come to the threshold. As in megatron-core (SelfAttention.clip_qk,
MLASelfAttention.clip_qk): heads that share a key have the eta of their largest; of latent attention, whose rotary key
all heads share, rotary queries are scaled by eta. Unlike there biases are scaled, too, weights may be in shards, and a
group that is divided among TP ranks has one maximum.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from models.layers.max_logits import COLLECTED
from models.shapes import GPTShape
from parallel import ddp
from parallel.ddp import Chunks
from parallel.groups import Ranks
from parallel.regions import HeldTensor
from training.checkpoint.optimizer_state import MainParam, main_params, parts
from training.config.optimizer_config import OptimizerConfig
from training.metrics.recorder import across_ranks
from training.metrics.values import Value


@dataclass(slots=True, frozen=True)
class ScaledRows:
    """This rank's elements of a matrix or a bias, flat, whose rows are scaled."""

    main: Tensor
    layer: int
    """Of this rank's attentions."""
    groups: Tensor
    """Of each row, whose eta; int64 [rows]."""
    powers: Tensor
    """Of each row, of eta; [rows]."""
    columns: int
    skipped: int
    """Elements of the first row that are another rank's."""

    def scale(self, etas: Tensor) -> None:
        """etas: [layers, groups]. By whole rows, and what is held of the first and the last one: no factor for each
        element."""
        factors = etas[self.layer, self.groups] ** self.powers  # of a row that stays: exactly 1
        flat = self.main.view(-1)
        first = min(-self.skipped % self.columns, len(flat))
        whole = (len(flat) - first) // self.columns
        last = first + whole * self.columns
        rows = int(first > 0)  # before the first whole one
        flat[:first].mul_(factors[:rows].sum())
        flat[first:last].view(whole, self.columns).mul_(factors[rows : rows + whole, None])
        flat[last:].mul_(factors[rows + whole :].sum())


class QKClip:
    """Of one rank's attentions. Collective over a pipeline stage, as each update then is."""

    def __init__(
        self, optimizer: MegatronOptimizer, chunks: Chunks, shape: GPTShape, settings: OptimizerConfig, ranks: Ranks
    ) -> None:
        self.settings, self.ranks, self.heads = settings, ranks, shape.num_attention_heads
        self.groups = self.heads if shape.multi_latent_attention else shape.num_query_groups
        self.cores: list[Any] = []
        self.etas, self.largest = torch.ones(0), torch.tensor(math.nan)
        self.due: set[int] = set()
        """Parts of the optimizer whose weights this update has not scaled yet."""
        powers, mains = row_powers(shape, settings.qk_clip_alpha), dict(main_params(optimizer))
        rows: list[ScaledRows] = []
        for chunk in chunks:
            held = ddp.held_by_path(chunk)
            for path, attention in _attentions(chunk):
                rows += _scaled_rows(path, held, mains, powers, len(self.cores))
                self.cores.append(attention.core_attention)
        self.rows: list[list[ScaledRows]] = []
        """Of each part."""
        for number, part in enumerate(parts(optimizer)):
            own = {main for group in part.optimizer.param_groups for main in group["params"]}
            self.rows.append([one for one in rows if one.main in own])
            part.optimizer.register_step_post_hook(partial(self._scale, number))
        optimizer.zero_grad = partial(_first, self.forget, optimizer.zero_grad)
        optimizer.step_with_ready_grads = partial(_first, self.agree, optimizer.step_with_ready_grads)

    def forget(self) -> None:
        """A step begins, perhaps the same once more."""
        self.largest = torch.tensor(math.nan)
        for core in self.cores:
            core.current_max_attn_logits = None

    def agree(self) -> None:
        """Before an update: the eta of each group of heads, over all ranks that had a part of the global batch."""
        if not self.cores:
            return
        self.due = set(range(len(self.rows)))
        logits = torch.full((len(self.cores), self.heads), -torch.inf, device=self.ranks.device)
        for row, core in enumerate(self.cores):
            own = core.current_max_attn_logits
            first = self.ranks.at.tp * len(own)
            logits[row, first : first + len(own)] = own
        for group in (self.ranks.pgs.dp_cp, self.ranks.pgs.tp):  # query heads of a group may lie on several TP ranks
            dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=group)
        largest = logits.unflatten(1, (self.groups, -1)).amax(2)
        above = (largest > self.settings.qk_clip_threshold) & largest.isfinite()
        self.etas = torch.where(above, self.settings.qk_clip_threshold / largest, 1.0)
        self.largest = largest.max()

    def report(self) -> Mapping[str, Value]:
        """Of the last iteration; nothing where its update was skipped."""
        return across_ranks({"max_attention_logit": self.largest.item()}, self.ranks)

    @torch.no_grad()
    def _scale(self, number: int, *_: Any) -> None:
        """Behind an optimizer's own step, before megatron-core gathers the weights in 16 bits. Once: torch calls hooks
        for each class of a user's optimizer whose ``step`` calls its base's."""
        if number in self.due:
            self.due.remove(number)
            for one in self.rows[number]:
                one.scale(self.etas)


def row_powers(shape: GPTShape, alpha: float) -> dict[str, Tensor]:
    """By a projection's name, of one group's rows, or one head's in latent attention: the power of its eta."""

    def rows(*spans: tuple[float, int]) -> Tensor:
        return torch.cat([torch.full((count,), power) for power, count in spans])

    if shape.multi_latent_attention:
        queries = rows((alpha, shape.qk_head_dim), (1.0, shape.qk_pos_emb_head_dim))
        keys = rows((1 - alpha, shape.qk_head_dim), (0.0, shape.v_head_dim))
        return {"linear_q_proj": queries, "linear_q_up_proj": queries, "linear_kv_up_proj": keys}
    width = shape.kv_channels
    of_queries = shape.num_attention_heads // shape.num_query_groups * width
    gates = [(0.0, of_queries)] * shape.attention_output_gate
    return {"linear_qkv": rows((alpha, of_queries), *gates, (1 - alpha, width), (0.0, width))}


def _attentions(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in ddp.unwrap(chunk).named_modules():
        if hasattr(getattr(module, "core_attention", None), COLLECTED):
            yield path, module


def _scaled_rows(
    path: str,
    held: Mapping[str, HeldTensor],
    mains: Mapping[Tensor, MainParam],
    powers: Mapping[str, Tensor],
    layer: int,
) -> Iterator[ScaledRows]:
    """Of one attention's projections, those elements that this rank updates. Raises NotImplementedError for an
    attention made of others: it would not be scaled."""
    there = [name for name in powers if f"{path}.{name}.weight" in held]
    if "linear_qkv" not in there and not (len(there) == 2 and "linear_kv_up_proj" in there):
        raise NotImplementedError(f"optimizer.qk_clip: {path} has none of {', '.join(powers)}")
    for name, of_group in powers.items():
        for kind in ("weight", "bias"):
            one = held.get(f"{path}.{name}.{kind}")
            main = None if one is None else mains.get(one.tensor)
            if one is None or main is None:
                continue
            (region,) = one.regions
            columns = region.shape[-1] if kind == "weight" else 1
            offset = region.offset[-2 if kind == "weight" else -1]
            start = one.start + main.start
            end = start + main.tensor.numel()
            numbers = torch.arange(start // columns, -(-end // columns), device=main.tensor.device) + offset
            yield ScaledRows(
                main.tensor,
                layer,
                numbers // len(of_group),
                of_group.to(numbers.device)[numbers % len(of_group)],
                columns,
                start % columns,
            )


def _first(before: Callable[[], None], then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before()
    return then(*args, **kwargs)
