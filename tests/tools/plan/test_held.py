"""What a rank holds throughout a step is one number, whoever tells it: plan, dry run, trace, table of memory."""

from pathlib import Path
from typing import Any

import pytest

from models.costs.candidate import Candidate
from models.costs.program import OURS
from models.costs.stage_parameters import stages
from models.families import named
from tests.models.costs.by_hand import rank_bytes
from tools.plan.flags import RequestFlags
from tools.plan.run import asked
from tools.plan.search.pricing import PricedLayout, price, program
from tools.plan.search.recipe import configuration
from tools.plan.search.request import PlanRequest
from tools.plan.trace import command
from training.cli.dry_run import table
from training.config.recipe import load
from training.config.run_config import RunConfig

RECIPE = """
[model]
shape = "llama3_8b"
seq_length = 8192
vocab_size = 128256
[precision]
grad_reduce_in_fp32 = {wide}
[train]
global_batch_size = 256
"""


def question(folder: Path, *, wide: bool, cluster: str = "h100_ib") -> tuple[PlanRequest, RunConfig]:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(wide=str(wide).lower()))
    base = load(path)
    return asked(RequestFlags(recipe=path, cluster=cluster, num_gpus=64), base), base


def layout(precision: str) -> Candidate:
    return Candidate(tp=2, pp=2, vpp=2, dp=16, microbatches=16, precision=precision)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("precision, weights", [("bf16", 2), ("fp8", 4), ("nvfp4", 3.125)])
def test_the_plan_holds_what_the_dry_run_of_its_recipe_says(
    tmp_path: Path, precision: str, weights: float, wide: bool
) -> None:
    own, base = question(tmp_path, wide=wide, cluster="gb200" if precision == "nvfp4" else "h100_ib")
    (plan,) = price(own, [layout(precision)])
    config = configuration(own, plan.layout, base)
    assert config.precision.grad_reduce_in_fp32 is wide
    stage = stages(own.shape, config.parallel)[plan.fullest_stage]
    expected = rank_bytes(stage, config.precision, config.parallel, config.layout(64))
    printed = [plan.held_bytes[name] for name in ("weights", "gradients", "optimizer")]
    assert printed == pytest.approx([expected.weights, expected.gradients, expected.optimizer], rel=1e-12)
    assert expected.gradients / stage.parameters_per_rank == (4 if wide else 2)
    assert expected.weights / stage.parameters_per_rank == weights


def test_narrow_gradients_are_reduced_in_less_time(tmp_path: Path) -> None:
    alone = Candidate(dp=64, microbatches=4, overlap=False)
    (wide,), (narrow,) = (price(question(tmp_path, wide=each)[0], [alone]) for each in (True, False))
    assert narrow.spent_s["dp"] < 0.8 * wide.spent_s["dp"]


def test_gradients_of_fp32_weights_stay_wide(tmp_path: Path) -> None:
    own, _ = question(tmp_path, wide=False)
    assert program(own.cluster, grad_reduce_in_fp32=False).gradient_bytes == 2 < OURS.gradient_bytes
    alone = Candidate(dp=64, microbatches=4, overlap=False, precision="fp32")
    (found,), (wide,) = (price(question(tmp_path, wide=each)[0], [alone]) for each in (False, True))
    assert found.held_bytes == wide.held_bytes and found.spent_s == wide.spent_s


def test_the_dry_run_names_fp8s_copies(tmp_path: Path) -> None:
    own, base = question(tmp_path, wide=True)
    for precision, words in (
        ("fp8", "4 (2 of them Transformer Engine's copies in fp8) + 4 bytes"),
        ("nvfp4", "3.125 (1.125 of them Transformer Engine's copies in fp4) + 4 bytes"),
        ("bf16", "2 + 4 b"),
    ):
        config = configuration(own, layout(precision), base)
        lines = table(config, own.shape, config.layout(64))
        assert words in " ".join(" ".join(lines).split())


def test_the_trace_counts_fp8s_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gib = 2**30
    traced: dict[str, Any] = {
        "parameters": gib, "weights": 2 * gib, "gradients": 4 * gib, "main_weights": gib, "moments": 0,
        "activations": 3 * gib, "cpu_s": 1.0, "collectives": {},
    }  # fmt: skip
    monkeypatch.setattr(command, "trace_stages", lambda *_: [traced, traced])
    monkeypatch.setattr(command, "by_formula", lambda *_: 0.0)
    own, base = question(tmp_path, wide=True, cluster="gb200")
    plans: dict[str, PricedLayout] = {name: price(own, [layout(name)])[0] for name in ("bf16", "fp8", "nvfp4")}
    for name, copies, total in (("bf16", "0.00", "10.0"), ("fp8", "2.00", "12.0"), ("nvfp4", "1.12", "11.1")):
        command.trace(own, [plans[name]], base)
        printed = capsys.readouterr().out
        row = printed.splitlines()[-1].split()
        assert row[:3] == ["1", "2.00", copies] and row[6] == total
        assert ("as in the plan's weights" in printed) is (name != "bf16")


def test_fp4_is_planned_for_who_asks_and_has_it(tmp_path: Path) -> None:
    """And on Blackwell its products are faster than fp8's."""
    own, base = question(tmp_path, wide=True, cluster="gb200")
    (fp8,), (fp4,) = (price(own, [layout(name)]) for name in ("fp8", "nvfp4"))
    assert fp4.step_s < fp8.step_s
    precision = configuration(own, fp4.layout, base).precision
    assert (precision.dtype, precision.fp8, precision.fp4, precision.fp4_recipe) == ("bf16", None, "e2m1", "nvfp4")
    assert configuration(own, fp8.layout, base).precision.fp4 is None


def memory(capsys: pytest.CaptureFixture[str], model: str, cluster: str) -> str:
    from tools.plan.__main__ import main

    flags = ["--model", model, "--cluster", cluster, *"--num_gpus 64 --global_batch_size 256".split()]
    assert main(["size", "--show", "memory", *flags]) == 0
    return capsys.readouterr().out


def test_the_table_of_memory_has_fp8_where_the_card_has(capsys: pytest.CaptureFixture[str]) -> None:
    printed = memory(capsys, "llama3_8b", "h100_ib")
    (row,) = (line.split() for line in printed.splitlines() if "fp8" in line)
    parameters = 8.03e9
    copied = parameters * (2 + 2 + 4 + 12 / 64) / 2**30
    assert float(row[-3]) == pytest.approx(copied, rel=0.01)
    assert float(row[-1]) == pytest.approx(parameters * 16 / 64 / 2**30, rel=0.05)  # no copies of what is not held
    without = memory(capsys, "llama3_8b", "a100_ib")
    assert "fp8" not in without and "bf16, bf16 gradients" in without


def test_the_table_of_memory_says_what_divides_experts(capsys: pytest.CaptureFixture[str]) -> None:
    shape = named("qwen3_30b_a3b")
    own = shape.num_layers * shape.num_moe_experts * 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    printed = memory(capsys, "qwen3_30b_a3b", "h100_ib")
    assert f"the experts' {own / 1e9:,.1f} B parameters, EP x ETP x PP" in printed and "without TP, PP or EP" in printed
    assert "EP" not in memory(capsys, "llama3_8b", "h100_ib")
