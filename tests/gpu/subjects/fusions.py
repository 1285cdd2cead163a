"""Each field of the recipe's ``kernels`` section, each option of NCCL's, and weights in fp8, on and off: time, memory,
same losses."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from models.kernels import FUSIONS, KernelsConfig, KernelSetting, fusions_on, obstacle
from parallel.config import PrecisionConfig
from tests.gpu import measured_models
from tests.gpu.machine import GpuMachine
from tests.gpu.sizes import Role
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.throughput import steps_of
from training.config.recipe import dump
from training.config.run_config import RunConfig, kernel_setting

LOSS_BOUND = 5e-3
"""Largest difference of a loss, relative, in bf16: a few times what 16 bits do to the emulated device's."""
Known = dict[str, dict[str, Any]]
"""Recipe -> its steps: what has the program's own choice is the same run for every field of a model."""
OFF = (False, "off", "none")
NCCL: tuple[tuple[str, Any, Any], ...] = (
    ("high_priority_stream_groups", (), ("dp_cp", "ep", "ep_dp")),
    ("use_sharp", False, True),
    ("nccl_ub", False, True),
)
"""Of ``parallel.megatron``: field, off, on."""
PRECISION: tuple[tuple[str, Any, Any], ...] = (("fp8_param_gather", False, True),)
"""Of the section ``precision``, with fp8 both times."""
VARIABLES: tuple[tuple[str, Any, Any], ...] = (("NCCL_NVLS_ENABLE", "0", "1"),)
"""Of the environment."""
REFUSED = ("UserError: ", "SharedMistake: ")
"""How a rank says that this configuration cannot run here."""
ROW_S = 20.0
MIB = 2**20


def fusions(run: SubjectRun) -> None:
    """A few layers of the model that a field is for, on all GPUs; every run has a process of its own."""
    run.numbers["rows"] = {}
    run.say(f"{'':44} {'off s':>8} {'on s':>8} {'on/off':>7} {'on - off, MiB':>13} {'loss':>8}")
    known: Known = {}
    each = ((name, "off", "on") for name in FUSIONS)
    for name, off, on in (*each, *switches(KernelsConfig), *PRECISION, *NCCL, *VARIABLES):

        def one(name: str = name, off: Any = off, on: Any = on) -> None:
            one_field(run, name, off, on, known)

        run.part(name, one, least_s=2 * ROW_S)


def switches(section: type) -> Iterator[tuple[str, Any, Any]]:
    """Field, its value for off, and each for on; "auto" is one of them, chosen by the program."""
    for name, kind in typing.get_type_hints(section).items():
        values = [False, True] if bool in (kind, *typing.get_args(kind)) else literals(kind)
        values = [value for value in values if value != "auto"]
        off = next((value for value in values if value in OFF), None)
        yield from ((name, off, value) for value in values if off is not None and value != off)


def literals(kind: Any) -> list[Any]:
    """Values of a Literal, also where None is allowed, too."""
    parts = typing.get_args(kind) if typing.get_origin(kind) is not typing.Literal else (kind,)
    return [value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)]


def role_of(field: str) -> Role:
    """The model that has what the field fuses; shared experts are DeepSeek's."""
    if "shared_expert" in field or "mla" in field:
        return "latent"
    return "experts" if any(word in field for word in ("moe", "permute", "router", "expert", "grouped")) else "dense"


