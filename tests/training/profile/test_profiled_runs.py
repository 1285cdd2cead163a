"""Runs on four ranks with traces and timelines, which overlap: what they leave; training is as without them."""

import contextlib
import gzip
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import ProcessGroup, Work

from data.prepared import Prepared
from parallel.ddp import unwrap
from parallel.layout import Layout
from program.untrusted import parse_json, read_json
from runs import configuration, losses, train
from tests.training.health.injected import Rank, inject
from training import step
from training.config.small_sections import ProfileConfig, profile_problems
from training.profile import timeline
from training.profile.files import TraceSummary
from training.profile.ranges import layers_of
from training.profile.spans import StepSpan, Timeline
from training.progress import Progress

BATCH = ("--train.global_batch_size", "4")
TP2PP2 = ("--parallel.tensor_model_parallel_size", "2", "--parallel.pipeline_model_parallel_size", "2")
SIX = ("--train.train_iters", "6", *BATCH)
TRACES = (
    *("--profile.enable_profiling", "True", "--profile.step_start", "1", "--profile.step_end", "3"),
    *("--profile.profile_freq", "4", "--profile.ranks", "0", "3"),
)
TIMELINES = ("--profile.timeline_interval", "3")
MICROBATCHES = 2


@dataclass(frozen=True)
class Run:
    """What one left."""

    folder: Path
    metrics: Sequence[Mapping[str, Any]]
    printed: str

    def summary(self, iteration: int) -> TraceSummary:
        path = self.folder / f"profile/iter_{iteration:07d}/summary.json"
        found: TraceSummary = read_json(path, TraceSummary)
        return found

    def timelines(self) -> list[Timeline]:
        lines = (self.folder / "profile/timeline.jsonl").read_bytes().splitlines()
        return [parse_json(line, Timeline) for line in lines]


class Watching(Rank):
    """In each iteration, compares what stands in place of functions with what should, after timelines have begun."""

    def before_step(self, progress: Progress) -> None:
        super().before_step(progress)
        found = {
            "phases": "ranged" in step.measure.__qualname__,
            "passes": self.chunks[0].config.timers is not None,
            "layers": any(layer._forward_hooks for layer in layers_of(unwrap(self.chunks[0]))),
            "collectives": hasattr(vars(ProcessGroup)["allreduce"], "__code__"),
            "waits": hasattr(vars(Work)["wait"], "__code__"),
        }
        expected = self.iteration in (3, 6)
        wrong = [name for name, there in found.items() if there != expected]
        assert not wrong, (self.iteration, wrong)


@contextlib.contextmanager
def console_in(path: Path) -> Iterator[None]:
    """What is printed within goes into a file, that of forked ranks too."""
    saved, file = os.dup(1), os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(file)


