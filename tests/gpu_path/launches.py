"""python -m tests.gpu_path.launches: kernels that the host launches for a microbatch, by model and layout.

Of the first rank. A block's are half the difference between models of four blocks and of two; the ends are the rest:
embedding, output layer and loss. The planner prices them (tools/plan/cost/launches.py).
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from program.printing import columns
from tests.gpu_path.emulator import ROOT, Emulation

sys.path.insert(0, str(ROOT / "tests" / "support"))  # as pytest does: the next one imports from there
from tests.gpu_path.trainings import EXTENSION, Training, WarmDevice, warm_device

INDUCTOR_FRONT = "tests.gpu_path.inductor_front"
HOOKS = (INDUCTOR_FRONT, "tests.gpu_path.launch_meter")
JIT_FUSED = "tests.gpu_path.jit_fused"
FEWER, MORE = 2, 4
"""Blocks of the two models."""
BATCH = 2
"""Microbatches of a rank."""


def recomputing(*modules: str) -> tuple[str, ...]:
    """Flags: all of a block, or these of its modules."""
    return ("--train.recompute", f"selective:{','.join(modules)}" if modules else "full:uniform:1")


@dataclass(kw_only=True, slots=True, frozen=True)
class LaunchCase:
    """A model on a layout. flags: of the recipe, described by ``words``."""

    shape: str
    layout: str = ""
    words: str = ""
    flags: tuple[str, ...] = ()
    replicas: int = 1
    """Ranks that have microbatches of their own."""
    stages: int = 1


FP8 = ("--model.ffn_hidden_size", "192", "--precision.fp8", "hybrid", "--precision.fp8_recipe", "tensorwise")
DENSE = (
    LaunchCase(shape="gpt3_tiny"),
    LaunchCase(shape="llama3_tiny"),
    LaunchCase(shape="llama3_tiny", layout="tp2"),
    LaunchCase(shape="llama3_tiny", layout="tp2sp"),
    LaunchCase(shape="llama3_tiny", layout="pp2", stages=2),
    LaunchCase(shape="llama3_tiny", layout="dp2overlap", replicas=2),
    LaunchCase(shape="llama3_tiny", layout="dp2zero3", replicas=2),
    LaunchCase(shape="llama3_tiny", words="full recomputation", flags=recomputing()),
    LaunchCase(shape="llama3_tiny", words="core_attn again", flags=recomputing("core_attn")),
    LaunchCase(shape="llama3_tiny", words="mlp again", flags=recomputing("mlp")),
)
EXPERTS = (
    LaunchCase(shape="mixtral_tiny"),
    LaunchCase(shape="mixtral_tiny", words="8 experts", flags=("--model.num_moe_experts", "8")),
    LaunchCase(shape="mixtral_tiny", layout="ep2", replicas=2),
    LaunchCase(shape="deepseek_v3_tiny"),
)
CASES = (*DENSE, *EXPERTS)
COMPILE = ("--train.compile", "true")
COMPILED = (
    *(LaunchCase(shape=shape, words="compiled", flags=COMPILE)
      for shape in ("gpt3_tiny", "llama3_tiny", "mixtral_tiny", "deepseek_v3_tiny")),
    *(LaunchCase(shape="llama3_tiny", words=f"compiled, {module} again", flags=(*COMPILE, *recomputing(module)))
      for module in ("core_attn", "mlp")),
)  # fmt: skip
ENGINE_ONLY = (LaunchCase(shape="llama3_tiny", words="fp8 tensorwise", flags=FP8),)


class PerMicrobatch(NamedTuple):
    """Kernels, and beside them collectives."""

    launches: float
    collectives: float

    def __str__(self) -> str:
        return f"{self.launches:g}" + (f" + {self.collectives:g}" if self.collectives else "")


class Counted(NamedTuple):
    """Of a microbatch: one block, and the ends of the model. Of an iteration: what it has beside its microbatches."""

    forward: PerMicrobatch
    backward: PerMicrobatch
    ends_forward: PerMicrobatch
    ends_backward: PerMicrobatch
    step_per_block: float
    step: float


def counted(device: WarmDevice, case: LaunchCase) -> Counted:
    """By two trainings of three iterations."""
    few, many = (_counts(device, case, blocks) for blocks in (FEWER, MORE))
    fewer, blocks, found = FEWER // case.stages, (MORE - FEWER) // case.stages, {}
    for name in ("forward", "backward"):
        each = [(b - a) / blocks / BATCH for a, b in zip(few[name], many[name], strict=True)]
        ends = [a / BATCH - fewer * own for a, own in zip(few[name], each, strict=True)]
        found[name], found[f"ends_{name}"] = PerMicrobatch(*each), PerMicrobatch(*ends)
    rest = [all_of["step"][0] - all_of["forward"][0] - all_of["backward"][0] for all_of in (few, many)]
    per_block = (rest[1] - rest[0]) / blocks
    return Counted(**found, step_per_block=per_block, step=rest[0] - fewer * per_block)


def _counts(device: WarmDevice, case: LaunchCase, blocks: int) -> dict[str, list[int]]:
    batch = str(BATCH * case.replicas)
    flags = ["--model.num_layers", str(blocks), "--train.global_batch_size", batch, "--train.train_iters", "3"]
    if case.shape.startswith("deepseek"):  # its first block is dense
        flags += ["--model.moe_layer_freq", str([0] + [1] * (blocks - 1))]
    with tempfile.TemporaryDirectory() as folder:
        emulation = Emulation(hooks=HOOKS, settings={"EMULATED_CUDA_LAUNCHES": folder})
        training = Training(layout=case.layout, shape=case.shape)
        device.train(training, Path(folder) / "run", emulation, (*flags, "--precision.dtype", "bf16", *case.flags))
        found: dict[str, list[int]] = json.loads((Path(folder) / "launches-0.json").read_text())
        return found


def table(cases: Sequence[LaunchCase], device: WarmDevice) -> Iterator[tuple[str, ...]]:
    """A row a case."""
    for case in cases:
        found = counted(device, case)
        name = " ".join(filter(None, (case.shape, case.layout, case.words)))
        passes = (found.forward, found.backward, found.ends_forward, found.ends_backward)
        yield (name, *map(str, passes), f"{found.step_per_block:g}", f"{found.step:g}")


def main() -> None:
    """Both programs' tables. "+": collectives beside launches."""
    head = ("", "forward", "backward", "ends forward", "ends backward", "a step, per block", "a step")
    with warm_device(JIT_FUSED) as device:
        print("\n".join(["our modules", *columns([head, *table((*CASES, *COMPILED), device)], left=(0,))]))
    with warm_device(EXTENSION, JIT_FUSED) as device:
        rows = table((*CASES, *COMPILED, *ENGINE_ONLY), device)
        print("\n".join(["Transformer Engine", *columns([head, *rows], left=(0,))]))


if __name__ == "__main__":
    main()