def one_field(run: SubjectRun, name: str, off: Any, on: Any, known: Known) -> None:
    """A line; a problem where the losses differ. The other fields stay as the program has them."""
    gpus = len(run.machine.gpus)
    precision = precision_of(run.machine, name)
    base = measured_models.of_role(run.machine, run.sizes, role_of(name), run.sizes.few_layers, precision)
    if name.startswith("tp_") and gpus > 1:
        split = dataclasses.replace(base.parallel, tensor_model_parallel_size=2, sequence_parallel=True)
        base = dataclasses.replace(base, parallel=split)
    chosen = is_on(run.machine, base, name)
    with_it = refused_or_run(run, base if chosen else switched(base, name, on, gpus), known, environ_of(name, on))
    without = refused_or_run(run, switched(base, name, off, gpus), known, environ_of(name, off))
    row = compared(without, with_it)
    run.numbers["rows"][f"{name}={on}"] = row | {"off": without, "on": with_it}
    what = f"{name} {off} -> {on}"
    times = f"{row['off_s']:8.4g} {row['on_s']:8.4g} {row['on_s'] / row['off_s']:7.3f}"
    ratios = {each: one["on_s"] / one["off_s"] for each, one in run.numbers["rows"].items()}
    best = min(ratios, key=lambda each: ratios[each])
    run.headline = f"{len(ratios)} compared; the lowest: {best}, {ratios[best]:.3f} of the step without it"
    run.say(f"{what:44} {times} {row['bytes'] / MIB:+13,.0f} {row['loss']:8.1e}")
    if not row["loss"] <= LOSS_BOUND:
        run.problem(f"{name}: losses differ by {row['loss']:.1e}, more than {LOSS_BOUND:.0e}")


def precision_of(machine: GpuMachine, name: str) -> PrecisionConfig:
    """That the two runs of a switch compute in. Raises UnrunError where the machine cannot."""
    if name not in (field for field, _, _ in PRECISION):
        return PrecisionConfig()
    if not machine.has_te or not machine.has_fp8:
        raise UnrunError("fp8 needs transformer-engine and compute capability 8.9 or higher")
    return PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise")


def is_on(machine: GpuMachine, base: RunConfig, name: str) -> bool:
    """Whether "auto" turns it on there."""
    setting = setting_of(base, machine.has_te)
    return name in fusions_on(base.kernels, setting)


def setting_of(base: RunConfig, has_te: bool | None = None) -> KernelSetting:
    """has_te: None: as a run with a GPU takes it to be."""
    return kernel_setting(base, measured_models.shape_of(base), cuda=True, transformer_engine=has_te)


def environ_of(name: str, value: Any) -> dict[str, str]:
    """What a switch of the environment sets."""
    return {name: value} if name in (variable for variable, _, _ in VARIABLES) else {}


def refused_or_run(run: SubjectRun, config: RunConfig, known: Known, environ: dict[str, str]) -> dict[str, Any]:
    """Its steps, measured once. Raises UnrunError where the program says why it cannot run."""
    text = f"{dump(config)}{environ}"
    if text in known:
        return known[text]
    try:
        known[text] = steps_of(run, config, environ)
        return known[text]
    except RuntimeError as error:
        lines = str(error).splitlines()[::-1]
        why = next((line.partition(kind)[2] for line in lines for kind in REFUSED if kind in line), "")
        raise UnrunError(why) if why else error from None


def switched(base: RunConfig, name: str, value: Any, gpus: int) -> RunConfig:
    """With one field set; what the configuration refuses is not run."""
    if name in FUSIONS:
        if value == "on" and (why := obstacle(name, setting_of(base))):
            raise UnrunError(f"{name} = on: it cannot run: {why}")
        off = (*base.kernels.off, name) if value == "off" else tuple(each for each in base.kernels.off if each != name)
        return dataclasses.replace(base, kernels=dataclasses.replace(base.kernels, off=off))
    section = next((each for each in ("kernels", "precision") if hasattr(getattr(base, each), name)), "parallel")
    if section == "parallel" and gpus == 1:
        raise UnrunError("one GPU has no collectives")
    if environ_of(name, value):
        return base
    fields = {"megatron": (f"{name}={value}",) if value else ()} if section == "parallel" else {name: value}
    changed: Any = dataclasses.replace(getattr(base, section), **fields)
    config = dataclasses.replace(base, **{section: changed})
    if found := config.problems(gpus):
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
