"""What a summary says of traces made by hand, whose answers are known."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from program.untrusted import InputError, read_json
from training.profile.chrome_trace import read_trace
from training.profile.files import TraceSummary, drop_old_traces, trace_folder, trace_name
from training.profile.intervals import length, union, within, without
from training.profile.summarize import main
from training.profile.summary import RankSummary, Row, summarize

MAIN, GLOO, LOADER = (1, 1), (1, 2), (1, 3)
COMPUTE_STREAM, NCCL_STREAM = (0, 7), (0, 20)


def span(thread: tuple[int, int], category: str, name: str, begin: float, end: float, **args: str) -> dict[str, Any]:
    """As Kineto writes it, times in microseconds."""
    pid, tid = thread
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin,
            "args": args}  # fmt: skip


def cpu_events() -> list[dict[str, Any]]:
    def note(name: str, begin: float, end: float, thread: tuple[int, int] = MAIN) -> dict[str, Any]:
        return span(thread, "user_annotation", name, begin, end)

    def operator(name: str, begin: float, end: float, thread: tuple[int, int] = MAIN) -> dict[str, Any]:
        return span(thread, "cpu_op", name, begin, end)

    return [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        note("iteration 5", 0, 1000),
        note("forward_backward", 0, 600),
        operator("aten::mm", 0, 300),
        operator("_Reduce", 300, 500),
        operator("aten::add", 310, 360),
        operator("c10d::allreduce_", 395, 399),
        note("gloo:all_reduce", 390, 485, GLOO),
        note("collective all_reduce", 392, 400),
        note("wait for all_reduce", 400, 490),
        note("gloo:recv", 505, 580),
        note("wait for recv", 520, 590),
        note("reduce", 600, 800),
        note("gloo:all_reduce", 600, 690, GLOO),
        note("wait for all_reduce", 620, 700),
        note("update", 800, 1000),
        note("gloo:all_gather", 850, 950, GLOO),
        operator("aten::mul", 860, 900),
        operator("aten::stack", 0, 1000, LOADER),
    ]


def gpu_events() -> list[dict[str, Any]]:
    def kernel(stream: tuple[int, int], name: str, begin: float, end: float, **args: str) -> dict[str, Any]:
        return span(stream, "kernel", name, begin, end, **args)

    def nccl(name: str, begin: float, end: float, collective: str, group: str) -> dict[str, Any]:
        args = {"Collective name": collective, "Process Group Description": group}
        return kernel(NCCL_STREAM, f"ncclDevKernel_{name}", begin, end, **args)

    return [
        span(MAIN, "user_annotation", "iteration 7", 50, 450),
        span(MAIN, "user_annotation", "iteration 8", 450, 850),
        span(COMPUTE_STREAM, "gpu_user_annotation", "iteration 7", 100, 2000),
        kernel(COMPUTE_STREAM, "gemm", 100, 300),
        kernel(COMPUTE_STREAM, "gemm", 400, 500),
        span(COMPUTE_STREAM, "gpu_memcpy", "Memcpy DtoH", 500, 520),
        nccl("AllReduce_Sum_bf16", 250, 450, "allreduce", "TENSOR_MODEL_PARALLEL_GROUP"),
        nccl("SendRecv", 600, 700, "coalesced", "PIPELINE_MODEL_PARALLEL_GROUP"),
        nccl("SendRecv", 750, 800, "all_to_allv", "EXPERT_MODEL_PARALLEL_GROUP"),
        span(MAIN, "user_annotation", "measure", 505, 570),
        span(MAIN, "cuda_runtime", "cudaLaunchKernel", 506, 509),
        span(MAIN, "cuda_runtime", "cudaStreamSynchronize", 510, 560),
    ]


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_intervals() -> None:
    spans = union([(5, 7), (1, 3), (2, 4), (7, 8), (9, 9)])
    assert spans == [(1, 4), (5, 8)] and length(spans) == 6
    assert without(spans, [(0, 2), (3, 6), (7, 7.5)]) == [(2, 3), (6, 7), (7.5, 8)]
    assert without(spans, []) == spans and without([], spans) == []
    assert without([(0, 10), (11, 12)], [(2, 3), (4, 11.5)]) == [(0, 2), (3, 4), (11.5, 12)]
    assert within(spans, (2, 6)) == [(2, 4), (5, 6)]


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def rows(found: tuple[Row, ...]) -> dict[tuple[str, str], tuple[int, float]]:
    return {(row.name, row.where): (row.calls, micro(row.total_s)) for row in found}


def parts(one: RankSummary) -> list[float]:
    """Compute, exposed communication, exposed messages, idle."""
    return [micro(each) for each in (one.compute_s, one.exposed_communication_s, one.exposed_messages_s, one.idle_s)]


def test_a_trace_of_a_cpu(tmp_path: Path) -> None:
    found = summarize(read_trace(written(tmp_path / "rank_00003.json", cpu_events())), 3, "cpu")
    assert (found.device, found.rank, found.first_iteration, found.last_iteration) == ("cpu", 3, 5, 5)
    assert micro(found.window_s) == 1000
    assert parts(found) == [300 + 110 + 40, 90 + 100 + 60, 85, 215]
    assert (micro(found.communication_s), micro(found.messages_s), micro(found.host_wait_s)) == (300, 85, 240)
    assert rows(found.kernels) == {
        ("aten::mm", ""): (1, 300), ("_Reduce", ""): (1, 60), ("aten::add", ""): (1, 50), ("aten::mul", ""): (1, 40)
    }  # fmt: skip
    assert rows(found.host_waits) == {
        ("wait for all_reduce", "forward_backward"): (1, 90),
        ("wait for all_reduce", "reduce"): (1, 80),
        ("wait for recv", "forward_backward"): (1, 70),
    }
    assert rows(found.communication) == {
        ("all_reduce", ""): (2, 185), ("recv", ""): (1, 75), ("all_gather", ""): (1, 100)
    }  # fmt: skip
    assert rows(found.phases) == {
        ("forward_backward", ""): (1, 600), ("reduce", ""): (1, 200), ("update", ""): (1, 200)
    }  # fmt: skip


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    found = summarize(read_trace(written(tmp_path / "rank_00000.json", gpu_events())), 0, "cuda")
    assert (found.device, found.first_iteration, found.last_iteration) == ("cuda", 7, 8)
    assert micro(found.window_s) == 800
    assert parts(found) == [320, 100 + 50, 100, 230]
    assert (micro(found.communication_s), micro(found.messages_s), micro(found.host_wait_s)) == (250, 100, 50)
    assert rows(found.kernels) == {("gemm", ""): (2, 300), ("Memcpy DtoH", ""): (1, 20)}
    assert rows(found.host_waits) == {("cudaStreamSynchronize", "measure"): (1, 50)}
    exposed = {(row.name, row.where): micro(row.exposed_s or 0) for row in found.communication}
    assert exposed == {
        ("allreduce", "TENSOR_MODEL_PARALLEL_GROUP"): 100,
        ("coalesced", "PIPELINE_MODEL_PARALLEL_GROUP"): 100,
        ("all_to_allv", "EXPERT_MODEL_PARALLEL_GROUP"): 50,
    }


def test_a_trace_of_another_program_is_one_window(tmp_path: Path) -> None:
    """Megatron-LM's, without our ranges."""
    others = [event for event in gpu_events() if event["cat"] != "user_annotation"]
    found = summarize(read_trace(written(tmp_path / "rank_00000.json", others)), 0, "cuda")
    assert (found.first_iteration, micro(found.window_s), parts(found)[0]) == (0, 1900, 320)