@pytest.fixture(scope="module")
def profiled(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("profiled")
    config = configuration(folder / "run", *SIX, *TP2PP2, *TRACES, *TIMELINES)
    with pytest.MonkeyPatch.context() as patched, console_in(folder / "console"):
        inject(patched, Watching)
        metrics = train(prepared, config, 4)
    return Run(folder / "run", metrics, (folder / "console").read_text())


@pytest.mark.campaign
def test_training_is_as_without(profiled: Run, prepared: Prepared, tmp_path: Path) -> None:
    plain = train(prepared, configuration(tmp_path / "plain", *SIX, *TP2PP2, "--train.exit_interval", "4"), 4)
    assert losses(profiled.metrics)[:4] == losses(plain)
    assert not (tmp_path / "plain/profile").exists()


@pytest.mark.campaign
def test_traces_of_the_ranks_and_iterations_that_were_asked_for(profiled: Run) -> None:
    """The second one, of iterations 6 and 7, ends with the run."""
    found = sorted(str(path.relative_to(profiled.folder / "profile")) for path in profiled.folder.rglob("*.json.gz"))
    assert found == [f"iter_000000{end}/rank_0000{rank}.json.gz" for end in (3, 6) for rank in (0, 3)]
    for iterations, path in (((2, 3), found[1]), ((6,), found[2])):
        events = json.loads(gzip.decompress((profiled.folder / "profile" / path).read_bytes()))["traceEvents"]
        notes = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        each = len(iterations)
        assert sorted(name for name in notes if name.startswith("iteration")) == [f"iteration {n}" for n in iterations]
        assert [notes.count(phase) for phase in ("forward_backward", "reduce", "measure", "update")] == [each] * 4
        passes = [notes.count(kind) for kind in ("forward-compute", "backward-compute")]
        assert passes == [each * MICROBATCHES] * 2
        for kind in ("send", "recv"):
            assert notes.count(f"message {kind}") == notes.count(f"wait for {kind}") == each * MICROBATCHES
        assert notes.count("collective all_reduce") == notes.count("wait for all_reduce") > 0
        layers = {name for name in notes if name.startswith("layer ")}
        assert layers == {f"layer {number}" for number in (range(5, 9) if "00003" in path else range(1, 5))}


def test_a_summary_of_a_real_trace(profiled: Run) -> None:
    for iterations, end in (((2, 3), 3), ((6, 6), 6)):
        summary = profiled.summary(end)
        assert [one.rank for one in summary.ranks] == [0, 3]
        for one in summary.ranks:
            assert (one.device, (one.first_iteration, one.last_iteration)) == ("cpu", iterations)
            parts = (one.compute_s, one.exposed_communication_s, one.exposed_messages_s, one.idle_s)
            assert min(parts) > 0 and sum(parts) == pytest.approx(one.window_s, abs=1e-5)
            assert one.exposed_communication_s <= one.communication_s
            calls = {row.name: row.calls for row in one.communication}
            count = iterations[1] - iterations[0] + 1
            assert calls["send"] == calls["recv"] == count * MICROBATCHES
            assert calls["all_reduce"] > count * MICROBATCHES * 4  # of TP, two a block and pass
            assert {"aten::mm", "aten::mul"} <= {row.name for row in one.kernels}
            assert "measure" in {row.where for row in one.host_waits}
            assert {row.name: row.calls for row in one.phases}["update"] == count
            assert (profiled.folder / f"profile/iter_{end:07d}" / one.trace).exists()


def test_the_console_says_where_traces_lie(profiled: Run) -> None:
    for end in (3, 6):
        assert profiled.printed.count(f"profile: traced into {profiled.folder}/profile/iter_000000{end}; training") == 1


def test_a_timeline_has_every_pass_of_every_rank(profiled: Run) -> None:
    timelines = profiled.timelines()
    assert [one.iteration for one in timelines] == [3, 6]
    layout = Layout(tp=2, pp=2)
    for found in timelines:
        assert [(one.rank, one.pp) for one in found.ranks] == [(n, layout.coordinates(n).pp) for n in range(4)]
        assert min(span.begin_s for one in found.ranks for span in one.spans) == 0
        for one in found.ranks:
            ends = check_one_rank(one.spans, MICROBATCHES, 1)
            assert [span.kind for span in one.spans[-2:]] == ["reduce", "update"]
            assert ends <= one.spans[-2].begin_s
        for first, last in ((0, 2), (1, 3)):  # with the same place in TP
            check_two_stages(found.ranks[first].spans, found.ranks[last].spans)


def test_logged_once_for_each_timeline(profiled: Run) -> None:
    for line in profiled.metrics:
        assert ("pipeline_bubble" in line) == ("exposed_communication" in line) == (line["iteration"] in (3, 6))
        if line["iteration"] in (3, 6):
            assert 0 < line["pipeline_bubble"] < 1 and 0 < line["exposed_communication"] < 1


def check_one_rank(spans: Sequence[StepSpan], microbatches: int, chunks: int) -> float:
    """Each pass once, none within another, a backward pass behind its forward pass: when the last one ends."""
    passes = [span for span in spans if span.microbatch is not None]
    expected = {
        (kind, microbatch, chunk)
        for kind in ("forward", "backward")
        for microbatch in range(microbatches)
        for chunk in range(chunks)
    }
    found = {(span.kind, span.microbatch, span.chunk): span for span in passes}
    assert found.keys() == expected and len(passes) == len(expected)
    assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(passes))
    assert all(span.begin_s < span.end_s for span in spans)
    for (kind, microbatch, chunk), span in found.items():
        assert kind == "forward" or found["forward", microbatch, chunk].end_s <= span.begin_s
    return passes[-1].end_s


