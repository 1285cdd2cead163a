"""What is measured inside the model, beyond a step's result: only where the model has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn

from models.shapes import GPTShape
from models.sublayers import block_of
from parallel.ddp import unwrap
from parallel.groups import Ranks
from training.metrics.values import Value


class Meter(Protocol):
    """Collects while the model trains, on every rank."""

    def report(self) -> Mapping[str, Value]:
        """The numbers since the last report, by their key in metrics.jsonl. Collective: all ranks, same iteration."""
        ...


@dataclass(frozen=True, slots=True)
class StageMeter:
    """Which stage of a run it is, from 1."""

    number: int

    def report(self) -> Mapping[str, Value]:
        """Always the same."""
        return {"stage": self.number}


def model_meters(shape: GPTShape, chunks: Sequence[nn.Module], ranks: Ranks) -> list[Meter]:
    """Those that the architecture gives something to measure; the same on every rank."""
    meters: list[Meter] = []
    if shape.num_moe_experts:
        meters.append(ExpertMeter(shape, chunks, ranks))
    if shape.mtp_num_layers:
        meters.append(DepthMeter(shape, ranks))
    return meters


BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""``moe_router_load_balancing_type`` -> mcore's name of what it records (transformer/moe/router.py)."""


class ExpertMeter:
    """How evenly experts are used: counts what every router assigns in training, on the device.

    An *assignment* is one token given to one of its ``moe_router_topk`` experts. Ranks wait in ``report`` only.

    Costs a sum over [tokens, experts] booleans and an addition per router and microbatch. A forward pass without
    gradients does not count: neither evaluation, nor the first of the two that recomputed activations take.
    """

    def __init__(self, shape: GPTShape, chunks: Sequence[nn.Module], ranks: Ranks) -> None:
        """``chunks``: this rank's, wrapped or not. Hooks stay on their routers for the model's life."""
        self.shape, self.ranks = shape, ranks
        self.rows = expert_rows(shape)
        self.assigned = torch.zeros(len(self.rows), shape.num_moe_experts, dtype=torch.int64, device=ranks.device)
        self.asked, self.calls = 0, 0  # assignments before any was dropped; forward passes of routers
        for chunk in chunks:
            for name, router in routers(shape, unwrap(chunk)):
                router.register_forward_hook(partial(self._count, self.assigned[self.rows.index(name)]))
        get_moe_metrics_tracker().clear()

    def report(self) -> dict[str, Value]:
        """The numbers since the last report, the same on every rank, by their key in metrics.jsonl.

        ``expert_load``: for each MoE block (``"3"``, ``"mtp.0"``), each expert's share of its kept assignments.
        ``expert_load_max``: the fullest expert of all blocks, 1.0 being an even share. ``dead_experts``: those of all
        blocks without any assignment. ``dropped_tokens``: share of assignments that found their expert full.
        ``load_balancing_loss``, ``z_loss``: means over routers and microbatches, without their coefficients. Nothing
        when no router ran.

        Collective: one all-reduce of blocks x experts numbers over all ranks. Each holds other tokens or other blocks.
        """
        asked, calls, balancing, z, *flat = self._sums()
        if not calls:
            return {}
        assigned = torch.tensor(flat, dtype=torch.float64).view_as(self.assigned)
        loads = assigned / assigned.sum(dim=1, keepdim=True).clamp(min=1)
        values: dict[str, Value] = {
            "expert_load": dict(zip(self.rows, loads.tolist(), strict=True)),
            "dead_experts": int((assigned == 0).sum()),
            "expert_load_max": loads.max().item() * self.shape.num_moe_experts,
            "dropped_tokens": (asked - sum(flat)) / asked,
        }
        if self.shape.moe_router_load_balancing_type != "none" and self.shape.moe_aux_loss_coeff:
            values["load_balancing_loss"] = balancing / calls * self._ranks_of_one_loss()
        if self.shape.moe_z_loss_coeff:
            values["z_loss"] = z / calls  # every rank's is a mean over its own tokens
        return values

    def _count(self, row: Tensor, router: TopKRouter, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        """Add a forward pass to ``row``; ``outputs`` are weights and assignments, both [tokens, experts]."""
        if not (router.training and torch.is_grad_enabled()):
            return
        weights, assignments = outputs
        if self.shape.moe_pad_expert_input_to_capacity:
            # A map filled up to capacity has tokens for experts that they did not choose: with a weight of 0.
            assignments = weights.detach() != 0
        row += assignments.sum(dim=0)
        self.asked += len(assignments) * router.topk
        self.calls += 1

    def _sums(self) -> list[float]:
        """Over all ranks: asked, calls, balancing loss, z loss, assigned row by row. Resets.

        fp64 is exact to 2^53 assignments. mcore's tracker holds an entry per sublayer, in fp32; an MTP depth shares
        one with block 0 (its inner layers count from 1), so only sums over layers mean anything.
        """
        losses = [_recorded(BALANCING.get(self.shape.moe_router_load_balancing_type, "")), _recorded("z_loss")]
        counts = torch.tensor([self.asked, self.calls], dtype=torch.float64, device=self.ranks.device)
        parts = [counts, *(loss.to(counts) for loss in losses), self.assigned.flatten().double()]
        packed = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(packed)
        self.assigned.zero_()
        self.asked, self.calls = 0, 0
        get_moe_metrics_tracker().clear()
        return packed.tolist()

    def _ranks_of_one_loss(self) -> int:
        """Ranks whose recorded parts add up to the balancing loss of one microbatch (of all replicas', if global)."""
        layout = self.ranks.layout
        replicas = layout.dp if self.shape.moe_router_load_balancing_type == "global_aux_loss" else 1
        return layout.tp * layout.cp * replicas


def expert_rows(shape: GPTShape) -> list[str]:
    """Names of the blocks with experts: global numbers, then "mtp.0" and on, whose block is like the last one."""
    blocks = [str(number) for number, moe in enumerate(shape.moe_blocks) if moe]
    return blocks + [f"mtp.{depth}" for depth in range(shape.mtp_num_layers) if shape.moe_blocks[-1]]


def routers(shape: GPTShape, chunk: nn.Module) -> list[tuple[str, TopKRouter]]:
    """The routers of an unwrapped chunk, by their block's name of ``expert_rows``."""
    found = []
    for path, module in chunk.named_modules():
        if isinstance(module, TopKRouter):
            assert module.layer_number is not None
            inner = path.startswith("mtp.")  # mtp.layers.<depth>.mtp_model_layer...
            found.append(
                (f"mtp.{path.split('.')[2]}" if inner else str(block_of(shape, module.layer_number)[0]), module)
            )
    return found


def _recorded(name: str) -> Tensor:
    """What this rank's routers recorded under mcore's ``name``, summed over layers and microbatches."""
    entry = get_moe_metrics_tracker().metrics.get(name)
    return torch.zeros(()) if entry is None else entry.values.double().sum()


class DepthMeter:
    """Losses of multi-token prediction (arXiv:2412.19437, section 2.2): averages what models/layers/mtp.py notes."""

    def __init__(self, shape: GPTShape, ranks: Ranks) -> None:
        self.depths, self.ranks = shape.mtp_num_layers, ranks
        MTPLossLoggingHelper.clean_metrics_in_tracker()

    def report(self) -> dict[str, Value]:
        """``mtp_loss``: each depth's loss in nats per token since the last report, unweighted; the same on every rank.

        Mean over the unmasked tokens that have something to predict at that depth. Nothing when none ran. Collective:
        one all-reduce of a few numbers over all ranks; other stages add zeros, TP peers add to both sides of the mean.
        """
        tracker = MTPLossLoggingHelper.tracker
        noted = [tracker.get(name, torch.zeros(self.depths)) for name in ("loss_values", "total_values")]
        packed = torch.stack(noted).to(self.ranks.device, torch.float64)
        dist.all_reduce(packed)
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        losses, tokens = packed.tolist()
        return {"mtp_loss": [one / count for one, count in zip(losses, tokens, strict=True)]} if all(tokens) else {}
