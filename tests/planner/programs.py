"""What the programs behind published rows do: properties from their documentation, never from their figures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.costs.program import Published, Software
from tests.planner.recipes import recipe


@dataclass(kw_only=True, frozen=True)
class PublishedProgram(Software, Published):
    """Both in one: what pretrain_gpt.py can be set to, and what it cannot."""

    balanced_experts: bool = True
    """Most of them are benchmarks, which force it."""


MEGATRON_2021 = PublishedProgram(
    flash_attention=False, fused=False, p2p_overlap=False, gradient_bytes=2, main_gradient_bytes=2,
    keeps_fp32_gradients=False,
)  # fmt: skip
"""Megatron-LM before flash attention and the distributed optimizer (arXiv:2104.04473). Its fp32 copy of the gradients
is there when activations no longer are."""
DEEPSPEED = PublishedProgram(
    flash_attention=False, fused=False, p2p_overlap=False, gradient_bytes=2, keeps_stage_ends=True
)  # fmt: skip
"""Megatron-DeepSpeed: 1F1B without overlap, sends split over TP (its pipe_partitioned), gradients reduced in the type
of the weights."""
DEEPSPEED_BUCKETS = 2 * 5e8 * 2
"""Bytes: its reduce_bucket_size and allgather_bucket_size, of 5e8 16-bit elements each by default."""
MCORE = PublishedProgram(
    tp_overlap=True, fp8_weights=True, gradient_bytes=2, main_gradient_bytes=2, keeps_fp32_gradients=False,
    accumulate_bytes=2.0, reduces_every_microbatch=True,
)  # fmt: skip
"""NeMo and Megatron-Bridge on megatron-core and Transformer Engine: everything overlapped; their performance recipes
set grad_reduce_in_fp32 to False. Megatron-FSDP reduces sharded gradients on all microbatches (megatron-core 0.19.2,
distributed/fsdp/mcore_fsdp_adapter.py:167)."""
COMPOSER = PublishedProgram(
    newest_attention=False, gradient_bytes=2, keeps_fp32_gradients=False, reduces_every_microbatch=True, fused=False,
    main_weight_bytes=0, loss_bytes=2, stops_early=True,
)  # fmt: skip
"""llm-foundry on PyTorch FSDP with Triton's flash attention, eager otherwise. Its fused loss writes the gradient over
the 16-bit logits."""
TITAN = PublishedProgram(newest_attention=False, main_weight_bytes=0, loss_bytes=12, stops_early=True)
"""torchtitan: FSDP2, torch.compile, SDPA. PyTorch's loss holds its result and two gradients in fp32."""

WIDE_HEADS_ON_BLACKWELL = 2025.5
"""Year from which Transformer Engine has fused attention with heads wider than 128 there: 2.5, of 29 June 2025 (#1797).
Until 2.4 fused_attn.cpp wants no "sm_arch_ >= 100 && (head_dim_qk > 128 || head_dim_v > 128)". FlashAttention 2 takes
such heads, but for latent attention, whose values are narrower than its keys: scores are written out there."""


def program(row: Mapping[str, str], gated: bool) -> PublishedProgram:
    """By the framework, its year, its recipe and what the notes say of how it ran. gated: the model's activation."""
    framework, notes = row.get("framework", "").lower(), row.get("notes", "").lower()
    known = {"composer": COMPOSER, "deepspeed": DEEPSPEED, "torchtitan": TITAN}
    base = next((found for word, found in known.items() if word in framework), None)
    if base is None:
        old = framework == "megatron-lm" and int(float(row.get("year", "") or 2025)) < 2023
        base = MEGATRON_2021 if old else _with_experts(MCORE, row, gated)
        if row.get("precision", "") == "nvfp4":  # so all of Megatron-Bridge's recipes for Llama until 26.06.01
            base = replace(base, tp_overlap=False)
    if "deepspeed" in framework:
        base = _deepspeed(base, notes, row.get("precision", ""))
    if "composer" in framework:
        base = _composer(base, notes, row.get("zero", ""))
    return _noted(base, notes)


def on_card(base: PublishedProgram, head_dim: int, latent: bool, generation: str, year: float) -> PublishedProgram:
    """What of it a card's generation has had no kernels for in that year. latent: the kind of attention."""
    if not base.transformer_engine or generation != "blackwell" or head_dim <= 128 or year >= WIDE_HEADS_ON_BLACKWELL:
        return base
    return replace(base, flash_attention=not latent, newest_attention=False)


