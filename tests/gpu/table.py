"""The subjects, in the order in which they run: what tells most, and what others build on, comes first."""

from typing import Literal

from tests.gpu.runner import Subject

SubjectName = Literal["environment", "specs", "fp8", "layouts", "tests"]

SUBJECTS = (
    Subject(
        name="environment", function="tests.gpu.subjects.environment:environment", least_s=10, most_s=120,
        shows="what the numbers depend on",
    ),
    Subject(
        name="specs", function="tests.gpu.subjects.modules:specs", least_s=30, most_s=180,
        shows="Transformer Engine's modules against Triplane's: logits and gradients from the same weights",
    ),
    Subject(
        name="fp8", function="tests.gpu.subjects.modules:fp8", least_s=30, most_s=120,
        shows="losses of 20 steps in fp8 against bf16",
    ),
    Subject(
        name="layouts", function="tests.gpu.subjects.layouts:layouts", least_s=60, most_s=240,
        shows="TP, PP and DP against one rank: loss, gradient norm, gradients",
    ),
    Subject(
        name="tests", function="tests.gpu.subjects.modules:tests", least_s=60, most_s=300,
        shows="pytest -m gpu",
    ),
)  # fmt: skip
