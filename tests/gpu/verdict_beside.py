"""What rows of ``beside`` say together: ratios, goals of Triplane's, and whether all have trained the same model."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.gpu.report_text import percent

Rows = Mapping[str, Mapping[str, Any]]
"""Name -> what ``one_side.measure`` returns, ``same_weights`` and ``fp8``."""

FIRST_LOSS, FIRST_LOSS_FP8, FIRST_LOSS_OWN = 2e-3, 2e-2, 1e-1
"""Largest relative difference of a first loss: of the same weights and tokens in bf16 (as between the emulated device
and a CPU), with products in fp8, and of random weights and tokens of its own."""
MFU, OF_GEMM, OF_OTHERS, OF_BF16 = 0.50, 0.85, 1.0, 1.25
"""Goals: causal MFU in bf16; its share of the fastest measured product; the rate of Megatron's GPTModel and of plain
PyTorch; fp8's of bf16's."""
CONVENTION = (
    "Ratios are of model TFLOPS a GPU: of tokens/s where layers are as many. Every row: the same shape, samples, "
    "warm-up and timed steps, one formula of FLOPs (causal, nothing recomputed), the median step to the device's end."
)


def ratios(rows: Rows) -> dict[str, float]:
    """Triplane over each other side, and over itself in bf16; "triplane_te/pytorch" -> 1.1."""
    own = next((name for name in ("triplane_te", "triplane") if name in rows), "")
    pairs = [(own, other) for other in rows if other != own and not rows[other]["fp8"]]
    pairs += [("triplane_fp8", other) for other in ("megatron_core_fp8", own)]
    return {
        f"{one}/{other}": rows[one]["model_tflops_per_gpu"] / rows[other]["model_tflops_per_gpu"]
        for one, other in pairs
        if one in rows and other in rows
    }


def goals(rows: Rows, found: Mapping[str, float], gemm_tflops: Mapping[str, Any]) -> Iterator[str]:
    """A line for each goal that can be held against a number; one that is missed fails nothing."""
    row = rows.get("triplane_te")
    if row is None:
        yield "goals: not looked at without the row triplane_te"
        return
    if row["mfu"] is not None:
        yield met("bf16 MFU", row["mfu"], MFU, percent)
    if (ceiling := gemm_tflops.get("bf16")) is not None:
        yield met("bf16 of the fastest product", row["model_tflops_per_gpu"] / ceiling, OF_GEMM, percent)
    for other in ("megatron_core", "pytorch"):
        if (ratio := found.get(f"triplane_te/{other}")) is not None:
            yield met(f"bf16 of {other}", ratio, OF_OTHERS)
    if (ratio := found.get("triplane_fp8/triplane_te")) is not None:
        yield met("fp8 of bf16", ratio, OF_BF16)


def met(name: str, value: float, goal: float, shown: Any = "{:.3f}".format) -> str:
    """goal: bf16 MFU 51.0%, at least 50.0%: met."""
    return f"goal: {name} {shown(value)}, at least {shown(goal)}: {'met' if value >= goal else 'MISSED'}"


def losses(rows: Rows) -> Iterator[str]:
    """Problems: a loss that does not fall, and a first loss that is not the others'."""
    base = next((row for name in ("triplane_te", "triplane") if (row := rows.get(name))), None)
    for name, row in rows.items():
        first, last = row["losses"][0], row["losses"][-1]
        if not last < first:
            yield f"{name}: its loss does not fall: {first:.4f} to {last:.4f}"
        if base is None or any(row[key] != base[key] for key in ("shape", "layers")):
            continue
        bound = FIRST_LOSS_OWN if not row["same_weights"] else FIRST_LOSS_FP8 if row["fp8"] else FIRST_LOSS
        off = abs(first - base["losses"][0]) / abs(base["losses"][0])
        if not off <= bound:
            yield f"{name}: its first loss is {off:.1e} from Triplane's, more than {bound:.0e}"
