"""Verdicts of ``beside`` and ``profile`` on numbers that a test has made up; what both sides compute on a CPU."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from parallel.config import PrecisionConfig
from tests.gpu import kernel_kinds, measured_models, processes, step_profile, verdict_beside
from tests.gpu.machine import GpuMachine
from tests.gpu.sides import megatron_lm, torchtitan
from tests.gpu.sides.program import Request
from tests.gpu.sizes import SIZES
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects import beside, profile
from training.config.recipe import dump
from training.config.run_config import RunConfig
from training.profile.chrome_trace import ANNOTATIONS, TraceEvent
from training.profile.spans import StepSpan
from training.profile.timeline import Measured


def card(memory_gib: float = 79.0, te: str | None = "2.19.0", capability: tuple[int, int] = (9, 0)) -> GpuMachine:
    return GpuMachine(
        gpus=("NVIDIA H100 80GB HBM3",), capability=capability, memory_gib=memory_gib,
        versions={"transformer-engine": te},
    )  # fmt: skip


def row(tflops: float, mfu: float = 0.5, first: float = 12.5, last: float = 12.0, **changes: Any) -> dict[str, Any]:
    """As ``one_side.measure`` returns it, and what the subject adds."""
    return {
        "shape": "llama3_8b", "layers": 8, "losses": [first, last], "model_tflops_per_gpu": tflops,
        "tokens_per_s_per_gpu": 30 * tflops, "mfu": mfu, "peak_bytes": 2**36, "transformer_engine": True,
        "same_weights": True, "fp8": False,
    } | changes  # fmt: skip


def answering(monkeypatch: pytest.MonkeyPatch, run: SubjectRun, answer: Any) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def measured(measurement: str, world_size: int = 1, environ: Any = None, **own: Any) -> Any:
        asked.append({"measurement": measurement, **own})
        return [answer(measurement, own)]

    monkeypatch.setattr(run, "measured", measured)
    return asked


# ---- beside


def test_ratios_and_goals() -> None:
    rows = {
        "triplane_te": row(500.0, mfu=0.505), "megatron_core": row(400.0), "pytorch": row(520.0),
        "triplane_fp8": row(600.0, fp8=True), "megatron_core_fp8": row(480.0, fp8=True),
    }  # fmt: skip
    ratios = verdict_beside.ratios(rows)
    assert ratios == {
        "triplane_te/megatron_core": 1.25, "triplane_te/pytorch": pytest.approx(0.9615, abs=1e-4),
        "triplane_fp8/megatron_core_fp8": 1.25, "triplane_fp8/triplane_te": 1.2,
    }  # fmt: skip
    assert list(verdict_beside.goals(rows, ratios, {"bf16": 600.0})) == [
        "goal: bf16 MFU 50.5%, at least 50.0%: met",
        "goal: bf16 of the fastest product 83.3%, at least 85.0%: MISSED",
        "goal: bf16 of megatron_core 1.250, at least 1.000: met",
        "goal: bf16 of pytorch 0.962, at least 1.000: MISSED",
        "goal: fp8 of bf16 1.200, at least 1.250: MISSED",
    ]
    assert verdict_beside.ratios({"triplane": row(3.0), "pytorch": row(4.0)}) == {"triplane/pytorch": 0.75}
    assert list(verdict_beside.goals({}, {}, {})) == ["goals: not looked at without the row triplane_te"]


def test_losses_that_are_not_alike_are_problems() -> None:
    rows = {
        "triplane_te": row(1.0), "pytorch": row(1.0, first=12.53), "megatron_core": row(1.0, last=12.5),
        "triplane": row(1.0, first=float("nan")), "triplane_fp8": row(1.0, first=12.6, fp8=True),
        "torchtitan": row(1.0, first=11.5, last=11.0, same_weights=False),
        "debug": row(1.0, first=5.0, last=4.0, same_weights=False, shape="llama3_debugmodel"),
        "megatron_lm": row(1.0, first=11.2, last=11.0, same_weights=False),
    }  # fmt: skip
    assert list(verdict_beside.losses(rows)) == [
        "pytorch: its first loss is 2.4e-03 from Triplane's, more than 2e-03",
        "megatron_core: its loss does not fall: 12.5000 to 12.5000",
        "triplane: its loss does not fall: nan to 12.0000",
        "triplane: its first loss is nan from Triplane's, more than 2e-03",
        "megatron_lm: its first loss is 1.0e-01 from Triplane's, more than 1e-01",
    ]


def test_one_sides_failure_is_one_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory is measured with fewer layers; programs without a checkout say what to give."""
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    monkeypatch.delenv("TORCHTITAN", raising=False)
    run = SubjectRun(machine=card(), sizes=SIZES["card"], earlier={"throughput": {"numbers": {"gemm_tflops": {}}}})

    def answer(measurement: str, own: dict[str, Any]) -> dict[str, Any]:
        layers = measured_models.shape_of(measured_models.loaded(own["text"])).num_layers
        if own["side"] == "plain_pytorch" and layers > 4:
            raise RuntimeError("exit code 1: torch.OutOfMemoryError: CUDA out of memory")
        if own["side"] == "megatron_core":
            raise RuntimeError("exit code 1: no kernel image")
        return row(500.0, layers=layers, transformer_engine=True)

    asked = answering(monkeypatch, run, answer)
    beside.beside(run)
    assert set(run.numbers["rows"]) == {"triplane_te", "pytorch", "triplane", "triplane_fp8"}
    assert [text.split(":")[0] for text in run.problems] == [
        "megatron_core", "pytorch", "triplane", "megatron_core_fp8"
    ]  # fmt: skip
    assert "triplane: Transformer Engine was in its process" in run.problems
    assert [one["te"] for one in asked if one["side"] == "triplane"] == [True, False, True]
    assert "megatron_lm: not run: give MEGATRON_LM=FOLDER, a checkout of Megatron-LM with pretrain_gpt.py" in run.lines
    assert "torchtitan: not run: give TORCHTITAN=FOLDER, a checkout of torchtitan with torchtitan/train.py" in run.lines
    assert run.headline.startswith("triplane_te/pytorch 1.000; ")


