"""What make prove-gpu does, as far as a CPU can tell: its measurements run there, and its verdicts are right."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from campaign import some
from parallel.config import PrecisionConfig
from parallel.launch import Identity
from ranks import run_ranks
from tests.gpu import __main__ as prove_gpu
from tests.gpu import losses, measured_models, observe, processes, specs, stall, steps
from tests.gpu.machine import GpuMachine
from tests.gpu.runner import Budget, Subject
from tests.gpu.sizes import SIZES
from tests.gpu.slices import SLICES
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects import layouts, modules
from tests.gpu.subjects.layouts import Attempt
from tests.gpu.table import SUBJECTS, SubjectName
from training.config.recipe import dump


def gpus(count: int = 1, nccl: tuple[int, ...] = (2, 29, 7), te: str | None = "2.19.0") -> GpuMachine:
    return GpuMachine(
        gpus=("NVIDIA H200",) * count, capability=(9, 0), memory_gib=139.0, driver="580", cuda="13.0", nccl=nccl,
        versions={"torch": "2.13.0", "transformer-engine": te},
    )  # fmt: skip


def on(machine: GpuMachine) -> SubjectRun:
    return SubjectRun(machine=machine, sizes=SIZES["tiny"])


def on_cpu(tmp_path: Path, world_size: int, measure: Any, **arguments: object) -> list[Any]:
    """What every rank of a measurement finds on forked CPU ranks."""

    def check(identity: Identity) -> None:
        torch.save(measure(identity, device="cpu", **arguments), tmp_path / f"{identity.rank}.pt")

    run_ranks(world_size, check)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


# ---- measurements


@pytest.mark.campaign
def test_two_models_on_the_same_weights_are_compared(tmp_path: Path) -> None:
    """On a CPU both come from our modules: no difference in any of the tensors, in either precision."""
    names, results = ["fp32-dense", "fp32-deepseek_v3_tiny", "bf16-dense"], tmp_path / "results.jsonl"
    on_cpu(tmp_path, 1, specs.measure, names=names, results=str(results))
    rows = {row.pop("name"): row for row in map(json.loads, results.read_text().splitlines())}
    assert list(rows) == names
    assert rows["fp32-dense"]["tensors"] == rows["bf16-dense"]["tensors"] > 20
    assert rows["fp32-deepseek_v3_tiny"]["tensors"] > 100  # every expert's matrices are one each
    for row in rows.values():
        assert row["logits"] == row["gradient"] == 0, row


def test_a_difference_is_named() -> None:
    theirs = {"logits": torch.ones(4), "a": torch.tensor([1.0, 4.0]), "b": torch.tensor([2.0])}
    ours = theirs | {"a": torch.tensor([1.0, 3.0])}
    assert specs.differences(theirs, ours) == {"logits": 0, "gradient": 0.25, "worst": "a", "tensors": 2}
    with pytest.raises(RuntimeError, match="'b'"):
        specs.differences(theirs, {name: ours[name] for name in ("logits", "a")})


@pytest.mark.campaign
def test_losses_fall(tmp_path: Path) -> None:
    (found,) = on_cpu(tmp_path, 1, losses.measure, steps=2, dtype="fp32")
    assert 6.5 < found["loss"][0] < 7.3  # ln 1024 = 6.93
    assert found["loss"][-1] < found["loss"][0] - 0.1


@pytest.mark.campaign
def test_layouts_are_compared_with_one_rank(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}

    def ranks_of(measurement: str, world_size: int, environ: dict[str, str], limit_s: float, layout: str) -> list[Any]:
        assert environ == {"NVIDIA_TF32_OVERRIDE": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if layout not in seen:
            seen[layout] = on_cpu(tmp_path, world_size, observe.measure, layout=layout)
        return seen[layout]

    monkeypatch.setattr(processes, "ranks_of", ranks_of)
    monkeypatch.setattr(layouts, "LAYOUTS", {2: ["tp2sp"]})
    attempt, run = Attempt(ranks=2, shared=True), on(gpus())
    layouts.try_layouts(attempt, run)
    assert run.problems == []
    assert 0 < run.numbers["tp2sp"]["gradient"] < 1e-5
    (piece,) = seen["tp2sp"][1]["gradients"]["final_layernorm.weight"]
    piece.data *= 1.01
    layouts.try_layouts(attempt, run)
    (problem,) = run.problems
    assert problem.startswith("tp2sp: gradient differs by 1.0e-02")
    assert "final_layernorm.weight" in run.lines[-1]


def test_throughput_counts_the_tokens_of_one_rank(tmp_path: Path) -> None:
    sizes = SIZES["tiny"]
    text = dump(measured_models.run_config(sizes, "llama3_tiny", 2, PrecisionConfig(dtype="fp32"), 2))
    found = on_cpu(tmp_path, 2, steps.measure, text=text, warmup_steps=1, steps=2)
    assert (found[0]["gpus"], found[0]["layers"], len(found[0]["losses"])) == (2, 2, 3)
    tokens = sizes.microbatches * sizes.seq_length  # of each rank
    assert found[0]["tokens_per_s_per_gpu"] == pytest.approx(tokens / found[0]["step_s"])
    assert found[0]["mfu"] is None  # this CPU's peak is not published
    for name in ("weights", "gradients", "optimizer"):
        assert found[0]["measured"][name] == pytest.approx(found[0]["predicted"][name], rel=0.01)


@pytest.mark.campaign
def test_a_stall_is_measured(tmp_path: Path) -> None:
    """On a CPU a thread copies, and nothing is pinned."""
    text = dump(measured_models.run_config(SIZES["tiny"], "llama3_tiny", 1, PrecisionConfig(dtype="fp32"), 1))
    (found,) = on_cpu(tmp_path, 1, stall.measure, text=text, folder=str(tmp_path / "saves"))
    assert found["background"] and not found["pinned"]
    assert len(found["stall_s"]) == len(found["saving_s"]) == stall.SAVES
    assert all(0 < stalled < saving for stalled, saving in zip(found["stall_s"], found["saving_s"], strict=True))


def test_a_failing_rank_is_an_error_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1: Traceback[^$]*AssertionError: no such measurement"):
        processes.ranks_of("no such measurement")


def test_a_hanging_measurement_is_stopped() -> None:
    with pytest.raises(RuntimeError, match="stopped after 0 s: begun"):
        processes.run(["sh", "-c", "echo begun; exec sleep 60"], {}, 0.3)


# ---- verdicts


@pytest.mark.parametrize(
    "count, nccl, expected",
    [
        (8, (2, 30, 1), [Attempt(ranks=8, shared=False)]),
        (4, (2, 30, 1), [Attempt(ranks=8, shared=True), Attempt(ranks=4, shared=False)]),
        (3, (2, 29, 7), [Attempt(ranks=2, shared=False)]),
        (1, (2, 30, 0), [Attempt(ranks=8, shared=True)]),
        (1, (2, 29, 7), []),
    ],
)
def test_layouts_use_what_there_is(count: int, nccl: tuple[int, ...], expected: list[Attempt]) -> None:
    assert list(layouts.attempts(count, nccl)) == expected


def test_ranks_that_cannot_share_a_gpu_leave_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_layouts(attempt: Attempt, run: SubjectRun) -> None:
        if attempt.shared:
            raise RuntimeError("exit code 1: log\nncclInvalidUsage")

    monkeypatch.setattr(layouts, "try_layouts", try_layouts)
    run = on(gpus(2, (2, 30, 0)))
    layouts.layouts(run)
    assert run.lines == ["several ranks on one GPU did not work: ncclInvalidUsage"]
    with pytest.raises(UnrunError, match=r"1 GPU is too few .*: several ranks .* ncclInvalidUsage"):
        layouts.layouts(on(gpus(1, (2, 30, 0))))
    with pytest.raises(UnrunError, match=r"1 GPU is too few .*: NCCL 2.29.7 puts no two ranks on one GPU"):
        layouts.layouts(on(gpus(1)))


def test_fp8_must_follow_bf16_and_learn() -> None:
    def problems(plain: list[float], losses: list[float], name: str = "fp8") -> list[str]:
        modules.judge_fp8(run := on(gpus()), plain, {name: losses})
        return run.problems

    assert problems([7.0, 6.0, 5.0], [7.0, 6.05, 5.01]) == []
    assert "fp8 against bf16: loss differs" in problems([7.0, 6.0], [7.0, 6.5])[0]
    assert "fp8: the loss does not fall" in problems([7.0, 6.99], [7.0, 7.01])[0]
    assert problems([7.0, 6.0], [7.0, float("nan")])
    assert problems([7.0, 6.0], [7.0, 6.2], "nvfp4") == []
    assert "nvfp4 against bf16: loss differs" in problems([7.0, 6.0], [7.0, 6.5], "nvfp4")[0]


def test_fp4_is_tried_on_blackwell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, formats in (((9, 0), ["bf16", "fp8"]), ((10, 0), ["bf16", "fp8", "nvfp4"])):
        asked = []

        def measured(_: SubjectRun, measurement: str, **how: Any) -> list[Any]:
            asked.append((how.get("fp8"), how.get("fp4")))  # noqa: B023
            return [{"loss": [7.0, 6.0]}]

        monkeypatch.setattr(SubjectRun, "measured", measured)
        modules.fp8(run := on(dataclasses.replace(gpus(), capability=capability)))
        assert [*run.numbers][:-1] == formats and run.problems == []
        assert asked == [(None, None), ("hybrid", None), (None, "e2m1")][: len(formats)]


def test_not_a_number_is_beyond_every_bound() -> None:
    assert modules.beyond({"logits": float("nan")}, {"logits": 1.0}, "bf16")


def test_what_is_missing_is_unrun_not_passed() -> None:
    for subject in (modules.specs, modules.fp8):
        with pytest.raises(UnrunError):
            subject(on(gpus(te=None)))


# ---- the runner


@pytest.fixture(autouse=True)
def _new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process imports as one for CPUs does; forks are tried on the emulated device (tests/gpu_path)."""
    monkeypatch.setattr(processes, "preload", lambda modules: "not tried")