def test_the_process_leaves_summaries_and_compressed_traces(tmp_path: Path) -> None:
    """Two ranks: the second one's process finds the first one's part."""
    folder = trace_folder(tmp_path, 5)
    for rank in (3, 0):
        assert main([str(written(folder / trace_name(rank), cpu_events())), "cpu", "1"]) == 0
    found: TraceSummary = read_json(folder / "summary.json", TraceSummary)
    assert found.version == 1
    assert [(one.rank, one.trace) for one in found.ranks] == [(0, "rank_00000.json.gz"), (3, "rank_00003.json.gz")]
    assert len(read_trace(folder / "rank_00003.json.gz")) == len(cpu_events()) - 1
    assert not (folder / trace_name(0)).exists()


def test_a_trace_of_a_gpu_without_kernels_has_no_compute(tmp_path: Path) -> None:
    found = summarize(read_trace(written(tmp_path / "rank_00000.json", cpu_events())), 0, "cuda")
    assert found.compute_s == 0 and found.kernels == ()


def test_old_traces_go_first(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        folder = trace_folder(tmp_path, iteration)
        folder.mkdir(parents=True)
        for rank in (0, 1):
            (folder / f"{trace_name(rank)}.gz").write_bytes(bytes(400))
    assert drop_old_traces(tmp_path, 1, 1000) == [trace_folder(tmp_path, 10) / "rank_00001.json.gz"]
    assert len(list(tmp_path.rglob("rank_00001*"))) == 2 and len(list(tmp_path.rglob("rank_00000*"))) == 3
    assert len(drop_old_traces(tmp_path, 1, 100)) == 2


@pytest.mark.parametrize(
    "content, words",
    [
        (b"[1]", 'a list "traceEvents"'),
        (b'{"traceEvents": [{"ph": "X", "name": 1}]}', "event 0: expected a name"),
        (b'{"traceEvents": [', "not JSON"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "rank_00000.json", tmp_path / "rank_00000.json.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    for path in (plain, packed):
        with pytest.raises(InputError, match=words):
            read_trace(path)
    packed.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(InputError, match="gzip"):
        read_trace(packed)
