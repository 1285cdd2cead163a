"""What make prove-gpu does, as far as a CPU can tell: its measurements run there, and its verdicts are right."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.launch import Identity
from ranks import run_ranks
from tests.gpu import __main__ as prove_gpu
from tests.gpu import machine, observe, specs, subjects, throughput
from tests.gpu.machine import GpuMachine
from tests.gpu.subjects import Attempt, SubjectOutcome, UnrunError

TINY = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "vocab_size": 128, "seq_length": 32,
}  # fmt: skip


def gpus(count: int = 1, nccl: tuple[int, ...] = (2, 29, 7), te: str | None = "2.19.0") -> GpuMachine:
    return GpuMachine(
        gpus=("NVIDIA H200",) * count, capability=(9, 0), memory_gib=139.0, driver="580", cuda="13.0", nccl=nccl,
        versions={"torch": "2.13.0", "transformer-engine": te},
    )  # fmt: skip


def on_cpu(tmp_path: Path, world_size: int, measure: Any, **arguments: object) -> list[Any]:
    """What every rank of a measurement finds on forked CPU ranks."""

    def check(identity: Identity) -> None:
        torch.save(measure(identity, device="cpu", **arguments), tmp_path / f"{identity.rank}.pt")

    run_ranks(world_size, check)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


# ---- measurements


def test_two_models_on_the_same_weights_are_compared(tmp_path: Path) -> None:
    """On a CPU both come from our modules: no difference in any of the tensors, in either precision."""
    (found,) = on_cpu(tmp_path, 1, specs.measure)
    assert found["fp32"].keys() == specs.MODELS.keys()
    assert found["fp32"]["dense"]["tensors"] == found["bf16"]["dense"]["tensors"] > 20
    assert found["fp32"]["deepseek_v3_tiny"]["tensors"] > 100  # every expert's matrices are one each
    for row in (*found["fp32"].values(), *found["bf16"].values()):
        assert row["logits"] == row["gradient"] == 0, row


def test_a_difference_is_named() -> None:
    theirs = {"logits": torch.ones(4), "a": torch.tensor([1.0, 4.0]), "b": torch.tensor([2.0])}
    ours = theirs | {"a": torch.tensor([1.0, 3.0])}
    assert specs.differences(theirs, ours) == {"logits": 0, "gradient": 0.25, "worst": "a", "tensors": 2}
    with pytest.raises(RuntimeError, match="'b'"):
        specs.differences(theirs, {name: ours[name] for name in ("logits", "a")})


def test_losses_fall_in_a_process_of_their_own() -> None:
    (found,) = subjects.ranks_of("losses", steps=3, dtype="fp32", device="cpu")
    assert 6.5 < found["loss"][0] < 7.3  # ln 1024 = 6.93
    assert found["loss"][-1] < found["loss"][0] - 0.1


def test_layouts_are_compared_with_one_rank(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}

    def ranks_of(measurement: str, world_size: int, environ: dict[str, str], limit_s: float, layout: str) -> list[Any]:
        assert environ == {"NVIDIA_TF32_OVERRIDE": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if layout not in seen:
            seen[layout] = on_cpu(tmp_path, world_size, observe.measure, layout=layout)
        return seen[layout]

    monkeypatch.setattr(subjects, "ranks_of", ranks_of)
    monkeypatch.setattr(subjects, "LAYOUTS", {2: ["tp2sp"]})
    attempt = Attempt(ranks=2, shared=True)
    outcome = subjects.try_layouts(attempt, SubjectOutcome(lines=[], numbers={}))
    assert outcome.problems == []
    assert 0 < outcome.numbers["tp2sp"]["gradient"] < 1e-5
    (piece,) = seen["tp2sp"][1]["gradients"]["final_layernorm.weight"]
    piece.data *= 1.01
    (problem,) = subjects.try_layouts(attempt, outcome).problems
    assert problem.startswith("tp2sp: gradient differs by 1.0e-02")
    assert "final_layernorm.weight" in outcome.lines[-1]


def test_throughput_counts_the_tokens_of_one_rank(tmp_path: Path) -> None:
    found = on_cpu(tmp_path, 2, throughput.measure, row="small bf16", changes=TINY)
    assert found[0]["gpus"] == 2
    tokens = throughput.MICROBATCHES * 4 * 32  # of each rank, in microbatches of 4 samples
    assert found[0]["tokens_per_s_per_gpu"] == pytest.approx(tokens / found[0]["step_s"])
    assert found[0]["mfu"] is None  # this CPU's peak is not published


def test_a_failing_rank_is_an_error_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1: Traceback[^$]*AssertionError: no such measurement"):
        subjects.ranks_of("no such measurement")


def test_a_hanging_measurement_is_stopped() -> None:
    with pytest.raises(RuntimeError, match="stopped after 0 s: begun"):
        subjects.run(["sh", "-c", "echo begun; exec sleep 60"], {}, 0.3)


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
    assert list(subjects.attempts(count, nccl)) == expected


def test_ranks_that_cannot_share_a_gpu_leave_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_layouts(attempt: Attempt, outcome: SubjectOutcome) -> SubjectOutcome:
        if attempt.shared:
            raise RuntimeError("exit code 1: log\nncclInvalidUsage")
        return outcome

    monkeypatch.setattr(subjects, "try_layouts", try_layouts)
    outcome = subjects.layouts(gpus(2, (2, 30, 0)))
    assert outcome.lines == ["several ranks on one GPU did not work: ncclInvalidUsage"]
    with pytest.raises(UnrunError, match=r"1 GPU is too few .*: several ranks .* ncclInvalidUsage"):
        subjects.layouts(gpus(1, (2, 30, 0)))
    with pytest.raises(UnrunError, match=r"1 GPU is too few .*: NCCL 2.29.7 puts no two ranks on one GPU"):
        subjects.layouts(gpus(1))


def test_fp8_must_follow_bf16_and_learn() -> None:
    assert subjects.judge_fp8([7.0, 6.0, 5.0], [7.0, 6.05, 5.01]).problems == []
    assert "fp8 against bf16: loss differs" in subjects.judge_fp8([7.0, 6.0], [7.0, 6.5]).problems[0]
    assert "fp8: the loss does not fall" in subjects.judge_fp8([7.0, 6.99], [7.0, 7.01]).problems[0]
    assert subjects.judge_fp8([7.0, 6.0], [7.0, float("nan")]).problems


def test_not_a_number_is_beyond_every_bound() -> None:
    assert subjects.beyond({"logits": float("nan")}, {"logits": 1.0}, "bf16")


def test_what_is_missing_is_unrun_not_passed() -> None:
    assert subjects.guarded("specs", gpus(te=None))[0] == "unrun"
    assert subjects.guarded("fp8", gpus(te=None))[0] == "unrun"


def test_one_failing_subject_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_machine: GpuMachine) -> SubjectOutcome:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(machine, "look", gpus)
    monkeypatch.setattr(prove_gpu, "require_gpu", lambda: None)
    passing = SubjectOutcome(lines=["12 passed"], numbers={"summary": "12 passed"})
    monkeypatch.setattr(subjects, "SUBJECTS", {"specs": broken, "tests": lambda _: passing})
    assert prove_gpu.main(["--subjects", "specs", "tests", "--output", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("gpu-1x-nvidia-h200-*.json")
    report = json.loads(path.read_text())
    assert report["subjects"]["specs"]["verdict"] == "failed"
    assert report["subjects"]["tests"]["verdict"] == "passed"
    assert {"commit", "driver", "nccl", "versions"} <= report.keys()
    assert "PROBLEM RuntimeError: CUDA error" in capsys.readouterr().out
    assert prove_gpu.main(["--subjects", "tests", "--output", str(tmp_path)]) == 0


def test_no_gpu_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert prove_gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tests.gpu: no GPU was found here")
    assert said.err.count("\n") == 1
