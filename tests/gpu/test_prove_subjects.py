"""Verdicts of the subjects that measure, on numbers that a test has made up; and the page of a report."""

import dataclasses
import json
import os
import typing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest

from models.kernels import FUSIONS, FusionName, KernelsConfig
from parallel.config import PrecisionConfig
from tests.gpu import measured_models, page, report_text, subject_run
from tests.gpu.machine import GpuMachine
from tests.gpu.sizes import SIZES
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects import (
    checkpoint,
    environment,
    fusions,
    layouts,
    memory,
    planner,
    savings,
    throughput,
    trainings,
)
from tests.gpu.trainings import Training
from tools.inspect_checkpoint.compare import Comparison
from training.config.recipe import dump
from training.config.run_config import RunConfig


def card(memory_gib: float = 139.0, gpus: int = 1, nccl: tuple[int, ...] = (2, 29, 7)) -> GpuMachine:
    versions: dict[str, str | None] = {"torch": "2.13.0", "transformer-engine": "2.19.0"}
    return GpuMachine(
        gpus=("NVIDIA H200",) * gpus, capability=(9, 0), memory_gib=memory_gib, driver="580", nccl=nccl,
        versions=versions,
    )  # fmt: skip


def run_on(machine: GpuMachine, size: str = "card", **earlier: Any) -> SubjectRun:
    return SubjectRun(machine=machine, sizes=SIZES[size], earlier=earlier)


def step_numbers(step_s: float = 1.0, total: float = 10.0, tensors: float = 10.0, **changes: Any) -> dict[str, Any]:
    """As ``steps.measure`` returns them."""
    held = dict.fromkeys(memory.CATEGORIES, total / 4)
    return {
        "shape": "llama3_8b", "layers": 9, "gpus": 1, "losses": [7.0, 6.5], "step_s": step_s,
        "tokens_per_s_per_gpu": 32768 / step_s, "model_tflops_per_gpu": 400.0, "mfu": 0.4,
        "measured": held | {"total": total, "workspace": 1.0}, "predicted": held | {"tensors": tensors},
    } | changes  # fmt: skip


