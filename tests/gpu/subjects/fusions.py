"""Each field of the recipe's ``kernels`` section, on and off: time, memory, and whether the losses are the same."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from tests.gpu import measured_models
from tests.gpu.sizes import Role
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.throughput import steps_of
from training.config.run_config import RunConfig

SECTION = "kernels"
LOSS_BOUND = 5e-3
"""Largest difference of a loss, relative, in bf16: a few times what 16 bits do to the emulated device's."""
ROW_S = 20.0
MIB = 2**20


def fusions(run: SubjectRun) -> None:
    """A few layers of the model that a field is for, on all GPUs; every run has a process of its own."""
    if SECTION not in {each.name for each in dataclasses.fields(RunConfig)}:
        raise UnrunError(f"this version has no section {SECTION}: its fusions are not switched")
    run.numbers["rows"] = {}
    run.say(f"{'':44} {'off s':>8} {'on s':>8} {'on/off':>7} {'on - off, MiB':>13} {'loss':>8}")
    for name, off, on in switches(typing.get_type_hints(RunConfig)[SECTION]):
        run.part(name, lambda name=name, off=off, on=on: one_field(run, name, off, on), least_s=2 * ROW_S)  # type: ignore[misc]


def switches(section: type) -> Iterator[tuple[str, Any, Any]]:
    """Field, its value for off, and each for on; "auto" is one of the others, chosen by the program."""
    for name, kind in typing.get_type_hints(section).items():
        if bool in (kind, *typing.get_args(kind)):
            yield name, False, True
            continue
        values = [value for value in literals(kind) if value != "auto"]
        yield from ((name, values[0], value) for value in values[1:])


def literals(kind: Any) -> list[Any]:
    """Values of a Literal, also where None is allowed, too."""
    parts = typing.get_args(kind) if typing.get_origin(kind) is not typing.Literal else (kind,)
    return [value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)]


def role_of(field: str) -> Role:
    """The model that has what the field fuses."""
    if any(word in field for word in ("moe", "permute", "router", "expert", "grouped")):
        return "experts"
    return "latent" if "mla" in field else "dense"


def one_field(run: SubjectRun, name: str, off: Any, on: Any) -> None:
    """A line; a problem where the losses differ."""
    base = measured_models.of_role(run.machine, run.sizes, role_of(name), run.sizes.few_layers)
    without, with_it = (steps_of(run, switched(base, name, value)) for value in (off, on))
    row = compared(without, with_it)
    run.numbers["rows"][f"{name}={on}"] = row | {"off": without, "on": with_it}
    what = f"{name} {off} -> {on}"
    times = f"{row['off_s']:8.4g} {row['on_s']:8.4g} {row['on_s'] / row['off_s']:7.3f}"
    run.say(f"{what:44} {times} {row['bytes'] / MIB:+13,.0f} {row['loss']:8.1e}")
    if not row["loss"] <= LOSS_BOUND:
        run.problem(f"{name}: losses differ by {row['loss']:.1e}, more than {LOSS_BOUND:.0e}")


def switched(base: RunConfig, name: str, value: Any) -> RunConfig:
    """With one field set; what the configuration refuses is not run."""
    section = dataclasses.replace(getattr(base, SECTION), **{name: value})
    config = dataclasses.replace(base, **{SECTION: section})
    if found := config.problems(config.train.global_batch_size):
        raise UnrunError(f"{name} = {value}: {found[0]}")
    return config


def compared(without: dict[str, Any], with_it: dict[str, Any]) -> dict[str, float]:
    """Seconds of both, bytes that it adds at the peak, the largest relative difference of a loss."""
    pairs = list(zip(without["losses"], with_it["losses"], strict=True))
    differences = [abs(one - other) / abs(one) for one, other in pairs]
    return {
        "off_s": without["step_s"],
        "on_s": with_it["step_s"],
        "bytes": with_it["measured"]["total"] - without["measured"]["total"],
        "loss": next((one for one in differences if one != one), max(differences)),
    }
