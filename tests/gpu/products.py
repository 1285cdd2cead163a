"""On a rank: the fastest matrix products that this card does, the ceiling for a model's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.launch import Identity
from tools.plan.calibrate import collectives
from tools.plan.calibrate import measure as calibration

FP8 = torch.float8_e4m3fn
TOY = ((128, 128, 128),)
"""On the emulated device torch's CPU kernel computes fp8 products, at 0.04 GFLOPS on some CPUs."""


def measure(_: Identity, card_products: bool, kind: str = "cuda") -> dict[str, Any]:
    """TFLOPS of the fastest shape, by number format; of what the card or torch cannot do, why."""
    if not card_products:
        shrink()
    found: dict[str, Any] = {}
    device = torch.device(kind)
    kinds: dict[str, Callable[[], list[float]]] = {
        "bf16": lambda: bf16_tflops(device),
        "fp8": lambda: fp8_tflops(device, calibration.shapes(kind) if card_products else TOY),
    }
    for name, tflops in kinds.items():
        try:
            found[name] = max(tflops())
        except RuntimeError as error:
            found[f"{name}_failed"] = str(error).splitlines()[0]
    return found


def bf16_tflops(device: torch.device) -> list[float]:
    """Of the shapes that calibrate measures."""
    return [each.tflops for each in calibration.products(device, {"bf16": torch.bfloat16})]


def fp8_tflops(device: torch.device, shapes: Sequence[tuple[int, int, int]]) -> list[float]:
    """Of shapes (m, n, k), scaled tensor by tensor, accumulated in fp32, and rounded to bf16."""
    found, scale = [], torch.ones((), device=device)
    for m, n, k in shapes:
        first = torch.randn(m, k, device=device).to(FP8)
        second = torch.randn(n, k, device=device).to(FP8).t()

        def product(first: torch.Tensor = first, second: torch.Tensor = second) -> torch.Tensor:
            return torch._scaled_mm(first, second, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

        found.append(2 * m * n * k / calibration.middle_s(product, device) / 1e12)
    return found


def shrink() -> None:
    """In this process, what calibrate measures on a card takes the sizes that it has for a CPU."""
    own = (calibration.SQUARES, calibration.SHORT, calibration.WIDE, calibration.BLOCK, calibration.COPIED)
    tables: tuple[dict[str, Any], ...] = (*own, collectives.BYTES)
    for table in tables:
        table["cuda"] = table["cpu"]