def subject(function: str, name: str = "", least_s: float = 20, **more: Any) -> Subject:
    return Subject(name=name or function, function=f"tests.gpu.failing:{function}", least_s=least_s, shows="", **more)


CARD = subject("know_a_card", "environment")


class Patience(Budget):
    """For a hang little."""

    def limit_s(self, subject: Subject, following: Any) -> float | None:
        return 4 if subject.name == "hang" else super().limit_s(subject, following)


def proved(folder: Path, *subjects: Subject, total_s: float = 600, **job: Any) -> tuple[int, dict[str, Any]]:
    """The exit code, and the newest JSON."""
    budget = Patience(total_s=total_s, began=time.monotonic())
    code = prove_gpu.prove(prove_gpu.ProveGpu(output=folder, **job), subjects, budget)
    return code, json.loads(max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime).read_text())


def is_dead(pid: str) -> bool:
    """Or a zombie, which only its new parent can take away."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_whatever_one_subject_does_the_next_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash, a hang whose child would live on, no memory, something missing; what was found before is kept."""
    child = tmp_path / "child"
    monkeypatch.setenv("HANGING_CHILD", str(child))
    failing = [subject("crash"), subject("hang"), subject("run_out_of_memory"), subject("try_nothing")]
    code, report = proved(tmp_path, CARD, *failing, subject("have_no_time"), subject("succeed"))
    assert code == 1
    found = report["subjects"]
    assert [found[each.name]["verdict"] for each in failing] == ["failed", "failed", "failed", "unrun"]
    assert found["crash"]["problems"] == ["exit code 134: "] and found["crash"]["numbers"] == {"half": 0.5}
    assert found["hang"]["problems"] == ["stopped after 4 s: "] and found["hang"]["lines"] == ["before the hang"]
    assert is_dead(child.read_text().strip())
    assert found["run_out_of_memory"]["problems"] == [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    ]
    assert found["have_no_time"]["late"] == ["long"] and found["have_no_time"]["lines"][-1] == "short: done"
    assert (found["succeed"]["verdict"], found["succeed"]["numbers"]) == ("passed", {"difference": "nan"})
    assert {"commit", "driver", "nccl", "versions", "minutes"} <= report.keys()
    printed = capsys.readouterr().out
    assert "3 passed, 3 failed, 1 not run; 0." in printed and "short: done; 1 of its parts had no time" in printed
    assert "none can be forked: not tried" in printed


