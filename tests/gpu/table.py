"""The subjects, in the order in which they run: what tells most, and what others build on, comes first."""

from typing import Any, Literal

from tests.gpu.runner import Subject

SubjectName = Literal[
    "environment", "layers", "trainings", "specs", "layouts", "fp8", "tests", "throughput", "beside", "planner",
    "memory", "savings", "fusions", "checkpoint", "planned_layouts", "profile",
]  # fmt: skip


def row(name: SubjectName, module: str, least_s: float, shows: str, **more: Any) -> Subject:
    """A function of the subject's name in a module of tests/gpu/subjects."""
    return Subject(name=name, function=f"tests.gpu.subjects.{module}:{name}", least_s=least_s, shows=shows, **more)


SUBJECTS = (
    row("environment", "environment", 45, "what the numbers depend on: cards, driver, clocks, links, libraries"),
    row("layers", "layers", 15, "each of Transformer Engine's layers that a run uses against torch", timed=False),
    row("trainings", "trainings", 60, "losses and checkpoints of short trainings against one CPU rank", timed=False),
    row("specs", "modules", 30, "Transformer Engine's modules against ours: logits and gradients", timed=False),
    row("layouts", "layouts", 40, "TP, PP and DP against one rank: loss, gradient norm, gradients", timed=False),
    row("fp8", "modules", 30, "losses in fp8 and fp4 against bf16, step by step", timed=False),
    row("tests", "modules", 40, "pytest -m gpu", timed=False),
    row("throughput", "throughput", 90, "an 8B-shaped model at 8,192 tokens, in bf16, fp8 and fp4"),
    row(
        "beside",
        "beside",
        60,
        "the same step in plain PyTorch, in Megatron's GPTModel, and in whole programs",
        reads=("throughput",),
    ),
    row("planner", "planner", 45, "predicted against measured steps, calibrated on this card", reads=("throughput",)),
    row("memory", "memory", 50, "predicted against measured memory of three architectures"),
    row("savings", "savings", 60, "each switch that saves memory, off and on: time, memory, equality"),
    row("fusions", "fusions", 60, "each field of the kernels section, off and on: time, memory, equality"),
    row("checkpoint", "checkpoint", 40, "how long training stands still, against a copy to pinned memory"),
    row(
        "planned_layouts",
        "planned_layouts",
        60,
        "one rank of 64 or 256 played on one GPU, against the planner",
        reads=("planner",),
    ),
    row(
        "profile",
        "profile",
        20,
        "what a step's time goes to on the GPU, kind by kind and kernel by kernel",
        reads=("throughput",),
    ),
)
"""Nothing is run without the environment, which imports torch from a cold disk. The least that all of them need is
little more than half of 20 minutes: what one does not take, the next may."""
