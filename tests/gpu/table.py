"""The subjects, in the order in which they run: what tells most, and what others build on, comes first."""

from typing import Literal

from tests.gpu.runner import Subject

SubjectName = Literal[
    "environment", "trainings", "specs", "throughput", "beside", "planner", "memory", "savings", "fusions",
    "checkpoint", "layouts", "profile", "fp8", "tests",
]  # fmt: skip


def row(name: SubjectName, module: str, least_s: float, most_s: float, shows: str) -> Subject:
    """A function of the subject's name in a module of tests/gpu/subjects."""
    function = f"tests.gpu.subjects.{module}:{name}"
    return Subject(name=name, function=function, least_s=least_s, most_s=most_s, shows=shows)


SUBJECTS = (
    row("environment", "environment", 10, 120, "what the numbers depend on: cards, driver, clocks, links, libraries"),
    row("trainings", "trainings", 60, 240, "losses and checkpoints of short trainings against one CPU rank"),
    row("specs", "modules", 30, 150, "Transformer Engine's modules against ours: logits and gradients"),
    row("throughput", "throughput", 90, 300, "an 8B-shaped model at 8,192 tokens, in bf16, fp8 and fp4"),
    row("beside", "beside", 60, 400, "the same step in plain PyTorch, in Megatron's GPTModel, and in whole programs"),
    row("planner", "planner", 45, 150, "predicted against measured steps, calibrated on this card"),
    row("memory", "memory", 50, 150, "predicted against measured memory of three architectures"),
    row("savings", "savings", 60, 300, "each switch that saves memory, off and on: time, memory, equality"),
    row("fusions", "fusions", 60, 300, "each field of the kernels section, off and on: time, memory, equality"),
    row("checkpoint", "checkpoint", 40, 150, "how long training stands still, against a copy to pinned memory"),
    row("layouts", "layouts", 40, 200, "TP, PP and DP against one rank: loss, gradient norm, gradients"),
    row("profile", "profile", 20, 120, "what a step's time goes to on the GPU, kind by kind and kernel by kernel"),
    row("fp8", "modules", 30, 100, "losses in fp8 and fp4 against bf16, step by step"),
    row("tests", "modules", 40, 200, "pytest -m gpu"),
)
"""The least that all of them need is about half of 20 minutes: what one does not take, the next may."""
