"""The emulated device itself: operators and collectives against the CPU's, in each order; faults that it must find."""

from pathlib import Path

import pytest

from tests.gpu_path.emulator import Emulation, Order, run
from tests.gpu_path.trainings import WarmDevice

CHECKS = Path(__file__).parent / "checks"


@pytest.mark.parametrize("order", ["eager", "late"])
def test_operators_compute_what_the_cpus_do(device: WarmDevice, order: Order) -> None:
    found = device.check("operators", emulation=Emulation(order=order))
    assert found.returncode == 0, found.stderr
    assert "computes nothing" not in found.stderr


@pytest.mark.parametrize("order", ["random", "late"])
def test_collectives_compute_what_nccl_says(device: WarmDevice, order: Order) -> None:
    found = device.check("collectives", emulation=Emulation(order=order), ranks=3)
    assert found.returncode == 0, found.stderr


def test_collectives_that_do_not_match_are_named(device: WarmDevice) -> None:
    found = device.check("mismatch", ranks=2)
    assert found.returncode != 0
    assert "NCCL mismatch" in found.stderr and "count 5" in found.stderr, found.stderr


def test_late_order_shows_a_missing_wait(device: WarmDevice) -> None:
    """And eager order hides it, which is why each training runs in both."""
    patient = {"EMULATED_CUDA_LULL_MS": "60000"}  # a busy machine takes seconds to import what a meta kernel needs
    late = device.check("order", emulation=Emulation(order="late", settings=patient))
    assert (late.returncode, late.stdout) == (0, "unwaited 1.0, waited 101.0\n"), late.stderr
    eager = device.check("order")
    assert (eager.returncode, eager.stdout) == (0, "unwaited 101.0, waited 101.0\n"), eager.stderr


@pytest.mark.parametrize("order", ["eager", "late"])
def test_graphs_compute_what_their_calls_do(device: WarmDevice, order: Order) -> None:
    """Of torch.cuda.graph: with random numbers, and on forked streams. A capture refuses what a card's refuses."""
    found = device.check("graphs", emulation=Emulation(order=order))
    assert found.returncode == 0, found.stderr
    capturing, pageable = "operation not permitted when stream is capturing", "Cannot copy between CPU and CUDA tensors"
    assert found.stdout.splitlines() == [
        capturing,
        f"{pageable} during CUDA graph capture",
        f"{pageable} during CUDA graph capture",
        capturing,
        capturing,
        "dependency created on uncaptured work in another stream",
        capturing,
    ]


def test_a_capture_finds_a_stream_that_is_not_joined(device: WarmDevice) -> None:
    found = device.check("graphs", "unjoined")
    assert found.returncode != 0 and "capturing stream has unjoined work" in found.stderr, found.stderr


@pytest.mark.parametrize("check", ["pinned", "reader"])
def test_the_hosts_memory_and_threads_leave_nothing_behind(device: WarmDevice, check: str) -> None:
    """A registration, an error that is read later, a context on another rank's device."""
    found = device.check(check)
    assert found.returncode == 0, found.stderr


def test_options_reach_nccl(device: WarmDevice) -> None:
    found = device.check("nccl_options", ranks=2)
    sharp = {"default_pg": "unset", "DATA_PARALLEL_GROUP_WITH_CP": "1"}
    assert (found.returncode, found.stdout) == (0, f"high priority: dp_cp tp_ep_pp\nSHARP: {sharp}\n"), found.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("order", ["eager", "late"])
def test_hybrid_model_computes_what_gpt_model_does(order: Order) -> None:
    """docs/architecture.md, "Why HybridModel": with Megatron's overlap of expert communication, too."""
    models = ["llama3_tiny", "mixtral_tiny", "deepseek_v3_tiny"]
    found = run([str(CHECKS / "trunk.py"), *models], Emulation(order=order, hooks=("tests.gpu_path.forkable",)))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("equal bit by bit") == 7, found.stdout


@pytest.mark.campaign
@pytest.mark.parametrize(
    "wait, ranks, right, without",
    [
        ("reader", 1, f"{list(range(16))}\n", f"{[12, 13, 14, 15] * 4}\n"),
        ("checkpoint", 1, f"{[7.0] * 4}\n", f"{[0.0] * 4}\n"),
        ("evaluation", 2, "[False, True]\n" * 2, "[False, False]\n"),
    ],
)
def test_a_wait_that_others_hide_in_a_training(wait: str, ranks: int, right: str, without: str) -> None:
    emulation = Emulation(order="late", settings={"EMULATED_CUDA_LULL_MS": "30000"})
    found = run([str(CHECKS / "hidden_waits.py"), wait], emulation, ranks=ranks)
    assert (found.returncode, found.stdout) == (0, right), found.stderr
    assert without in run([str(CHECKS / "hidden_waits.py"), wait, "mutant"], emulation, ranks=ranks).stdout