@pytest.mark.parametrize("number", some((signal.SIGINT, signal.SIGTERM), (signal.SIGTERM,)))
def test_ctrl_c_leaves_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Also of the subject that ran, whose finished rows are not run again when the report is continued."""
    rows = tmp_path / "rows"
    monkeypatch.setenv("ROWS_RUN", str(rows))
    monkeypatch.setenv("HANGING_ROW", "second")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as main does

    def interrupt() -> None:
        while not rows.exists() or "second" not in rows.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            proved(tmp_path, CARD, subject("succeed"), subject("have_rows"), subject("crash"))
    finally:
        signal.signal(signal.SIGTERM, before)
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert list(report["subjects"]) == ["environment", "succeed", "have_rows"]
    interrupted = report["subjects"]["have_rows"]
    assert interrupted["problems"] == ["interrupted"]
    assert {name: row["verdict"] for name, row in interrupted["rows"].items()} == {
        "first": "passed",
        "second": "failed",
    }
    assert "2 passed" in path.with_suffix(".html").read_text()
    monkeypatch.delenv("HANGING_ROW")
    code, report = proved(tmp_path, CARD, subject("have_rows"), resume=True)
    assert code == 0 and rows.read_text().split() == ["first", "second", "second", "third"]
    assert report["subjects"]["have_rows"]["lines"] == [f"{row}: measured" for row in ("first", "second", "third")]


def test_an_unknown_machine_is_said_and_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subjects = [subject("know_no_card", "environment"), subject("succeed")]
    budget = Budget(total_s=60, began=time.monotonic())
    assert prove_gpu.prove(prove_gpu.ProveGpu(output=tmp_path), subjects, budget) == 1
    assert "not run: the machine is not known" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_run_without_time_says_so_and_can_be_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--resume keeps what has passed, of another commit, too; without it no file is replaced."""
    slow = subject("succeed", "slow", least_s=1e4)
    code, report = proved(tmp_path, CARD, subject("succeed"), slow)
    assert (code, report["subjects"]["slow"]["verdict"]) == (0, "unrun")
    assert report["subjects"]["slow"]["unrun"].startswith("no time left (")
    assert "2 passed, 0 failed, 1 not run" in capsys.readouterr().out
    path = tmp_path / "gpu-1x-nvidia-h200-2026-11-24.json"
    path.write_text(path.read_text().replace('"abc"', '"def"').replace("11-24T", "11-23T"))
    path = path.rename(tmp_path / "gpu-1x-nvidia-h200-2026-11-23.json")
    _, report = proved(tmp_path, CARD, subject("crash", "succeed"), subject("succeed", "slow"), resume=True)
    assert [one["verdict"] for one in report["subjects"].values()] == ["passed"] * 3
    assert [one["commit"] for one in report["subjects"].values()] == ["abc", "def", "abc"]
    assert "succeed (of commit def)" in path.with_suffix(".html").read_text()
    _, report = proved(tmp_path, CARD, subject("succeed"))
    assert list(report["subjects"]) == ["environment", "succeed"] and len(list(tmp_path.glob("*.json"))) == 2
    newest = tmp_path / "gpu-1x-nvidia-h200-2026-11-24.json"
    newest.write_text(newest.read_text().replace("2.13.0", "2.12.0"))
    _, report = proved(tmp_path, CARD, resume=True)
    assert list(report["subjects"]) == ["environment"] and len(list(tmp_path.glob("*.json"))) == 3
    assert "of other libraries: it stays as it is" in capsys.readouterr().out