@pytest.mark.parametrize("te, capability", [(None, (9, 0)), ("2.19.0", (8, 0))])
def test_rows_that_a_card_or_its_libraries_cannot_do(te: str | None, capability: tuple[int, int]) -> None:
    run = SubjectRun(machine=card(te=te, capability=capability), sizes=SIZES["card"])
    model = beside.model_of(run)
    for name, own in beside.ROWS.items():
        cannot = own.needs_te if te is None else own.precision.fp8 is not None
        if cannot:
            with pytest.raises(UnrunError, match=r"Transformer Engine is not installed|no fp8 tensor cores"):
                beside.one_row(run, name, own, model)


@pytest.mark.parametrize("memory_gib, least", [(79.0, 4), (139.0, 12)])
def test_the_model_fits_every_row(memory_gib: float, least: int) -> None:
    run = SubjectRun(machine=card(memory_gib), sizes=SIZES["card"])
    config = beside.model_of(run)
    assert config.model.shape == "llama3_8b" and (config.model.num_layers or 0) >= least
    assert beside.fits_plainly(run, config.model, config)
    more = measured_models.with_layers(config.model, (config.model.num_layers or 0) + 1)
    fp8 = dataclasses.replace(config, model=more, precision=beside.FP8)
    room = measured_models.SHARE * memory_gib * 2**30
    assert not beside.fits_plainly(run, more, config) or measured_models.predicted(run.machine, fp8).total > room


def toy() -> RunConfig:
    run = SubjectRun(machine=card(), sizes=SIZES["tiny"])
    return dataclasses.replace(beside.model_of(run), precision=PrecisionConfig(dtype="fp32"))


@pytest.mark.campaign
def test_plain_pytorch_trains_the_same_model() -> None:
    """The same weights, samples, clipping and AdamW, in fp32; llama3_tiny has grouped queries."""
    given: dict[str, Any] = {"text": dump(toy()), "warmup_steps": 1, "steps": 3, "device": "cpu"}
    plain, own = (processes.ranks_of("one_side", side=side, **given)[0] for side in ("plain_pytorch", "triplane"))
    assert plain["losses"] == pytest.approx(own["losses"], rel=1e-5)
    assert len(set(own["losses"])) == 4 and own["losses"][-1] < own["losses"][0] - 0.05


# ---- programs


def request(shape: str = "llama3_8b") -> Request:
    config = measured_models.run_config(SIZES["card"], shape, 8, PrecisionConfig(), 1)
    return Request(
        config=config, shape=measured_models.shape_of(config), gpus=card().gpus, te=True, warmup_steps=1, steps=2,
        limit_s=60,
    )  # fmt: skip