def measuring(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    """Every measurement is what ``answer`` makes of its name and arguments, which are kept."""
    asked: list[dict[str, Any]] = []

    def ranks_of(measurement: str, world_size: int = 1, environ: Any = None, limit_s: float = 0, **own: Any) -> Any:
        asked.append({"measurement": measurement, "world_size": world_size, **own})
        return [answer(measurement, own)] * world_size

    monkeypatch.setattr(subject_run, "ranks_of", ranks_of)
    return asked


# ---- the environment


SMI = """#!/bin/sh
case "$*" in
*mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.' >&2; exit 2;;
*query-gpu*) echo '0, H200, GPU-aa-1, 580.1, 96.0, 143771, 4, 31, 1980, 0x0, 700.00, 5, 16, 16, Enabled, 0, 0, No';;
*) echo "asked: $* (UUID: GPU-aa-1)";;
esac
"""


def test_clocks_and_links_are_told_in_nvidia_smis_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a driver that does not know a field; the numbers of cards stay here."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = run_on(card())
    run.numbers["machine"] = card().record()
    environment.cards(run)
    environment.topology(run)
    (line,) = run.lines
    assert line.startswith("index 0, ") and "clocks.max.sm 1980" in line and "power.limit 700.00" in line
    assert run.numbers["topology"] == "asked: topo -m (UUID: GPU-...)\n"
    assert "GPU-aa" not in json.dumps(run.numbers)


# ---- which models


@pytest.mark.parametrize(
    "memory_gib, shape", [(139.0, "llama3_8b"), (79.0, "llama3_8b"), (39.4, "llama3_8b"), (23.5, "llama32_1b")]
)
def test_as_many_layers_as_the_card_is_predicted_to_hold(memory_gib: float, shape: str) -> None:
    machine = card(memory_gib)
    config = measured_models.of_role(machine, SIZES["card"], "dense", 32)
    assert config.model.shape == shape and config.model.seq_length == 8192
    room = measured_models.SHARE * memory_gib * 2**30
    assert measured_models.predicted(machine, config).total <= room
    more = measured_models.with_layers(config.model, (config.model.num_layers or 0) + 1)
    assert measured_models.predicted(machine, dataclasses.replace(config, model=more)).total > room


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("role", ["dense", "small", "experts", "latent"])
def test_every_model_is_a_configuration_that_runs(size: str, role: Any) -> None:
    for gpus in (1, 8):
        config = measured_models.of_role(card(gpus=gpus), SIZES[size], role, SIZES[size].few_layers)
        assert config.problems(gpus) == []
        assert measured_models.loaded(dump(config)) == config


# ---- throughput and the planner


def test_a_row_that_does_not_fit_is_measured_with_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(measurement: str, own: dict[str, Any]) -> Any:
        if measurement == "products":
            return {"bf16": 800.0, "fp8_failed": "no such kernel"}
        if "num_layers = 4" not in own["text"]:
            raise RuntimeError("exit code 1: torch.OutOfMemoryError: CUDA out of memory")
        return step_numbers(layers=4)

    measuring(monkeypatch, answer)
    run = run_on(card(79.0))
    run.sizes = dataclasses.replace(run.sizes, most_layers=8)
    throughput.throughput(run)
    assert "bf16: 8 layers were predicted to fit, and do not; measured with 4" in run.problems
    assert run.numbers["rows"]["bf16"]["of_gemm"] == 0.5 and run.numbers["rows"]["fp8"]["of_gemm"] is None
    assert "no such kernel" in run.lines[0]
    assert run.headline.startswith("bf16 32,768 tokens/s a GPU, MFU 40.0%, 50.0% of GEMM; fp8")


@pytest.mark.parametrize(
    "capability, te, rows",
    [((8, 0), True, ["bf16"]), ((9, 0), True, ["bf16", "fp8"]), ((10, 0), True, ["bf16", "fp8", "mxfp8", "nvfp4"]),
     ((10, 0), False, ["bf16"])],
)  # fmt: skip
def test_rows_are_what_the_card_can_do(capability: tuple[int, int], te: bool, rows: list[str]) -> None:
    machine = dataclasses.replace(card(), capability=capability, versions={"transformer-engine": "2" if te else None})
    assert throughput.rows_of(machine) == rows


CLUSTER = """
[gpu]
name = "NVIDIA H200"
memory_gib = 139.0
memory_gb_per_s = 4800.0
peak_tflops = { bf16 = 989.5 }
[node]
gpus_per_node = 1
cpus_per_node = 8
memory_gib = 200.0
[fabric]
scale_up_gb_per_s = 1.0
scale_up_domain = 1
scale_up_latency_us = 1.0
kind = "ethernet"
nics_per_node = 1
nic_gb_per_s = 1.0
latency_us = 1.0
[price]
usd_per_gpu_hour = 1.0
source = "unknown"
date = "2026-11-24"
"""


def test_the_planner_stands_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 16 layers takes about 1.8 times as long as one of 8; fp8's peak comes from its measured product."""
    measuring(monkeypatch, lambda measurement, own: CLUSTER)

    def row(precision: PrecisionConfig, layers: int) -> dict[str, Any]:
        config = measured_models.run_config(SIZES["card"], "llama3_8b", layers, precision, 1)
        return step_numbers(float(layers), layers=layers, recipe=dump(config))

    rows = {"bf16": row(PrecisionConfig(), 16), "fp8": row(PrecisionConfig(fp8="hybrid"), 8)}
    products = {"bf16": 800.0, "fp8": 1600.0}
    run = run_on(card(), throughput={"numbers": {"rows": rows, "gemm_tflops": products}})
    planner.planner(run)
    assert run.problems == []
    found = run.numbers["rows"]
    assert 0.5 < found["bf16"]["predicted_s"] < 5
    assert 0.2 < found["fp8"]["predicted_s"] / found["bf16"]["predicted_s"] < 0.6
    assert found["fp8"]["ratio"] == found["fp8"]["predicted_s"] / 8
    with pytest.raises(UnrunError, match="no row of throughput"):
        planner.planner(run_on(card()))


# ---- memory, fusions, checkpoint


def test_memory_far_from_its_prediction_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter([10.9, 8.0, 10.0])
    measuring(monkeypatch, lambda measurement, own: step_numbers(total=next(totals)))
    memory.memory(run := run_on(card()))
    assert run.problems == ["experts: measured is -20.0% off the prediction, more than 10%"]
    assert run.headline == "llama3_8b +9.0%, llama3_8b -20.0%, llama3_8b +0.0%"


Switch = Literal["auto", "on", "off"]


@dataclasses.dataclass(kw_only=True)
class Kernels:
    """A section such as a recipe's."""

    apply_rope_fusion: Switch = "auto"
    moe_permute_fusion: bool = False
    cross_entropy_fusion_impl: Literal["none", "native", "te"] | None = None


def test_each_field_is_switched_on_and_off() -> None:
    assert list(fusions.switches(Kernels)) == [
        ("apply_rope_fusion", "off", "on"),
        ("moe_permute_fusion", False, True),
        ("cross_entropy_fusion_impl", "none", "native"),
        ("cross_entropy_fusion_impl", "none", "te"),
    ]
    assert [fusions.role_of(name) for name in typing.get_type_hints(Kernels)] == ["dense", "experts", "dense"]


def test_the_recipes_fields_are_switched() -> None:
    """Those that "auto" turns on where they can run; what the configuration refuses is not run."""
    fields = [name for name, _, _ in fusions.switches(KernelsConfig)]
    assert fields == ["tp_comm_overlap", "cuda_graph_impl"]
    base = measured_models.of_role(card(gpus=8), SIZES["card"], "dense", 2)
    without = fusions.switched(base, "apply_rope_fusion", "off", 8)
    assert without.kernels.off == ("apply_rope_fusion",)
    assert fusions.switched(without, "apply_rope_fusion", "on", 8) == base
    assert fusions.switched(base, "cuda_graph_impl", "local", 8).kernels.cuda_graph_impl == "local"
    narrow = dataclasses.replace(base, precision=PrecisionConfig(dtype="fp16"))
    with pytest.raises(UnrunError, match=r"cross_entropy_loss_fusion = on: .* cannot run"):
        fusions.switched(narrow, "cross_entropy_loss_fusion", "on", 8)


@pytest.mark.parametrize("name, off, on", fusions.NCCL)
def test_options_of_nccls_are_switched_where_there_are_several_gpus(name: str, off: Any, on: Any) -> None:
    base = measured_models.of_role(card(gpus=8), SIZES["card"], fusions.role_of(name), 2)
    assert getattr(base.parallel, name) == off != on
    assert getattr(fusions.switched(base, name, on, 8).parallel, name) == on
    with pytest.raises(UnrunError, match="one GPU has no collectives"):
        fusions.switched(base, name, on, 1)


def test_weights_in_fp8_are_switched_with_fp8_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measuring(monkeypatch, lambda measurement, own: step_numbers())
    run = run_on(card())
    run.numbers["rows"] = {}
    fusions.one_field(run, "fp8_param_gather", False, True, {})
    precisions = [measured_models.loaded(each["text"]).precision for each in asked]
    assert [(one.fp8_param_gather, one.fp8, one.fp8_recipe) for one in precisions] == [
        (True, "hybrid", "tensorwise"),
        (False, "hybrid", "tensorwise"),
    ]
    with pytest.raises(UnrunError, match=r"compute capability 8\.9"):
        fusions.one_field(run_on(dataclasses.replace(card(), capability=(8, 0))), "fp8_param_gather", False, True, {})


@pytest.mark.parametrize("gpus", [1, 8])
def test_what_overlaps_tp_is_switched_where_there_is_tp(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    asked = measuring(monkeypatch, lambda measurement, own: step_numbers())
    run = run_on(card(gpus=gpus))
    run.numbers["rows"] = {}
    if gpus == 1:
        with pytest.raises(UnrunError, match=r"tp_comm_overlap cannot run: it needs parallel\.sequence_parallel"):
            fusions.one_field(run, "tp_comm_overlap", False, True, {})
        return
    fusions.one_field(run, "tp_comm_overlap", False, True, {})
    on, off = [measured_models.loaded(each["text"]) for each in asked]
    assert (on.kernels.tp_comm_overlap, off.kernels.tp_comm_overlap) == (True, False)
    assert on.parallel == off.parallel and on.parallel.tensor_model_parallel_size == 2


def test_a_variable_is_switched_for_the_processes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    environs: list[Any] = []

    def ranks_of(measurement: str, world_size: int, environ: Any, limit_s: float, **own: Any) -> Any:
        environs.append(environ)
        return [step_numbers()] * world_size

    monkeypatch.setattr(subject_run, "ranks_of", ranks_of)
    run = run_on(card(gpus=8))
    run.numbers["rows"] = {}
    fusions.one_field(run, "NCCL_NVLS_ENABLE", "0", "1", {})
    assert environs == [{"NCCL_NVLS_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "0"}]


def test_a_fusion_that_changes_losses_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that the program refuses here is not run. What it chooses itself is run once for all fields."""
    ran: list[RunConfig] = []

    def steps_of(run: SubjectRun, config: RunConfig, environ: dict[str, str]) -> dict[str, Any]:
        ran.append(config)
        if "gradient_accumulation_fusion" in config.kernels.off:
            raise RuntimeError("exit code 1: ...\nparallel.errors.UserError: it needs another card\nrank 0 of 2 failed")
        losses = [7.0, float("nan")] if "apply_rope_fusion" in config.kernels.off else [7.0, 6.501]
        on = config.kernels == KernelsConfig()
        return step_numbers(0.9 if on else 1.0, total=8.0 if on else 10.0, losses=[7.0, 6.5] if on else losses)

    monkeypatch.setattr(fusions, "steps_of", steps_of)
    some: list[FusionName] = ["bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"]
    monkeypatch.setattr(fusions, "FUSIONS", {name: FUSIONS[name] for name in some})
    monkeypatch.setattr(fusions, "switches", lambda _: [])
    monkeypatch.setattr(fusions, "PRECISION", ())
    run = run_on(card())
    fusions.fusions(run)
    assert len(ran) == 1 + len(some)
    found = run.numbers["rows"]["bias_activation_fusion=on"]
    assert found["bytes"] == -2.0 and found["loss"] == pytest.approx(1.5e-4, rel=0.1)
    assert "gradient_accumulation_fusion: not run: it needs another card" in run.lines
    assert run.problems == ["apply_rope_fusion: losses differ by nan, more than 5e-03"]
    assert run.headline == "2 compared; the lowest: bias_activation_fusion=on, 0.900 of the step without it"


def test_a_switch_must_save_what_is_predicted_and_keep_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a bound beyond the base's own error; bf16 moments have losses of their own."""

    def steps_of(run: SubjectRun, config: RunConfig, environ: dict[str, str]) -> dict[str, Any]:
        if config.train.compile:
            raise RuntimeError("exit code 1: ...\nparallel.errors.UserError: no compiler\nrank 0 of 1 failed")
        if config.train.cpu_offloading_num_layers:
            return step_numbers(2.0, total=6.6, tensors=6.0, losses=[7.0, 6.6])
        if config.train.recompute_granularity == "full":
            return step_numbers(total=5.5, tensors=6.0)
        if config.optimizer.use_precision_aware_optimizer:
            return step_numbers(total=8.0, tensors=7.5, losses=[7.0, 7.5])
        return step_numbers(total=11.0, tensors=10.0)

    def with_host(run: SubjectRun, config: RunConfig, environ: dict[str, str]) -> dict[str, Any]:
        found = steps_of(run, config, environ)
        moves = config.train.cpu_offloading_num_layers or config.optimizer.optimizer_cpu_offload
        return found | {"measured": found["measured"] | {"host": 1.0 if moves else 0.0}}

    monkeypatch.setattr(fusions, "steps_of", with_host)
    run = run_on(card())
    savings.savings(run)
    assert run.numbers["rows"].keys() == savings.SAVINGS.keys() - {"compile"}
    assert any(line.startswith("compile: not run: no compiler") for line in run.lines)
    assert run.problems == [
        "activations_on_the_host: losses differ by 1.5e-02, more than 5e-03",
        "modules_on_the_host: no bytes more in the host's memory than without it: the switch did nothing",
        "recompute_full: measured is -8.3% off the prediction, without it +10.0%: more than 5%",
    ]
    assert run.headline == "7 compared; recompute_full saves most, 0.00 MiB"
    assert run.numbers["rows"]["recompute_full"]["bytes"] == -5.5


def test_a_stall_is_held_against_a_bare_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rank(stall_s: float, **changes: Any) -> dict[str, Any]:
        return {
            "own_bytes": 50e9, "plain_s": [1.0, 1.1], "saving_s": [1.5], "stall_s": [stall_s], "background": True,
            "pinned": True, "copy_gb_per_s": 25.0,
        } | changes  # fmt: skip

    found = checkpoint.stalls([rank(0.5), rank(3.0, copy_gb_per_s=50.0)])
    assert (found["stall_s"], found["limit_s"], found["plain_s"]) == (3.0, 2.0, 1.05)
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)
    measuring(monkeypatch, lambda measurement, own: rank(0.5, pinned=False))
    run = run_on(card(), "tiny")
    checkpoint.checkpoint(run)
    assert run.problems == ["memory could not be pinned (cudaHostRegister): checkpoints copy slowly"]
    assert run.headline == "0.5 s of standstill; a bare copy takes 2 s"
    assert not list((tmp_path / "build").iterdir())


# ---- trainings


def test_ranks_that_have_no_place_are_not_tried() -> None:
    assert layouts.shared_gpu(card(gpus=2), 2) == {}
    assert layouts.shared_gpu(card(nccl=(2, 30)), 2) == layouts.SHARED_GPU
    with pytest.raises(UnrunError, match=r"2 ranks and 1 GPU: NCCL 2\.29\.7 puts no two ranks on one"):
        trainings.train(run_on(card()), Training(layout="tp2sp"), Path("/nowhere"), (), {})


def test_a_training_far_from_the_cpus_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of 1e-3, and a tensor that only one of them has; 16 bits may be that far."""
    for name, losses in (("cuda", [7.0, 6.007]), ("cpu", [7.0, 6.0])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"iteration": number, "loss": loss}) + "\n" for number, loss in enumerate(losses)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    found = [
        Comparison(name="a", what="weights", outcome="differs", sizes=("", ""), bytes=4, relative=1e-3),
        Comparison(name="b", what="weights", outcome="first", sizes=("", ""), bytes=4),
    ]
    monkeypatch.setattr(trainings, "checkpoint_differences", lambda *_: found)
    trainings.compare(run := run_on(card()), "debug", tmp_path / "cuda", tmp_path / "cpu", trainings.BOUNDS)
    assert run.problems == ["debug: loss differs by 1.2e-03, more than 1e-04", "debug: b: first"]
    assert run.lines == ["debug: loss 1.2e-03, worst tensor 1.0e-03 (a)"]
    trainings.compare(run := run_on(card()), "debug", tmp_path / "cuda", tmp_path / "cpu", trainings.BF16_BOUNDS)
    assert run.problems == ["debug: b: first"]


# ---- the page


class Names(HTMLParser):
    """Elements, and what they load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_one_file_that_says_what_it_is() -> None:
    record = {"lines": ["<b>"], "numbers": {}, "headline": "", "problems": [], "unrun": "", "late": [], "wall_s": 1.0}
    rows = {"rows": {"bf16": step_numbers(of_gemm=0.5), "fp8": step_numbers(of_gemm=None, mfu=None)}}
    report: dict[str, Any] = card().record() | {"minutes": 20.0, "wall_s": 60.0, "size": "card", "subjects": {
        "throughput": record | {"verdict": "passed", "shows": "speed", "numbers": rows},
        "memory": record | {"verdict": "failed", "shows": "bytes", "numbers": rows, "problems": ["too much"]},
        "fp8": record | {"verdict": "unrun", "shows": "fp8", "unrun": "no time left"},
    }}  # fmt: skip
    text = page.render(json.loads(json.dumps(report)))
    parser = Names()
    parser.feed(text)
    assert "script" not in parser.tags and not parser.loaded and len(text) < 2**20
    assert "1 passed, 1 failed, 1 not run; 1.0 of 20 minutes" in text and "&lt;b&gt;" in text
    assert "too much" in text and "no time left" in text and "40.0% MFU" in text
    assert "NOT A CARD" not in text and "toy models" not in text
    emulated = page.render(report | {"driver": None, "size": "tiny"})
    assert "NOT A CARD&#x27;S: no NVIDIA driver answered" in emulated and "toy models" in emulated


def test_the_table_says_the_error_not_the_traceback() -> None:
    lines = ['cp2: RuntimeError: exit code 1: File "/a.py"', "  frame", "ValueError: no backend", "rank 1 failed first"]
    assert report_text.telling("\n".join(lines)) == "cp2: RuntimeError: exit code 1: ValueError: no backend"
    assert report_text.telling("one line") == "one line"