def check_two_stages(
    first: Sequence[StepSpan], second: Sequence[StepSpan], chunk: int = 0, next_chunk: int = 0
) -> None:
    """A stage's forward pass of a microbatch follows the former stage's; backward the other way round."""
    ends = {(span.kind, span.microbatch, span.chunk): span for span in first}
    others = {(span.kind, span.microbatch, span.chunk): span for span in second}
    for microbatch in range(MICROBATCHES):
        forward, backward = (
            (ends[kind, microbatch, chunk], others[kind, microbatch, next_chunk]) for kind in ("forward", "backward")
        )
        assert forward[0].end_s <= forward[1].begin_s
        assert backward[1].end_s <= backward[0].begin_s


def test_virtual_stages(prepared: Prepared, tmp_path: Path) -> None:
    """Two ranks, of which each has two chunks: layers go through rank 0, 1, 0, 1."""
    vpp = ("--parallel.pipeline_model_parallel_size", "2", "--parallel.virtual_pipeline_model_parallel_size", "2")
    folder = tmp_path / "run"
    flags = (*BATCH, "--train.train_iters", "2", "--profile.timeline_interval", "2")
    metrics = train(prepared, configuration(folder, *flags, *vpp), 2)
    [found] = Run(folder, metrics, "").timelines()
    for one in found.ranks:
        check_one_rank(one.spans, MICROBATCHES, 2)
    first, second = (one.spans for one in found.ranks)
    check_two_stages(first, second, 0, 0)
    check_two_stages(second, first, 0, 1)
    check_two_stages(first, second, 1, 1)


def test_of_many_ranks_one_pipeline_is_measured(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of more than 16 ranks: one rank a stage, of four."""
    monkeypatch.setattr(timeline, "MOST_RANKS", 3)
    flags = (*BATCH, "--train.train_iters", "3", "--profile.timeline_interval", "3")  # the first two are not logged
    pp2 = ("--parallel.pipeline_model_parallel_size", "2")
    metrics = train(prepared, configuration(tmp_path, *flags, *pp2), 4)
    [found] = Run(tmp_path, metrics, "").timelines()
    assert [(one.rank, one.pp) for one in found.ranks] == [(0, 0), (2, 1)]
    for one in found.ranks:
        check_one_rank(one.spans, MICROBATCHES // 2, 1)
    assert 0 < metrics[-1]["pipeline_bubble"] < 1


@pytest.mark.parametrize(
    "profile, words",
    [
        ({"step_start": 5, "step_end": 5}, "0 <= step_start < step_end, found step_start 5, step_end 5"),
        ({"step_start": 5, "step_end": 500}, "at most 100 iterations"),
        ({"profile_freq": 1}, "profile.profile_freq must be at least step_end - step_start = 2"),
        ({"timeline_interval": 0}, "profile.timeline_interval must be 1 or more, found 0"),
        ({"ranks": (1, 1)}, "profile.ranks must be different ranks, 0 or more, found [1, 1]"),
    ],
)
def test_a_section_that_cannot_be(profile: dict[str, Any], words: str) -> None:
    [problem] = ProfileConfig(**profile).problems()
    assert words in problem


def test_ranks_and_devices_that_are_not_there() -> None:
    profile = ProfileConfig(enable_profiling=True, ranks=(0, 4), use_pytorch_profiler=False)
    no_rank, no_gpu = profile_problems(profile, Layout(dp=4), "cpu", elastic=False)
    assert no_rank == "profile.ranks: there is no rank 4; the run has 4, counted from 0."
    assert "needs GPUs" in no_gpu
    assert profile_problems(profile, Layout(dp=4), "cuda", elastic=True) == []
    assert profile_problems(ProfileConfig(ranks=(9,)), Layout(), "cpu", elastic=False) == []


def test_a_run_that_cannot_be_traced_does_not_begin(tmp_path: Path) -> None:
    config = configuration(tmp_path, "--profile.enable_profiling", "True", "--profile.ranks", "1")
    assert config.problems(2) == []
    assert config.problems(1) == ["profile.ranks: there is no rank 1; the run has 1, counted from 0."]


def test_iterations_that_belong_to_a_trace() -> None:
    once = ProfileConfig(enable_profiling=True, step_start=2, step_end=4)
    assert [once.trace_number(done) for done in range(6)] == [None, None, 0, 0, None, None]
    again = ProfileConfig(enable_profiling=True, step_start=1, step_end=3, profile_freq=2)
    assert [again.trace_number(done) for done in range(6)] == [None, 0, 0, 1, 1, 2]
    assert ProfileConfig(step_start=0).trace_number(0) is None