MEGATRON_LOG = """
 iteration        1/       3 | elapsed time per iteration (ms): 9000.0 | lm loss: 1.2600000E+01 | loss scale: 1.0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: 200.0 | reserved: 300.0
 iteration        2/       3 | elapsed time per iteration (ms): 1000.0 | lm loss: 1.2500000E+01 | loss scale: 1.0 |
 iteration        3/       3 | elapsed time per iteration (ms): 1200.0 | lm loss: 1.2400000E+01 | loss scale: 1.0 |
"""
TITAN_LOG = "\n".join(
    f"[titan] \x1b[31mstep: {step:2}  \x1b[32mloss: {loss}  \x1b[38mgrad_norm:  1.0  \x1b[36mmemory: 50.00GiB(63%)  "
    f"\x1b[34mtps: {rate}  \x1b[36mtflops: 1.0"
    for step, loss, rate in ((1, 12.2, "900"), (2, 12.1, "32,768"), (3, 12.0, "16,384"))
)


@pytest.mark.parametrize(
    "module, file, log, losses, step_s, peak",
    [(megatron_lm, "pretrain_gpt.py", MEGATRON_LOG, [12.6, 12.5, 12.4], 1.1, 200 * 2**20),
     (torchtitan, "torchtitan/train.py", TITAN_LOG, [12.2, 12.1, 12.0], 1.5, 50 * 2**30)],
)  # fmt: skip
def test_a_programs_log_becomes_a_row(
    module: Any, file: str, log: str, losses: list[float], step_s: float, peak: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.setenv(module.VARIABLE, str(tmp_path))
    monkeypatch.setattr(processes, "run", lambda *_: log)
    found = module.measured(request())
    assert (found["losses"], found["step_s"], found["peak_bytes"]) == (losses, pytest.approx(step_s), peak)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(32768 / step_s) and found["layers"] == 8
    monkeypatch.setattr(processes, "run", lambda *_: log[: len(log) // 2])
    with pytest.raises(RuntimeError, match="were printed of 3 steps"):
        module.measured(request())


# ---- profile


@pytest.mark.parametrize(
    "name, kind",
    [("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
     ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "matrix products"),
     ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
     ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
     ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>", "norms and elementwise"),
     ("void transformer_engine::detail::cast_transpose_fused_kernel_notaligned<...>", "quantisation"),
     ("cross_entropy_kernel", "loss and embedding"),
     ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
     ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>", "norms and elementwise")],
)  # fmt: skip
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kernel_kinds.kind_of(event(name, 0, 1)) == kind


def event(name: str, begin: float, end: float, category: str = "kernel", thread: int = 7) -> TraceEvent:
    return TraceEvent(name, category, (0, thread), begin, end, {})


STEP = [
    event("iteration 5", 0.0, 10.0, ANNOTATIONS, 1),
    event("forward_backward", 0.0, 8.0, ANNOTATIONS, 1),
    event("nvjet_1", 1.0, 4.0),
    event("nvjet_1", 4.0, 5.0),
    event("ncclDevKernel_AllGather", 4.5, 6.0, thread=8),
    event("Memcpy DtoH (Device -> Pinned)", 9.0, 9.5, "gpu_memcpy"),
    event("cudaStreamSynchronize", 6.0, 9.5, "cuda_runtime", 1),
]


def test_a_profiles_seconds_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [
        StepSpan("forward", 0, 0, 0.0, 1.0),
        StepSpan("forward", 1, 0, 2.0, 3.5),
        StepSpan("update", None, None, 4, 5),
    ]
    found = step_profile.found_in(STEP, Measured(step_s=9.0, spans=spans), "cuda") | {"layers": 8}
    assert found["kinds"] == {"idle": 4.5, "matrix products": 4.0, "communication": 1.0, "copies": 0.5}
    assert found["gaps"] == {"count": 3, "total_s": 4.5, "longest_s": 3.0}
    assert found["passes"] == {"forward": 2.5, "update": 1.0, "step": 9.0}
    assert found["kernels"][0]["name"] == "nvjet_1" and found["kernels"][0]["calls"] == 2
    assert found["host_wait_s"] == 3.5
    run = SubjectRun(machine=card(te=None), sizes=SIZES["card"])
    asked = answering(monkeypatch, run, lambda *_: found)
    profile.profile(run)
    assert run.headline == "bf16 10.000 s: idle 45.0%, matrix products 40.0%, communication 10.0%"
    assert run.lines[-1].startswith("fp8: not run") and len(asked) == 1 and run.problems == []


def test_a_profile_is_of_throughputs_own_row() -> None:
    config = measured_models.run_config(SIZES["card"], "llama3_8b", 3, PrecisionConfig(), 1)
    earlier = {"throughput": {"numbers": {"rows": {"bf16": {"recipe": dump(config)}}}}}
    run = SubjectRun(machine=card(), sizes=SIZES["card"], earlier=earlier)
    assert profile.config_of(run, "bf16") == config != profile.config_of(run, "fp8")
