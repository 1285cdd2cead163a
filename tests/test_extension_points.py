"""What adding a norm, an activation, a schedule or a metric takes, done here with toy ones through the same points."""

import itertools
import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

import runs
from campaign import param
from data.prepared import Prepared
from models import gpt
from models.activations import ACTIVATIONS, Activation
from models.config import ModelConfig
from models.costs.parameters import num_parameters
from models.families import TINY
from models.layers import norm
from models.layers.spec import stack_spec
from models.norms import NORMS, NormSpec
from models.resolve import resolve
from parallel import groups, metrics
from parallel.launch import Identity
from parallel.layout import Layout
from program.errors import SharedMistake
from ranks import run_ranks
from training import train
from training.config.lr_schedule import DECAYS
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.schedules import learning_schedule

SHORT = ("--train.train_iters", "3", "--train.global_batch_size", "4", "--train.eval_interval", "None")


class MeanNorm(nn.Module):
    """x minus its mean, times a weight."""

    def __init__(self, hidden_size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(dim=-1, keepdim=True)) * self.weight


def configured(folder: Path, *flags: str) -> RunConfig:
    return runs.configuration(folder, *SHORT, *flags)


def allow(monkeypatch: pytest.MonkeyPatch, section: type, field: str, name: str) -> None:
    """One more name in the field's Literal."""
    names = typing.get_args(typing.get_type_hints(section)[field])
    known = [name for choice in names for name in typing.get_args(choice) or [choice] if name is not type(None)]
    monkeypatch.setitem(section.__annotations__, field, Literal[*known, name] | None)


def test_a_norm_takes_an_entry_and_a_module(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, ModelConfig, "normalization", "MeanNorm")
    monkeypatch.setitem(NORMS, "MeanNorm", NormSpec(bias=False, kept_inputs=1, kept_bytes=0))
    monkeypatch.setitem(norm.MODULES, "MeanNorm", MeanNorm)
    tensor = "--parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel True".split()
    one, two, usual = (
        runs.train(prepared, configured(tmp_path / name, *flags, "--model.normalization", kind), ranks)
        for name, flags, kind, ranks in (
            ("one", (), "MeanNorm", 1), ("two", tensor, "MeanNorm", 2), ("usual", (), "RMSNorm", 1)
        )
    )  # fmt: skip
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert [line["loss"] for line in usual] != pytest.approx([line["loss"] for line in one], rel=1e-5)
    counts = [
        num_parameters(resolve(configured(tmp_path, "--model.normalization", kind).model, 257))
        for kind in ("MeanNorm", "RMSNorm")
    ]
    assert counts[0] == counts[1]


def test_a_norm_that_transformer_engine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NORMS, "MeanNorm", NormSpec(bias=False, kept_inputs=1, kept_bytes=0))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.normalization = "MeanNorm"
    with pytest.raises(SharedMistake, match=r"MeanNorm: Transformer Engine has no such norm\. Use RMSNorm"):
        stack_spec(config, LocalSpecProvider(), TINY["llama2_tiny"])  # not ours, as Transformer Engine's is not


