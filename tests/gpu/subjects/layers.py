"""Transformer Engine's layers one by one: what is wrong with its library, its extension or a kernel shows here."""

from functools import partial
from typing import Any

from tests.gpu.subject_run import SubjectRun, UnrunError

BOUND = 0.03
"""Largest relative difference from torch in fp32: bf16 keeps 8 bits."""
BOUNDS = {
    "linear_tensorwise": 0.1, "linear_delayed": 0.1, "linear_blockwise": 0.1,  # 3 to 4 bits
    "adam": 1e-5, "cross_entropy": 1e-5,  # fp32
}  # fmt: skip


def layers(run: SubjectRun) -> None:
    """All in one process; a row each."""
    if not run.machine.has_te:
        raise UnrunError("transformer-engine is not installed (pip install --no-build-isolation -e '.[te]')")
    (found,) = run.measured("layers")
    run.numbers["rows"] = {}
    for name, row in found.items():
        run.part(name, partial(one_layer, run, name, row))
    run.headline = f"{sum('error' not in row for row in found.values())} of {len(found)} layers compute"


def one_layer(run: SubjectRun, name: str, row: dict[str, Any]) -> None:
    """A line; a problem where it failed or is too far off."""
    run.numbers["rows"][name] = row
    if "error" in row:
        return run.problem(f"{name}: {row['error']}")
    bound = BOUNDS.get(name, BOUND)
    run.say(f"{name:20} " + ", ".join(f"{what} {value:.1e}" for what, value in row.items()))
    far = [f"{what} {value:.1e}" for what, value in row.items() if not value <= bound]
    return run.problem(f"{name}: {', '.join(far)} off torch's, more than {bound:.0e}") if far else None
