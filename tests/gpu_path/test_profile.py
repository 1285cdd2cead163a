"""What profiling asks of the device: within a measured step no more than any step does, behind it a stated number."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from program.untrusted import read_json
from tests.gpu_path.emulator import Emulation
from tests.gpu_path.test_step import GOLDEN, record
from tests.gpu_path.trainings import Training, TrainingError, WarmDevice
from training.profile.files import TraceSummary

BEHIND_A_STEP = """\
0 LAUNCHES
{stream} STREAM_WAITS
0 DEVICE_WAITS
1 EVENT_WAITS
{stream} COPIES_TO_HOST
1 COPIES_TO_DEVICE
{waits}all_gather default_pg of 2: {bytes} bytes of Double, training/profile/timeline.py:_gathered
"""
"""The wait for the step's end, and one all-gather; on rank 0, the wait for its numbers: four of each rank, and five for
each of its spans."""


TIMELINE = ("--profile.timeline_interval", "3")


def without_callers(text: str) -> str:
    """A record of a step; within a measured one, every collective is called by the wrapper around it."""
    return re.sub(r"( bytes of \w+), .*", r"\1", text)


def test_a_measured_step(device: WarmDevice, tmp_path: Path) -> None:
    """Eight microbatches on two stages."""
    folder = tmp_path / "timeline"
    folder.mkdir()
    hook, where = "tests.gpu_path.timeline_record", {"EMULATED_CUDA_TIMELINE": str(folder)}
    found = record(device, tmp_path, "pp2", "debug", hook, more=where, flags=TIMELINE, iterations=6)
    found, times = re.subn(r"iteration 4 allocates: \((\d+), \d+\) before, \(\1, \d+\) after\n", "", found)
    assert times == 2  # each rank takes a block of pinned memory for its numbers
    assert without_callers(found) == without_callers((GOLDEN / "pp2_debug.txt").read_text())
    numbers = f"{8 * (4 + 5 * (2 * 8 + 2)) * 2:,}"
    first = BEHIND_A_STEP.format(stream=1, waits="1 waits: training/profile/timeline.py:after_step\n", bytes=numbers)
    assert (folder / "timeline-0.txt").read_text() == first
    assert (folder / "timeline-1.txt").read_text() == BEHIND_A_STEP.format(stream=0, waits="", bytes=numbers)
    lines = [json.loads(line) for line in (tmp_path / "profile/timeline.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [3, 6]
    for line in lines:
        first_stage, last_stage = (
            {(kind, microbatch): (begin, end) for kind, microbatch, _, begin, end in one["spans"]}
            for one in line["ranks"]
        )
        assert len(first_stage) == len(last_stage) == 2 * 8 + 2
        for microbatch in range(8):
            assert first_stage["forward", microbatch][0] < last_stage["forward", microbatch][1]
            assert last_stage["backward", microbatch][0] < first_stage["backward", microbatch][1]
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["pipeline_bubble"] < 1 for line in logged if line["iteration"] in (3, 6))


@pytest.mark.campaign
def test_a_trace_for_nsys(device: WarmDevice, tmp_path: Path) -> None:
    """Rank 0's second iteration lies between the profiler calls, with ranges that end where they began."""
    profile = ["--profile.enable_profiling", "True", "--profile.step_start", "1", "--profile.step_end", "2"]
    flags = [*profile, "--profile.use_pytorch_profiler", "False", "--profile.nvtx_ranges", "True"]
    flags += ["--profile.record_memory_history", "True", "--train.train_iters", "2", "--train.global_batch_size", "4"]
    emulation = Emulation(hooks=("tests.gpu_path.nvtx_record",), settings={"EMULATED_CUDA_NVTX": str(tmp_path)})
    device.train(Training(layout="pp2"), tmp_path, emulation, flags)
    calls = (tmp_path / "nvtx-0.txt").read_text().splitlines()
    assert calls[0] == "start" and calls[-1] == "stop" and calls.count("start") == calls.count("stop") == 1
    assert calls[1] == "push iteration 2" and calls[-2] == "pop"
    pushed = [call.removeprefix("push ") for call in calls if call.startswith("push ")]
    assert len(pushed) == calls.count("pop")
    assert [pushed.count(name) for name in ("forward_backward", "reduce", "measure", "update")] == [1] * 4
    assert pushed.count("forward-compute") == pushed.count("backward-compute") == 4
    assert pushed.count("layer 1") == 4 and "layer 5" not in pushed  # the second stage's
    assert {"message send", "message recv", "collective all_gather"} <= set(pushed)
    assert not (tmp_path / "nvtx-1.txt").exists()
    snapshots = list((tmp_path / "profile").rglob("*"))
    assert [path.name for path in snapshots if path.is_file()] == ["rank_00000_memory.pickle"]


@pytest.mark.campaign
def test_a_trace_by_torch_of_a_gpu_without_cupti(device: WarmDevice, tmp_path: Path) -> None:
    """As here: the trace has what the host did, and no kernels."""
    profile = ["--profile.enable_profiling", "True", "--profile.step_start", "1", "--profile.step_end", "2"]
    device.train(Training(layout="dp2overlap"), tmp_path, Emulation(order="late"), profile)
    read: TraceSummary = read_json(tmp_path / "profile/iter_0000002/summary.json", TraceSummary)
    [summary] = read.ranks
    assert (
        summary.device == "cuda"
        and not summary.kernels
        and {row.name for row in summary.phases} >= {"forward_backward", "update"}
    )


HISTORY = ("--profile.record_memory_history", "True")


def recorded(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    """Allocations and frees, the newest one last."""
    path = run_dir / f"profile/out_of_memory/rank_{rank:05d}_memory.pickle"
    [trace] = [trace for trace in pickle.loads(path.read_bytes())["device_traces"] if trace]
    return trace


def test_where_memory_runs_out_every_allocation_is_kept(device: WarmDevice, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as failed:
        device.train(Training(), tmp_path, Emulation(memory_mib=4), HISTORY)
    assert re.search(r"Every allocation of rank 0 is in .*/rank_00000_memory.pickle", str(failed.value))
    trace = recorded(tmp_path, 0)
    assert trace[-1]["action"] == "oom"
    assert any("training/" in frame["filename"] for entry in trace for frame in entry.get("frames", ()))


def test_a_failure_that_a_run_survives_is_kept_too(device: WarmDevice, tmp_path: Path) -> None:
    emulation = Emulation(hooks=("tests.gpu_path.faults",), settings={"EMULATED_CUDA_FAULT": "MemoryRunsOut"})
    device.train(Training(layout="dp2overlap"), tmp_path, emulation, HISTORY)
    assert (trace := recorded(tmp_path, 1))[-1]["action"] == "oom" and trace[-1]["size"] == 1 << 40
    assert len(list((tmp_path / "profile").rglob("*.pickle"))) == 1