def test_rows_are_run_by_name_and_continued_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows"
    monkeypatch.setenv("ROWS_RUN", str(rows))
    monkeypatch.setenv("FAILING_ROW", "second")
    code, report = proved(tmp_path, CARD, subject("have_rows"))
    assert code == 1 and report["subjects"]["have_rows"]["problems"] == ["second: too far off"]
    code, _ = proved(tmp_path, CARD, subject("have_rows"), resume=True, only=("th*",))
    assert code == 1  # the second is still what it was
    monkeypatch.delenv("FAILING_ROW")
    code, report = proved(tmp_path, CARD, subject("have_rows"), resume=True)
    assert code == 0 and rows.read_text().split() == ["first", "second", "third", "third", "second"]
    found = report["subjects"]["have_rows"]
    assert found["numbers"]["rows"] == {name: {"of": name} for name in ("first", "second", "third")}


def test_what_is_not_timed_runs_side_by_side() -> None:
    first, second = (subject("succeed", name, timed=False) for name in ("first", "second"))
    timed, reader = subject("succeed", "timed"), subject("succeed", "reader", reads=("timed",))
    everything = [first, timed, second, reader]
    assert prove_gpu.batched(everything, together=False) == [[first, second], [timed], [reader]]
    assert prove_gpu.batched(everything, together=True) == [[first, timed, second], [reader]]


