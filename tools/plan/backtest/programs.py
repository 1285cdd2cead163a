"""What the programs behind published rows do: properties from their documentation, never from their figures."""

import re
from collections.abc import Mapping
from dataclasses import replace

from training.memory.software import Software

MEGATRON_2021 = Software(
    flash_attention=False, fused=False, p2p_overlap=False, gradient_bytes=2, main_gradient_bytes=2,
    keeps_fp32_gradients=False,
)  # fmt: skip
"""Megatron-LM before flash attention and the distributed optimizer (arXiv:2104.04473). Its fp32 copy of the gradients
is there when activations no longer are."""
DEEPSPEED = Software(flash_attention=False, fused=False, p2p_overlap=False, gradient_bytes=2)
"""Megatron-DeepSpeed: 1F1B without overlap, sends split over TP (its pipe_partitioned), gradients reduced in the type
of the weights."""
MCORE = Software(
    tp_overlap=True, fp8_weights=True, gradient_bytes=2, main_gradient_bytes=2, keeps_fp32_gradients=False,
    accumulate_bytes=2.0,
)  # fmt: skip
"""NeMo and Megatron-Bridge on megatron-core and Transformer Engine: everything overlapped; their performance recipes
set grad_reduce_in_fp32 to False."""
COMPOSER = Software(
    newest_attention=False, gradient_bytes=2, keeps_fp32_gradients=False, reduces_every_microbatch=True, fused=False,
    main_weight_bytes=0, loss_bytes=2, stops_early=True,
)  # fmt: skip
"""llm-foundry on PyTorch FSDP with Triton's flash attention, eager otherwise. Its fused loss writes the gradient over
the 16-bit logits."""
TITAN = Software(newest_attention=False, main_weight_bytes=0, loss_bytes=12, stops_early=True)
"""torchtitan: FSDP2, torch.compile, SDPA. PyTorch's loss holds its result and two gradients in fp32."""


def program(row: Mapping[str, str], gated: bool) -> Software:
    """By the framework, its year and what the notes say of how it ran. gated: the model's activation."""
    framework, notes = row.get("framework", "").lower(), row.get("notes", "").lower()
    known = {"composer": COMPOSER, "deepspeed": DEEPSPEED, "torchtitan": TITAN}
    base = next((found for word, found in known.items() if word in framework), None)
    if base is None:
        old = framework == "megatron-lm" and int(float(row.get("year", "") or 2025)) < 2023
        base = MEGATRON_2021 if old else MCORE
    year = int(float(row.get("year", "") or 2026))
    blackwell, hopper = (any(word in row.get("gpu", "") for word in words) for words in (("B200", "B300"), ("H100",)))
    early = (blackwell and year <= 2025) or (hopper and year <= 2023)
    release = re.search(r"summary (\d\d)\.(\d\d)", row.get("source", ""))  # from 26.06: its release notes
    fused = release is not None and (int(release[1]), int(release[2])) >= (26, 6)
    fused = fused and gated and row.get("precision", "") == "mxfp8"
    graphed = base is MCORE and (row.get("gpu", "").startswith("GB") or "tokendrop" in notes)
    base = replace(base, first_year=early, fused_experts=fused, graphed_experts=graphed)
    if "deepspeed" in framework:
        base = _deepspeed(base, notes, row.get("precision", ""))
    return _noted(base, notes)


def _deepspeed(base: Software, notes: str, precision: str) -> Software:
    """Its BF16_Optimizer sums, and all-reduces, in fp32.

    Per parameter and microbatch 16-bit gradients are added up (6 bytes), converted (2 + 4), added (12) and cleared (2).
    They stay beside the sums; not so in the version of before 28 February 2022: the same layout held 44 GB a day
    before, and 65 GB then.
    """
    if precision != "bf16":
        return replace(base, main_gradient_bytes=2, keeps_fp32_gradients=False)
    early = (day := re.match(r"02-(\d\d)", notes)) is not None and int(day[1]) < 28
    held = 4 if early else 6
    return replace(base, gradient_bytes=4, main_gradient_bytes=held, accumulate_bytes=26.0, all_reduces=True)


def _noted(base: Software, notes: str) -> Software:
    if "async tp" in notes or "asynctp" in notes:
        base = replace(base, tp_overlap=True)
    if "eager" in notes:
        base = replace(base, fused=False)
    if "500w" in notes:  # of a card's 700 W: the clock falls with about the cube root of power
        base = replace(base, power_share=(500 / 700) ** (1 / 3))
    if "dropless" in notes:
        base = replace(base, balanced_experts=False)
    return base