def when(row: Mapping[str, str]) -> float:
    """Year that the software is of: the month of its container's version where the source has one (v24.11.1, 26.04),
    else the middle of the year that the row tells."""
    if version := re.search(r"\bv?(2\d)\.(0[1-9]|1[0-2])\b", row.get("source", "")):
        return 2000 + int(version[1]) + (int(version[2]) - 0.5) / 12
    return float(row.get("year", "") or 2026) + 0.5


def _with_experts(base: PublishedProgram, row: Mapping[str, str], gated: bool) -> PublishedProgram:
    """Fused experts are a kernel of gated activations. Where tokens are dropped, their counts are known beforehand."""
    notes, found = row.get("notes", "").lower(), recipe(row)
    base = replace(base, waits_for_counts="tokendrop" not in notes)
    if found is None:
        deepep = "deepep" in notes
        return replace(base, fused_dispatch=deepep, sends_once=deepep)
    return replace(
        base,
        tp_overlap=found.overlaps_tp,
        fused_dispatch=found.dispatcher != "alltoall",
        sends_once=found.dispatcher != "alltoall",
        overlaps_dispatch=found.overlaps_dispatch,
        graphed=found.cuda_graphs != "none",
        waits_for_counts=base.waits_for_counts and found.cuda_graphs != "full",
        fused_experts=found.fused_experts and gated,
        slow_bias_gradients=found.slow_bias_gradients,
        fp8_attention=found.fp8_attention,
        fp8_head=found.fp8_head,
        recomputes_norms="layernorm" in found.recomputes,
        recomputes_expert_activation="moe_act" in found.recomputes,
        recomputes_latents="mla_up_proj" in found.recomputes,
    )


def _deepspeed(base: PublishedProgram, notes: str, precision: str) -> PublishedProgram:
    """Its BF16_Optimizer sums, and all-reduces, in fp32.

    Per parameter and microbatch 16-bit gradients are converted (2 + 4 bytes) and added (12). They stay beside the sums.
    The runs of before 28 February 2022 had no such optimizer (chronicles-prequel, "Rebalancing layers"): they summed in
    16 bits, and the same layout held 44 GB a day before, and 65 GB then. All of them waited for each kernel, against
    hangs ("dealing with JZ hanging": 6 % slower on 80 GPUs, no slower on 160). Until 25 February their hosts were set
    up badly, which cost 1 to 5 % ("GBS Variations").
    """
    if precision != "bf16":
        return replace(base, main_gradient_bytes=2, keeps_fp32_gradients=False)
    day = int(found[1]) if (found := re.match(r"02-(\d\d)", notes)) else 29
    base = replace(
        base,
        all_reduces=True,
        bucket_bytes=DEEPSPEED_BUCKETS,
        waits_for_kernels=found is not None,
        slow_host=1.03 if day < 25 else 1.0,
    )
    if day < 28:
        return replace(base, main_gradient_bytes=2, accumulate_bytes=6.0)
    return replace(base, gradient_bytes=4, main_gradient_bytes=6, accumulate_bytes=18.0)


def _composer(base: PublishedProgram, notes: str, zero: str) -> PublishedProgram:
    """Its mixed precision "DEFAULT" reduces gradients in fp32 since 0.16.4 (composer d745fcb1b); llm-foundry's runs on
    128 GPUs and more had 0.17. ZeRO-2 is SHARD_GRAD_OP, which its README's column of strategies tells."""
    wide = 4 if "reduced in fp32" in notes else base.gradient_bytes
    return replace(base, gradient_bytes=wide, gathers_once=zero == "2")


def _noted(base: PublishedProgram, notes: str) -> PublishedProgram:
    if "async tp" in notes or "asynctp" in notes:
        base = replace(base, tp_overlap=True)
    if "eager" in notes:
        base = replace(base, fused=False)
    if "500w" in notes:  # of a card's 700 W: the clock falls with about the root of power
        base = replace(base, power_share=(500 / 700) ** 0.5)
    if "dropless" in notes and "force-balanced" not in notes:
        base = replace(base, balanced_experts=False)
    return base
