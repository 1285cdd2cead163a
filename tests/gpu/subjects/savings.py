"""What saves memory, off and on: time, memory against its prediction, same losses."""

from collections.abc import Mapping
from typing import Any

from models.costs.predict import size
from tests.gpu import measured_models
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.fusions import LOSS_BOUND, Known, compared, refused_or_run
from training.config.run_config import RunConfig, with_fields

SAVINGS: dict[str, Mapping[str, Any]] = {
    "logits_in_pieces": {"train.cross_entropy_chunk_tokens": 1024},
    "activations_on_the_host": {"train.cpu_offloading_num_layers": 2},
    "modules_on_the_host": {
        "train.offload_modules": ("core_attn", "attn_proj"), "model.megatron": ("min_offloaded_tensor_size=1024",),
    },
    "compile": {"train.compile": True},
    "recompute_mlp": {"train.recompute": "selective:mlp"},
    "recompute_full": {
        "train.recompute": "full:uniform:1",
    },
    "bf16_moments": {
        "optimizer.use_precision_aware_optimizer": True, "optimizer.exp_avg_dtype": "bf16",
        "optimizer.exp_avg_sq_dtype": "bf16",
    },
    "state_on_the_host": {"optimizer.optimizer_cpu_offload": True, "optimizer.optimizer_offload_fraction": 0.25},
}  # fmt: skip
"""The last: a quarter, since Adam on a host's cores takes seconds for a billion parameters."""
OWN_LOSSES = ("bf16_moments",)
"""Whose updates round otherwise: their losses are shown, not bound."""
PREDICTED_WITHOUT = ("compile",)
"""training/memory predicts what the run holds without it: what it saves is shown."""
BOUND = 0.05
"""Largest difference of measured from predicted bytes that a switch may add to that of the run without it."""
TO_THE_HOST = ("activations_on_the_host", "modules_on_the_host", "state_on_the_host")
"""Whose rows show that the feature was on: bytes in the host's memory."""
OFFLOADING = {"NVTE_CPU_OFFLOAD_V1": "1"}
"""What parallel/cuda_environment.py sets where a driver answers; an emulated device has none."""
ROW_S = 20.0
MIB = 2**20


def savings(run: SubjectRun) -> None:
    """A few layers of the dense model, data-parallel over all GPUs; every run has a process of its own."""
    run.numbers["rows"] = {}
    base = measured_models.of_role(run.machine, run.sizes, "dense", run.sizes.few_layers)
    run.say(f"{'':24} {'off s':>8} {'on s':>8} {'on/off':>7} {'on - off, MiB':>13} {'of predicted':>12} {'loss':>8}")
    known: Known = {}
    for name in SAVINGS:
        run.part(name, lambda name=name: one_saving(run, name, base, known), least_s=ROW_S)  # type: ignore[misc]


def one_saving(run: SubjectRun, name: str, base: RunConfig, known: Known) -> None:
    """A line; a problem where losses differ, or the switch's memory is not as predicted."""
    config = with_fields(base, SAVINGS[name])
    if found := config.problems(len(run.machine.gpus)):
        raise UnrunError(found[0])
    if name == "activations_on_the_host":
        some_leave(base)
    environ = OFFLOADING if config.train.offload_modules else {}
    without, with_it = refused_or_run(run, base, known, {}), refused_or_run(run, config, known, environ)
    row = compared(without, with_it)
    off, on = (each["measured"]["total"] / each["predicted"]["tensors"] - 1 for each in (without, with_it))
    run.numbers["rows"][name] = row | {"off": without, "on": with_it, "off_predicted": off, "on_predicted": on}
    times = f"{row['off_s']:8.4g} {row['on_s']:8.4g} {row['on_s'] / row['off_s']:7.3f}"
    run.say(f"{name:24} {times} {row['bytes'] / MIB:+13,.0f} {on:+12.1%} {row['loss']:8.1e}")
    saved = {each: -one["bytes"] for each, one in run.numbers["rows"].items()}
    best = max(saved, key=lambda each: saved[each])
    run.headline = f"{len(saved)} compared; {best} saves most, {size(saved[best])}"
    moved = with_it["measured"]["host"] - without["measured"]["host"]
    if name in TO_THE_HOST and not moved > 0:
        run.problem(f"{name}: no bytes more in the host's memory than without it: the switch did nothing")
    if name not in OWN_LOSSES and not row["loss"] <= LOSS_BOUND:
        run.problem(f"{name}: losses differ by {row['loss']:.1e}, more than {LOSS_BOUND:.0e}")
    if name not in PREDICTED_WITHOUT and not abs(on - off) <= BOUND:
        run.problem(f"{name}: measured is {on:+.1%} off the prediction, without it {off:+.1%}: more than {BOUND:.0%}")


def some_leave(base: RunConfig) -> None:
    """Raises UnrunError where all tensors are too small to leave the GPU, which the prediction does not know."""
    from models.layers.offload import LEAST_BYTES

    shape = measured_models.shape_of(base)
    largest = 2 * base.model.seq_length * max(shape.hidden_size, 2 * shape.ffn_hidden_size)
    if largest < LEAST_BYTES:
        raise UnrunError(f"its largest tensor has {size(largest)}, and below {size(LEAST_BYTES)} all stay on the GPU")
