"""What one step asks of the device, by layout, against golden/: kernels, copies, host waits, collectives in order.

And what a run leaves behind: no allocation after the third step, no registration, no context on another rank's device.
A change on purpose: ``REWRITE_GOLDEN=1 pytest --campaign tests/gpu_path/test_step.py`` writes the files, for review.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.gpu_path import flight
from tests.gpu_path.emulator import Emulation
from tests.gpu_path.launches import FP8
from tests.gpu_path.trainings import Training, WarmDevice

GOLDEN = Path(__file__).parent / "golden"
RECORD = "tests.gpu_path.step_record"
WEIGHTS_IN_FP8 = "te_fp8_param_gather_dp2overlap_debug"
MORE_LAUNCHES = 389
"""Of a rank of debug: norms of weight and gradient, zeros, and their sums; of each output, norm and maximum."""
BEHIND = ["0 ranges of host memory are still registered", "devices of other ranks in use: none"]


def record(
    device: WarmDevice,
    run_dir: Path,
    layout: str,
    shape: str,
    *more_hooks: str,
    more: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    iterations: int = 4,
) -> str:
    """What step_record writes, rank by rank; ranks that write the same once."""
    folder = run_dir / "record"
    folder.mkdir()
    settings = {"EMULATED_CUDA_RECORD": str(folder), **flight.ROOM, **(more or {})}
    emulation = Emulation(hooks=(*more_hooks, RECORD), settings=settings)
    length = ["--train.train_iters", "6", "--train.exit_interval", str(iterations), "--train.global_batch_size", "8"]
    device.train(Training(layout=layout, shape=shape), run_dir, emulation, [*length, *flags])
    ranks: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        ranks.setdefault(path.read_text(), []).append(path.stem.removeprefix("rank-"))
    return "\n".join(f"rank {', '.join(numbers)}\n{text}" for text, numbers in ranks.items())


def compare(found: str, name: str) -> None:
    """With the golden file, or write it where that was asked for."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(found)
        pytest.skip(f"{path} is written")
    expected = path.read_text()
    diff = difflib.unified_diff(expected.splitlines(), found.splitlines(), str(path), "this run", lineterm="")
    assert found == expected, "\n" + "\n".join(diff)


def campaign(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    "layout, shape",
    [
        ("tp2sp", "debug"),
        campaign("ep2", "mixtral_tiny"),
        campaign("dp2overlap", "debug"),  # the next test has it in the suite
        campaign("pp2", "debug"),  # test_profile.py has it in the suite
        campaign("pp2vpp2", "debug"),
        campaign("cp2", "debug"),
        campaign("tp2sppp2", "debug"),
    ],
)
def test_a_step_asks_for_what_is_written(device: WarmDevice, tmp_path: Path, layout: str, shape: str) -> None:
    compare(record(device, tmp_path, layout, shape), f"{layout}_{shape}")


def test_norms_and_block_outputs_launch_kernels_and_wait_for_nothing(device: WarmDevice, tmp_path: Path) -> None:
    """In a step whose line has all of them: the same copies, waits and collectives; those of the line come after it."""
    flags = ["--log.log_params_norm", "True", "--log.log_num_zeros_in_grad", "True", "--log.layer_stats_interval", "1"]
    found = record(device, tmp_path, "dp2overlap", "debug", flags=["--log.log_interval", "1", *flags])
    assert without_launches(found) == without_launches((GOLDEN / "dp2overlap_debug.txt").read_text())
    more = launches(found) - launches((GOLDEN / "dp2overlap_debug.txt").read_text())
    assert more == MORE_LAUNCHES


def launches(text: str) -> int:
    """Of the first rank."""
    found = re.search(r"(\d+) LAUNCHES", text)
    assert found
    return int(found[1])


def without_launches(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.endswith(" LAUNCHES")]


@pytest.mark.campaign
@pytest.mark.parametrize("layout, shape", [("dp2overlap", "debug"), ("tp2sp", "debug"), ("ep2", "mixtral_tiny")])
def test_a_step_with_transformer_engine_asks_for_what_is_written(
    te_device: WarmDevice, tmp_path: Path, layout: str, shape: str
) -> None:
    compare(record(te_device, tmp_path, layout, shape), f"te_{layout}_{shape}")


@pytest.mark.campaign
def test_weights_in_fp8_are_gathered_as_is_written(te_device: WarmDevice, tmp_path: Path) -> None:
    """Cross entropy unfused: Triton's interpreter would wait for the device."""
    flags = [*FP8, "--precision.dtype", "bf16", "--precision.fp8_param_gather", "True"]
    flags += ["--kernels.off", "cross_entropy_loss_fusion"]
    compare(record(te_device, tmp_path, "dp2overlap", "debug", flags=flags), WEIGHTS_IN_FP8)


def test_weights_in_fp8_are_gathered_in_half_the_bytes() -> None:
    """Of the blocks' matrices: 1 byte each; embeddings, output layer and norms, in the same call, have 16 bits."""
    blocks = 4 * (64 * 128 + 64 * 64 + 2 * 192 * 64 + 192 * 64)
    rest = 2 * 384 * 64 + (2 * 4 + 1) * 64
    text = (GOLDEN / f"{WEIGHTS_IN_FP8}.txt").read_text()
    ((found, dtype),) = set(re.findall(r"all_gather .*: ([\d,]+) bytes of (\w+)", text))
    assert dtype == "Byte"
    padding = 1024
    assert 0 <= int(found.replace(",", "")) - (blocks + 2 * rest) < padding


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_what_is_written_is_what_is_wanted(path: Path) -> None:
    """The host waits once, for loss, norm and requests together; a rank has at most four small all-reduces; nothing is
    left behind."""
    for rank in path.read_text().split("\n\n"):
        lines = rank.splitlines()
        waits = [line for line in lines if " waits: " in line]
        assert waits == ["1 waits: training/step.py:measure"], path
        assert "1 STREAM_WAITS" in lines and "0 DEVICE_WAITS" in lines, path
        (small,) = [line for line in lines if line.endswith(" all-reduces of at most 4,096 bytes")]
        assert int(small.split(" ")[0]) <= 4, path
        assert lines[-2:] == BEHIND and not any("allocates" in line for line in lines), path


@pytest.mark.campaign
def test_waste_is_found(device: WarmDevice, tmp_path: Path) -> None:
    """One more all-reduce, a number read on the host, memory taken in each step, a registration that is not given
    back, and a thread that uses the device without choosing one."""
    waste = {"EMULATED_CUDA_MUTANT": "waste"}
    found = record(device, tmp_path, "dp2overlap", "debug", "tests.gpu_path.mutants", more=waste)
    expected = (GOLDEN / "dp2overlap_debug.txt").read_text()
    changes = difflib.unified_diff(expected.splitlines(), found.splitlines(), lineterm="", n=0)
    more = "\n".join(line for line in changes if line.startswith("+"))
    for fault in (
        "all_reduce default_pg of 2: 4 bytes of Float, tests/gpu_path/mutants.py:wasteful",
        "1 waits: tests/gpu_path/mutants.py:wasteful",
        "2 STREAM_WAITS",
        "iteration 4 allocates",
        "1 ranges of host memory are still registered",
        "devices of other ranks in use: [0]",
    ):
        assert fault in more, (fault, more)