@pytest.mark.campaign
def test_what_fails_in_toy_size_gets_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untimed = subject("succeed", "untimed", timed=False)
    code, report = proved(tmp_path, CARD, untimed, subject("crash"), subject("succeed"), toy_first=True)
    found = report["subjects"]
    assert found["crash"]["unrun"] == "it failed in toy size: exit code 134: " and code == 0
    assert found["succeed"]["verdict"] == "passed"
    assert capsys.readouterr().out.count("untimed: PASSED") == 1


def test_slices_are_subjects_that_there_are() -> None:
    chosen = prove_gpu.chosen(prove_gpu.ProveGpu(slices=("speed",)))
    assert [each.name for each in chosen][:3] == ["environment", "throughput", "beside"]
    assert prove_gpu.minutes(prove_gpu.ProveGpu(slices=("speed",))) == SLICES["speed"].minutes
    assert len(prove_gpu.chosen(prove_gpu.ProveGpu())) == len(SUBJECTS)
    assert {name for one in SLICES.values() for name in one.subjects} | {"environment"} == set(get_args(SubjectName))
    page = Path(__file__).parents[2].joinpath("docs/benchmarks.md").read_text()
    for name, one in SLICES.items():
        subjects = ", ".join(f"`{subject}`" for subject in one.subjects)
        assert f"| `{name}` | {subjects} | {one.minutes:g} |" in page
        assert sum(each.least_s for each in SUBJECTS if each.name in one.subjects and each.timed) < 60 * one.minutes


def test_a_subject_gets_what_the_others_leave() -> None:
    """A hang never takes what those after it need at least."""
    rows = [subject(name, name, least_s=60) for name in "abcd"]

    def limit(total_s: float, number: int) -> float | None:
        budget = Budget(total_s=total_s, began=time.monotonic())
        found = budget.limit_s(rows[number], rows[number + 1 :])
        return None if found is None else round(found)

    assert limit(1200, 0) == 1020
    assert limit(400, 0) == 220
    assert limit(100, 0) == 60
    assert limit(59, 0) is None
    assert limit(100, 3) == 100


@pytest.mark.campaign
def test_a_disk_that_takes_nothing_does_not_stop_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    budget = Budget(total_s=60, began=time.monotonic())
    job = prove_gpu.ProveGpu(output=tmp_path / "file")
    assert prove_gpu.prove(job, [CARD, subject("succeed")], budget) == 0
    said = capsys.readouterr()
    assert "cannot be written" in said.err and "2 passed" in said.out


def test_every_subject_can_be_chosen() -> None:
    assert [subject.name for subject in SUBJECTS] == list(get_args(SubjectName))
    for each in SUBJECTS:
        module, _, name = each.function.partition(":")
        found = importlib.import_module(module)
        assert callable(getattr(found, name))
        read = re.findall(r'earlier(?:\.get\(|\[)"(\w+)"', inspect.getsource(found))
        assert set(read) == set(each.reads) or each.name in ("fp8", "tests"), each.name
    assert sum(each.least_s for each in SUBJECTS) < 20 * 60


def test_no_gpu_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert prove_gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tests.gpu: no GPU was found here")
    assert said.err.count("\n") == 1


def test_a_gpu_that_torch_cannot_use_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "0")
    assert prove_gpu.main(["--subjects", "fp8"]) == 2
    assert 'device = "cuda": this node has 1 GPU(s), but no NVIDIA driver answers' in capsys.readouterr().err
