"""Emulation against reality: the trainings that run on the emulated device (tests/gpu_path), with real kernels."""

import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.gpu import processes
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.layouts import shared_gpu
from tests.gpu.subjects.modules import FP32, beyond
from tests.gpu.trainings import Training, checkpoint_differences, loss_difference

BOUNDS = {"loss": 1e-4, "tensor": 1e-2}
"""Of losses, relative, and of weights and moments, relative to a tensor's largest element. Emulated: 1e-7 and 2e-5. A
card sums in another order, and AdamW's first steps take a gradient's sign for more than its size."""
BF16_BOUNDS = {"loss": 5e-3}
"""Emulated: 3e-4. Tensors follow the signs of gradients that 16 bits round."""
BF16 = ("--precision.dtype", "bf16")
CASES: tuple[tuple[Training, tuple[str, ...]], ...] = (
    (Training(), ()),
    (Training(shape="mixtral_tiny"), ()),
    (Training(shape="deepseek_v3_tiny"), ()),
    (Training(layout="dp2overlap"), ()),
    (Training(layout="tp2sp"), ()),
    (Training(layout="pp2vpp2"), ()),
    (Training(layout="cp2"), BF16),  # Transformer Engine's attention has no fp32 over context ranks
    (Training(layout="ep2", shape="mixtral_tiny"), ()),
)
"""And flags."""
CASE_S = 25.0
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def trainings(run: SubjectRun) -> None:
    """pretrain_gpt.py as a user starts it, four iterations and a checkpoint, against the same on one CPU rank."""
    with tempfile.TemporaryDirectory(prefix="triplane-trainings-", ignore_cleanup_errors=True) as folder:

        @cache
        def on_the_cpu(shape: str, flags: tuple[str, ...]) -> Path:
            run_dir = Path(folder, "-".join(["cpu", shape, *flags]))
            return train(run, Training(shape=shape), run_dir, ("--device", "cpu", *flags), NO_GPU)

        for case, flags in CASES:
            name = " ".join([case.shape, case.layout or "one rank", *flags[1:]])

            def one_case(case: Training = case, flags: tuple[str, ...] = flags, name: str = name) -> None:
                run_dir = Path(folder, name.replace(" ", "-"))
                train(run, case, run_dir, ("--device", "cuda", *flags), FP32)
                compare(run, name, run_dir, on_the_cpu(case.shape, flags), BF16_BOUNDS if flags else BOUNDS)

            run.part(name, one_case, least_s=CASE_S)
    if run.numbers:
        worst = max(row["loss"] for row in run.numbers.values())
        run.headline = f"{len(run.numbers)} of {len(CASES)} trainings compared: losses within {worst:.1e}"


def train(run: SubjectRun, training: Training, run_dir: Path, flags: tuple[str, ...], environ: dict[str, str]) -> Path:
    """The run's folder. Raises RuntimeError where it fails, UnrunError where its ranks have no place."""
    recipe = run_dir / "recipe.toml"
    world_size = training.write_recipe(recipe)
    places = shared_gpu(run.machine, world_size)
    if places is None:
        cards = f"{world_size} ranks and {len(run.machine.gpus)} GPU"
        raise UnrunError(f"{cards}: NCCL {run.machine.nccl_name} puts no two ranks on one (2.30 does)")
    command = [sys.executable, "pretrain_gpt.py", str(recipe), "--run_dir", str(run_dir), *flags]
    processes.run([*command, "--nproc", str(world_size)], environ | places, max(1.0, run.left_s))
    return run_dir


def compare(run: SubjectRun, name: str, run_dir: Path, reference: Path, bounds: dict[str, float]) -> None:
    """A line; a problem where they are too far apart, or have not the same tensors."""
    tensors = checkpoint_differences(run_dir, reference)
    worst = max(tensors, key=lambda one: one.relative or 0)
    row = {"loss": loss_difference(run_dir, reference), "tensor": worst.relative or 0.0}
    run.note(name, row | {"worst": worst.name})
    run.say(f"{name}: loss {row['loss']:.1e}, worst tensor {row['tensor']:.1e} ({worst.name})")
    run.problem(*beyond(row, bounds, name))
    run.problem(*(f"{name}: {one.name}: {one.outcome}" for one in tensors if one.outcome not in ("equal", "differs")))
