"""Predicted against measured memory of three architectures."""

from models.costs.predict import size
from tests.gpu import measured_models
from tests.gpu.sizes import Role
from tests.gpu.subject_run import SubjectRun
from tests.gpu.subjects.throughput import steps_of

BOUND = 0.10
"""Largest difference of measured from predicted tensors at the peak, relative: training/memory says a few percent."""
CATEGORIES = ("weights", "gradients", "optimizer", "activations")
PART_S = 25.0


def memory(run: SubjectRun) -> None:
    """The allocator's peak of a few layers of each, on all GPUs: rank 0's."""
    run.numbers["rows"] = {}
    roles: tuple[Role, ...] = ("dense", "experts", "latent")
    for role in roles:
        run.part(role, lambda role=role: one_model(run, role), least_s=PART_S)  # type: ignore[misc]


def one_model(run: SubjectRun, role: Role) -> None:
    """A line; a problem where they are too far apart."""
    config = measured_models.of_role(run.machine, run.sizes, role, run.sizes.few_layers)
    found = steps_of(run, config)
    measured, predicted = found["measured"], found["predicted"]
    off = measured["total"] / predicted["tensors"] - 1
    run.numbers["rows"][role] = found | {"off": off}
    counts = ", ".join(f"{name} {size(predicted[name])} and {size(measured[name])}" for name in CATEGORIES)
    totals = f"predicted {size(predicted['tensors'])}, measured {size(measured['total'])} ({off:+.1%})"
    run.say(f"{found['shape']}, {found['layers']} layers: {totals}")
    run.say(f"  {counts}; libraries {size(measured['workspace'])}")
    run.headline = ", ".join(f"{row['shape']} {row['off']:+.1%}" for row in run.numbers["rows"].values())
    if measured["activations"] < 0:
        run.problem(f"{role}: the peak came before the first step: activations were not measured")
    elif not abs(off) <= BOUND:
        run.problem(f"{role}: measured is {off:+.1%} off the prediction, more than {BOUND:.0%}")
