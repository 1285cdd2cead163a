"""What needs a GPU. Everything runs in processes of its own, so that pytest's never touches CUDA."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.launch import count_gpus
from tests.gpu import machine, processes, specs
from tests.gpu.sizes import SIZES
from tests.gpu.subject_run import SubjectRun
from tests.gpu.subjects import layouts, modules

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the CPU backend refuses to hide a usable GPU by itself


def here() -> SubjectRun:
    """A subject's run on this machine, without a limit."""
    return SubjectRun(machine=machine.look(), sizes=SIZES["card"])


def test_our_modules_compute_on_cuda_what_they_compute_on_the_cpu() -> None:
    (cpu,) = processes.ranks_of("portable", environ=NO_GPU, device="cpu")
    (cuda,) = processes.ranks_of("portable", environ=modules.FP32, device="cuda")
    found = specs.differences(cpu, cuda)
    assert found["logits"] < 1e-4, found
    assert found["gradient"] < 1e-3, found


@pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="transformer-engine is not installed")
def test_transformer_engine_agrees_with_our_modules() -> None:
    run = here()
    modules.specs(run)
    assert run.problems == []


@pytest.mark.parametrize("left", ["None", "100"])
def test_torchs_kernel_for_packed_documents_is_right(left: str) -> None:
    """Compared with attention in blocks, as a run that keeps documents apart does at its start; 64 and 128 wide."""
    look = "import torch; from models.layers.packed import HeadSizes, disproof; print([disproof(torch.device('cuda'), "
    look += f"dtype, HeadSizes(heads=8, groups=groups, width=width, value_width=width), {left}) "
    look += "for dtype in (torch.bfloat16, torch.float16) for groups in (2, 8) for width in (64, 128)])"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split("\n")[-2] == str([""] * 8)


def test_bf16_trains() -> None:
    (found,) = processes.ranks_of("losses", steps=10, dtype="bf16")
    assert all(map(math.isfinite, found["loss"] + found["grad_norm"]))
    assert found["loss"][-1] < found["loss"][0] - 0.3


def test_training_on_cuda_follows_training_on_the_cpu() -> None:
    (cpu,) = processes.ranks_of("losses", environ=NO_GPU, steps=4, dtype="fp32", device="cpu")
    (cuda,) = processes.ranks_of("losses", environ=modules.FP32, steps=4, dtype="fp32")
    assert cuda["loss"] == pytest.approx(cpu["loss"], rel=1e-4)
    assert cuda["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=1e-3)


@pytest.mark.skipif(count_gpus(os.environ) < 2, reason="needs 2 GPUs")
def test_two_ranks_over_nccl_train_as_one() -> None:
    run = here()
    layouts.try_layouts(layouts.Attempt(ranks=2, shared=False), run)
    assert run.problems == []
