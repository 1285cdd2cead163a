"""``--against``: a model and a reference compute the same tokens; the first layer whose output differs is named."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from models.costs.parameters import num_parameters
from parallel import launch, local_ranks, output
from parallel.lean_imports import lean
from program.errors import UserError
from program.host_memory import available_bytes
from program.printing import columns
from tools.parity.compared_model import ComparedModel, check_comparable, open_model
from tools.shared.dtypes import from_numbers, to_numbers

if TYPE_CHECKING:
    from torch import Tensor

GRADIENT = "gradient of "
MOST_SHOWN = 6
"""Outputs after the first that differs, weights of it, and differences of configurations that are shown."""
SPARE_BYTES = 1 << 30


@dataclass(kw_only=True, slots=True, frozen=True)
class Difference:
    """How far one output, gradient or weight is from the reference's."""

    name: str
    largest: float
    """Of the reference's elements, by size."""
    most: float
    """The largest difference; infinite where an element of either is NaN or Inf."""
    mean: float
    place: tuple[int, ...]
    """Of the largest difference."""
    found: float
    expected: float

    @property
    def relative(self) -> float:
        """The largest difference over the largest element."""
        return 0.0 if self.most == 0 else self.most / max(self.largest, 1e-30)


def compare(found: np.ndarray, expected: np.ndarray, name: str) -> Difference:
    """Two arrays of one shape; a number is an array of one."""
    found, expected = np.atleast_1d(found), np.atleast_1d(expected)
    difference = np.abs(found.astype(np.float64) - expected)
    difference[~np.isfinite(difference)] = np.inf
    place = np.unravel_index(int(difference.argmax()), difference.shape)
    finite = np.abs(expected[np.isfinite(expected)])
    return Difference(
        name=name,
        largest=float(finite.max(initial=0.0)),
        most=float(difference[place]),
        mean=float(difference.mean()),
        place=tuple(map(int, place)),
        found=float(found[place]),
        expected=float(expected[place]),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparing:
    """What is computed, and when two outputs are equal."""

    subject: Path
    reference: Path
    samples: int
    seq_length: int
    tolerance: float
    gradients: bool


def run(job: Comparing) -> int:
    """Compute, compare and print: exit code 0 where all agree, 1 where an output or a gradient differs.

    Raises UserError for what cannot be read, computed or compared.
    """
    if job.samples < 1 or job.seq_length < 1 or not 0 <= job.tolerance < math.inf:
        raise UserError("--num_samples and --seq_length must be 1 or more, --tolerance 0 or more.")
    reference, subject = open_model(job.reference), open_model(job.subject)
    notes = check_comparable(subject, reference)
    gradients = job.gradients and subject.is_ours and reference.is_ours
    for model in (reference, subject):
        _check_memory(model, gradients)
    dtype = next((one.dtype for one in (reference, subject) if one.dtype in ("bfloat16", "float16")), "float32")
    with tempfile.TemporaryDirectory(prefix="triplane-parity-") as scratch:
        expected, found = _outputs(job, (reference, subject), gradients, dtype, Path(scratch))
    print(f"reference  {reference.path} ({reference.what})\nmodel      {subject.path} ({subject.what})")
    length = len(expected["word_embeddings"][0])
    rounded = "" if dtype == "float32" else f", the weights of both rounded to {dtype}"
    what = f"{job.samples} samples x {length} tokens in fp32 on the CPU{rounded}"
    print(f"{what}; equal within {job.tolerance:g} of an output's largest element")
    return _report(found, expected, subject, reference, job.tolerance, dtype, notes)


def _outputs(
    job: Comparing, models: Sequence[ComparedModel], gradients: bool, dtype: str, scratch: Path
) -> list[Mapping[str, np.ndarray]]:
    """Of each model, from a process of its own: our CPU backend redirects parts of torch, and one model fits where two
    do not."""
    with output.own_output(scratch / "logs", launch.Identity(), every_rank=False), lean("cpu"):
        import torch

        from tools.parity import outputs

    shapes = [model.shape for model in models]
    length = min(job.seq_length, *(shape.max_position_embeddings for shape in shapes))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, min(shape.vocab_size for shape in shapes), (job.samples, length + 1))
    found: list[Mapping[str, np.ndarray]] = []
    for number, model in enumerate(models):
        path = scratch / f"{number}.pt"
        work = partial(outputs.write_outputs, model, torch.from_numpy(tokens), path, gradients, dtype)
        _in_a_process(model, work, scratch)
        loaded: dict[str, Tensor] = torch.load(path, mmap=True)
        found.append({name: tensor.numpy() for name, tensor in loaded.items()})
    return found


def _in_a_process(model: ComparedModel, work: Callable[[], None], scratch: Path) -> None:
    failure = local_ranks.fork_logged(1, lambda _: work(), scratch / "logs")
    if failure is None:
        return
    if failure.code == 2:
        raise UserError(failure.text)
    if failure.code == 130:
        raise KeyboardInterrupt
    raise RuntimeError(f"{model.path}: its outputs could not be computed:\n{failure.text}")


def _check_memory(model: ComparedModel, gradients: bool) -> None:
    needed = num_parameters(model.shape, padded_vocab=True) * (8 if gradients else 4) * 5 // 4 + SPARE_BYTES
    if needed > (free := available_bytes()):
        fix = " --no_gradients needs about half." if gradients else ""
        raise UserError(
            f"{model.path} needs {needed / 1e9:.0f} GB of memory in fp32, and {free / 1e9:.0f} GB are free.{fix}"
        )