def test_an_activation_takes_an_entry(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "reglu", Activation(function=lambda: torch.relu, gated=True))
    allow(monkeypatch, ModelConfig, "activation", "reglu")
    config = configured(tmp_path, "--model.activation", "reglu")
    assert gpt._shape_settings(resolve(config.model, 257))["activation_func"] is torch.relu
    lines = runs.train(prepared, config, 1)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_schedule_takes_an_entry(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECAYS, "halves", lambda schedule, samples: schedule.lr * 0.5 ** (samples // 4))
    allow(monkeypatch, OptimizerConfig, "lr_decay_style", "halves")
    config = configured(tmp_path, "--optimizer.lr_warmup_iters", "0", "--optimizer.lr_decay_style", "halves")
    lr = config.optimizer.lr
    assert [line["learning_rate"] for line in runs.train(prepared, config, 1)] == [lr, lr / 2, lr / 4]
    assert (
        learning_schedule(config.optimizer, config.train, config.model.seq_length)
        .describe()
        .endswith("weight decay 0.1")
    )


def _with_metrics(
    prepared: Prepared, config: RunConfig, ranks: int, monkeypatch: pytest.MonkeyPatch, broken: int | None = None
) -> Any:
    """Train a model whose MLPs record: their output's largest element and mean, and its tokens.

    broken: the microbatch, counted over the run, whose first MLP gives NaN, and in which a second run gives none.
    """
    calls = itertools.count()
    build = train.build_parts

    def recording(*args: Any) -> Any:
        parts = build(*args)
        for chunk in parts.chunks:
            for module in chunk.modules():
                if isinstance(module, MLP):
                    module.register_forward_hook(record)
        return parts

    def record(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if next(calls) == broken:
            output = (output[0] * math.nan, *output[1:])
        metrics.record("toy/largest", output[0].abs().max(), reduce="max")
        metrics.record("toy/tokens", output[0].shape[0] * output[0].shape[1], reduce="sum")
        metrics.record("toy/mean", output[0].abs().mean())
        return output

    with monkeypatch.context() as patched:
        patched.setattr(train, "build_parts", recording)
        return runs.train(prepared, config, ranks)


@pytest.mark.parametrize(
    "flags",
    ["--train.recompute full:uniform:1", param("--parallel.pipeline_model_parallel_size 2"), param("")],
)
def test_a_metric_takes_a_line(flags: str, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts each token of a step once: over ranks and stages, and where activations are recomputed."""
    one = _with_metrics(prepared, configured(tmp_path / "one"), 1, monkeypatch)
    evaluated = ("--train.eval_interval", "1", "--train.eval_iters", "1")
    two = _with_metrics(prepared, configured(tmp_path / "two", *flags.split(), *evaluated), 2, monkeypatch)
    config = configured(tmp_path)
    blocks = resolve(config.model, 257).num_layers
    two = [line for line in two if "toy/tokens" in line]
    for first, second in zip(one, two, strict=True):
        assert first["toy/tokens"] == second["toy/tokens"] == 4 * config.model.seq_length * blocks
        assert 0 < first["toy/mean"] < first["toy/largest"]
        for name in ("toy/mean", "toy/largest"):
            assert second[name] == pytest.approx(first[name], rel=1e-4)


def test_a_replayed_step_counts_once(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path / "run", "--fault.nonfinite", "skip")
    blocks = resolve(config.model, 257).num_layers
    lines = _with_metrics(prepared, config, 1, monkeypatch, broken=4 * blocks)  # the second step's first
    assert "a passing fault of the hardware" in capfd.readouterr().out
    assert [line["toy/tokens"] for line in lines] == [4 * config.model.seq_length * blocks] * 3
    assert all(math.isfinite(line["toy/mean"]) for line in lines)


def _reported(identity: Identity, recorded: Callable[[int], None]) -> None:
    start = groups.start(Layout(dp=2), identity, device="cpu", seed=1)
    with start as ranks, metrics.collecting(ranks.device) as collector:
        recorded(ranks.rank)
        collector.report()


def test_a_name_has_one_reduction_on_all_ranks() -> None:
    with pytest.raises(AssertionError, match="a name has two reductions"):
        run_ranks(2, _reported, lambda rank: metrics.record("x", 1.0, reduce="max" if rank else "sum"))
    run_ranks(2, _reported, lambda rank: metrics.record("x", 1.0))


def test_a_recorded_name_is_none_of_the_others(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train.train_step
    monkeypatch.setattr(train, "train_step", lambda *a, **k: (metrics.record("loss", 1.0), step(*a, **k))[1])
    code, failure = runs.train_or_fail(prepared, configured(tmp_path / "run"), 1)
    assert code == 1 and failure is not None and "metrics.record: loss: every line has a number" in failure.text
