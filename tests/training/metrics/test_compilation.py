"""What a run says and logs of torch.compile."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data.prepared import Prepared
from models.layers.compiled import Compiler
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from ranks import run_ranks
from runs import configuration, losses, train
from training.metrics.compilation import CompilationMeter
from training.metrics.values import curves
from training.progress import Progress


class Layer(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.sin() + hidden_states


def test_recompilations_of_any_rank_are_counted_and_named(tmp_path: Path) -> None:
    run_ranks(2, _counted, tmp_path / "said")


def _counted(identity: Identity, said: Path) -> None:
    """Rank 1 alone meets another size."""
    torch.compile(lambda x: x.cos() * 2, backend="eager")(torch.ones(2))  # by this process, before the run
    console = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if identity.rank == 0 else None
    with groups.start(Layout(dp=2), identity, device="cpu", seed=1, console_fd=console) as ranks:
        layer, events = Layer(), list[str]()
        Compiler(ranks.device, backend="aot_eager").compile([layer])
        meter = CompilationMeter(ranks, lambda event, *_, **__: events.append(event))
        meter.start(Progress())
        for iteration, length in enumerate((4, 4, 4 + 2 * ranks.rank), start=1):
            layer(torch.randn(length, 1, 8))
            meter.after_step(Progress(iteration=iteration, consumed_samples=0), None)  # type: ignore[arg-type]
            if iteration == 2:
                assert meter.report() == {"recompilations": 0}
        found: Any = meter.report()
        assert found["recompilations"] == 1
        ((name, times),) = found["recompiled"].items()
        assert times == 1
        assert name.startswith("forward (test_compilation.py:")
        assert name.endswith("): tensor 'hidden_states' size mismatch at index 0. expected 4, actual 6")
        assert list(curves(found, 8)) == [("recompilations", 1)]
        assert events == ["compiled", "recompiled"]
        assert meter.report() == {"recompilations": 0}
    if ranks.rank == 0:
        before, after, recompiled = said.read_text().splitlines()
        assert before.startswith("train.compile: the first step compiles each kind of block, for a minute or more")
        assert " s of the first step went into compiling 1 graphs of 2 operations" in after
        assert recompiled == f"train.compile: 1 recompilations since the last line: 1 x {name}"


@pytest.mark.campaign
def test_a_run_of_compiled_blocks_and_one_that_goes_on_without(prepared: Prepared, tmp_path: Path) -> None:
    flags = (
        *("--train.train_iters", "4", "--log.log_interval", "1", "--train.eval_interval", "2"),
        *("--train.eval_iters", "1", "--train.generate_tokens", "40", "--train.sample_interval", "2"),
    )
    plain = train(prepared, configuration(tmp_path / "plain", *flags), 2)
    for first, second in (("True", "False"), ("False", "True")):
        run = tmp_path / first
        train(prepared, configuration(run, *flags, "--train.compile", first, "--train.exit_interval", "2"), 2)
        metrics = train(prepared, configuration(run, *flags, "--train.compile", second), 2)
        assert losses(metrics) == pytest.approx(losses(plain), rel=1e-5)
        counted = [line["recompilations"] for line in metrics if "recompilations" in line]
        assert counted == [0, 0]