def _report(
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    subject: ComparedModel,
    reference: ComparedModel,
    tolerance: float,
    dtype: str,
    notes: Sequence[str],
) -> int:
    """Outputs in the order of computing, then gradients from the loss back."""
    outputs = [one for one in _differences(found, expected) if not one.name.startswith(GRADIENT)]
    gradients = [one for one in _differences(found, expected) if one.name.startswith(GRADIENT)][::-1]
    for name in sorted(found.keys() ^ expected.keys()):
        if not name.startswith(GRADIENT):
            print(f"not compared: {name}, which only the {'model' if name in found else 'reference'} has")
    for what, compared in (("outputs", outputs), ("gradients", gradients)):
        wrong = [number for number, one in enumerate(compared) if not one.relative <= tolerance]
        if wrong:
            _show_first(what, compared, wrong, tolerance)
            _show_causes(compared[wrong[0]].name, subject, reference, dtype, notes)
            return 1
        if compared:
            worst = max(compared, key=lambda one: one.relative)
            print(
                f"{len(compared)} {what} are equal; furthest {worst.name}: {worst.relative:.1e} of the largest element"
            )
    return 0


def _differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> list[Difference]:
    """Of what both have. A vocabulary may be padded in one of them: its further logits are left out."""
    compared = []
    for name, theirs in expected.items():
        if name not in found:
            continue
        ours = found[name]
        if name.endswith("output_layer"):
            width = min(ours.shape[-1], theirs.shape[-1])
            ours, theirs = ours[..., :width], theirs[..., :width]
        if ours.shape != theirs.shape:
            raise UserError(f"{name}: {list(ours.shape)} in the model, {list(theirs.shape)} in the reference.")
        compared.append(compare(ours, theirs, name))
    return compared


def _show_first(what: str, compared: Sequence[Difference], wrong: Sequence[int], tolerance: float) -> None:
    """The first that differs, beside what is around it."""
    first = wrong[0]
    shown = compared[max(0, first - 2) : first + 1 + MOST_SHOWN]
    rows: list[tuple[str, ...]] = [("", "largest", "difference", "mean", "relative", "")]
    for one in shown:
        verdict = "differs" if not one.relative <= tolerance else "equal"
        numbers = (one.largest, one.most, one.mean, one.relative)
        rows.append((one.name, *(f"{number:.1e}" for number in numbers), verdict))
    print("\n".join(columns(rows, left=(0, 5))))
    one = compared[first]
    before = f"the {first} before it are equal" if first else "nothing comes before it"
    print(f"{len(wrong)} of {len(compared)} {what} differ. First: {one.name}; {before}")
    print(f"  largest difference {one.most:.3g} at {_place(one)}: {one.found:.6g} instead of {one.expected:.6g}")


def _place(one: Difference) -> str:
    """sample 0, token 5, channel 17."""
    if one.name.startswith(GRADIENT) or len(one.place) != 3:
        return f"{list(one.place)}"
    last = "id" if one.name.endswith("output_layer") else "channel"
    return ", ".join(f"{what} {number}" for what, number in zip(("sample", "token", last), one.place, strict=True))


def _show_causes(name: str, subject: ComparedModel, reference: ComparedModel, dtype: str, notes: Sequence[str]) -> None:
    """Weights behind an output that are not equal, and what the configurations say otherwise."""
    pairs = [(one, subject.weight(one), reference.weight(one)) for one in _weights_behind(name, reference)]
    known = [(one, ours, theirs) for one, ours, theirs in pairs if ours is not None and theirs is not None]
    ids = min(subject.shape.vocab_size, reference.shape.vocab_size)
    different = [
        text for one, ours, theirs in known if (text := _weight_difference(one, ours, theirs, dtype, ids)) is not None
    ]
    if different:
        print("\n".join(["weights behind it that differ:", *different[:MOST_SHOWN]]))
    elif known:
        print("the weights behind it are equal: what is computed with them differs")
    if notes:
        print(f"configurations differ: {'; '.join(notes[:MOST_SHOWN])}{' ...' if len(notes) > MOST_SHOWN else ''}")


def _weight_difference(name: str, ours: np.ndarray, theirs: np.ndarray, dtype: str, ids: int) -> str | None:
    """In words; None where they are equal. ids: rows of the vocabulary that mean something."""
    if name in ("word_embeddings.weight", "output_layer.weight"):
        ours, theirs = ours[:ids], theirs[:ids]
    if ours.shape != theirs.shape:
        return f"  {name}: {list(ours.shape)} instead of {list(theirs.shape)}"
    if not name.endswith("expert_bias"):
        ours, theirs = (to_numbers(from_numbers(one, dtype), dtype) for one in (ours, theirs))
    one = compare(ours, theirs, name)
    if one.most == 0:
        return None
    count = int((ours != theirs).sum())
    return (
        f"  {name}: {count:,} of {theirs.size:,} elements differ, most at {list(one.place)}: "
        f"{one.found:.6g} instead of {one.expected:.6g}"
    )


def _weights_behind(name: str, model: ComparedModel) -> list[str]:
    """Canonical names of the parameters that an output is made with, its layer's norm included."""
    from models.costs.parameters import parameters

    name = name.removeprefix(GRADIENT)
    names = [parameter.name for parameter in parameters(model.shape)]
    if name in names:
        return [name]
    if name == "word_embeddings":
        return [one for one in names if one.endswith("_embeddings.weight")]
    if name in ("output_layer", "loss"):
        return [one for one in names if one.startswith("output_layer.")] or ["word_embeddings.weight"]
    block, _, part = name.rpartition(".")
    if part == "self_attention":
        return [one for one in names if one.startswith((f"{block}.self_attention.", f"{block}.input_layernorm."))]
    if part == "mlp":
        return [one for one in names if one.startswith((f"{block}.mlp.", f"{block}.pre_mlp_layernorm."))]
    return [one for one in names if one.startswith(f"{name}.")]
