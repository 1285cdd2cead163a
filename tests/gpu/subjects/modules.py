"""Transformer Engine's modules against ours, fp8 and fp4 against bf16, and the tests that need a GPU."""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import processes
from tests.gpu.subject_run import SubjectRun, UnrunError

SPEC_BOUNDS = {
    "fp32": {"logits": 1e-4, "gradient": 1e-3},
    "bf16": {"logits": 3e-2, "gradient": 4e-2},
}
"""Largest differences between the two specs, relative to a tensor's largest element. On a CPU our bf16 is 1.1e-2
(logits) and 1.4e-2 (gradient) away from our fp32; two models that round differently, about twice that."""

LOSS_BOUNDS = {"fp8": 0.02, "nvfp4": 0.05}
"""Largest difference of a loss in fp8 or fp4 from the bf16 loss of the same step, relative."""

FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Real fp32 products from every library: Transformer Engine would otherwise use TF32 (10 bits)."""


SPEC_S = 15.0
"""A process's start and one model."""


def specs(run: SubjectRun) -> None:
    """Logits and every gradient of both on the same weights: a row for each architecture in fp32, one in bf16."""
    from tests.gpu.specs import CASES

    if not run.machine.has_te:
        raise UnrunError("transformer-engine is not installed (pip install --no-build-isolation -e '.[te]')")
    run.numbers["rows"] = {}
    with tempfile.TemporaryDirectory(prefix="triplane-specs-") as folder:
        due = [name for name in CASES if run.is_due(name)]
        families = Families(run=run, names=due, results=Path(folder, "results.jsonl"))
        for name in CASES:
            run.part(name, lambda name=name: one_spec(run, name, families.of(name)))  # type: ignore[misc]
    agree = sum(not beyond_bounds(name, row) for name, row in run.numbers["rows"].items())
    run.headline = f"{agree} of {len(CASES)} agree"


def one_spec(run: SubjectRun, name: str, row: dict[str, Any]) -> None:
    """A line; a problem where they are too far apart. Raises RuntimeError where the family failed."""
    run.numbers["rows"][name] = row
    if "error" in row:
        raise RuntimeError(row["error"])
    run.say(f"{name}: logits {row['logits']:.1e}, worst gradient {row['gradient']:.1e} ({row['worst']})")
    run.problem(*beyond_bounds(name, row))


def beyond_bounds(name: str, row: dict[str, Any]) -> list[str]:
    """One line for each number of a row above the bound of its dtype, and for its error."""
    return [row["error"]] if "error" in row else beyond(row, SPEC_BOUNDS[name.partition("-")[0]], name)


@dataclass(kw_only=True, slots=True)
class Families:
    """What one process computes for many rows. A process that ends loses what comes after: that has a new one."""

    run: SubjectRun
    names: list[str]
    results: Path

    def of(self, name: str) -> dict[str, Any]:
        """Its row, measured together with those behind it. Raises RuntimeError where the process ended in it."""
        if name in (found := self._found()):
            return found[name]
        if self.run.left_s < SPEC_S:
            self.run.late.append(name)
            raise UnrunError("no time left")
        failure = self._measure([each for each in self.names[self.names.index(name) :] if each not in found])
        if name in (found := self._found()):
            return found[name]
        raise RuntimeError(failure)

    def _measure(self, names: list[str]) -> str:
        """How the process failed; empty: it did not."""
        try:
            self.run.measured("specs", environ=FP32, names=names, results=str(self.results))
        except RuntimeError as error:
            return str(error)
        return ""

    def _found(self) -> dict[str, dict[str, Any]]:
        """By name; without the last line where its process ended within it."""
        text = self.results.read_text() if self.results.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if text != whole:  # or the next process would continue that line
            self.results.write_text(whole)
        return {row.pop("name"): row for row in map(json.loads, whole.splitlines())}


def beyond(found: Mapping[str, float], bounds: Mapping[str, float], what: str) -> list[str]:
    """One line for each number above its bound, NaN included."""
    return [
        f"{what}: {name} differs by {found[name]:.1e}, more than {bound:.0e}"
        for name, bound in bounds.items()
        if not found[name] <= bound
    ]


def fp8(run: SubjectRun) -> None:
    """Losses of some steps from the same weights on the same tokens."""
    if not run.machine.has_te or not run.machine.has_fp8:
        missing = "fp8 tensor cores (compute capability 8.9 or higher)" if run.machine.has_te else "transformer-engine"
        raise UnrunError(f"{missing} missing")
    (plain,) = run.measured("losses", dtype="bf16", steps=run.sizes.fp8_steps)
    (hybrid,) = run.measured("losses", dtype="bf16", fp8="hybrid", steps=run.sizes.fp8_steps)
    found = {"fp8": hybrid["loss"]}
    if run.machine.has_fp4:
        found["nvfp4"] = run.measured("losses", dtype="bf16", fp4="e2m1", steps=run.sizes.fp8_steps)[0]["loss"]
    judge_fp8(run, plain["loss"], found)


def judge_fp8(run: SubjectRun, plain: list[float], found: dict[str, list[float]]) -> None:
    """All losses must fall, and stay with those in bf16 within ``LOSS_BOUNDS``. found: losses by format."""
    from tools.parity.compare import furthest

    difference = {name: furthest(losses, plain) for name, losses in found.items()}
    run.numbers = {"bf16": plain, **found, "difference": difference}
    for name, losses in {"bf16": plain, **found}.items():
        apart = f", apart {difference[name]:.1e}" if name in difference else ""
        run.say(f"{name} {losses[0]:.3f} -> {losses[-1]:.3f}{apart}")
        if not losses[-1] < losses[0]:
            run.problem(f"{name}: the loss does not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")
    for name in found:
        run.problem(*beyond({"loss": difference[name]}, {"loss": LOSS_BOUNDS[name]}, f"{name} against bf16"))


def tests(run: SubjectRun) -> None:
    """pytest -m gpu, without plugins, which may not be there."""
    if not importlib.util.find_spec("pytest"):
        raise UnrunError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    last = processes.run(command, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, run.left_s).strip().splitlines()[-1]
    run.note("summary", last)
    run.say(last)
