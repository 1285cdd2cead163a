"""Compiled blocks: the same losses and gradients, one compilation for each kind of layer, and what runs as written."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data.loader import Batch, document_starts
from gradients import VOCABULARY, sums_and_gradients
from models.layers import compiled
from models.layers.compiled import Compiler, as_written
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from parallel.random_states import set_tracked_states, tracked_states
from program.errors import UserError
from ranks import run_ranks
from tools.parity.layouts import shrink, with_layout
from training.cli import parse
from training.config.run_config import RunConfig
from training.metrics.compilation import take_compilations
from training.parts.determinism import set_debugging

BOUND = 1e-5
FULL = {"recompute": "full:uniform:1"}


def configured(layout: str, shape: str, packed: bool, **fields: Any) -> tuple[RunConfig, int]:
    """fields: of the section train, and "dropout" of the model."""
    config, dropout = parse.load(Path("slurm/recipes/debug.toml")), fields.pop("dropout", 0.0)
    shrunk = shrink(dataclasses.replace(config, model=dataclasses.replace(config.model, shape=shape)), num_layers=4)
    changed = dataclasses.replace(
        shrunk,
        model=dataclasses.replace(shrunk.model, hidden_dropout=dropout, attention_dropout=dropout),
        train=dataclasses.replace(shrunk.train, **fields),
        data=dataclasses.replace(shrunk.data, reset_attention_mask=packed, reset_position_ids=packed),
    )
    return with_layout(changed, layout)


def batches(config: RunConfig, ranks: groups.Ranks) -> list[Batch]:
    """Two, whose documents begin elsewhere, each with this rank's part of the sequence."""
    draw, size, found = torch.Generator().manual_seed(7), config.model.seq_length // ranks.layout.cp, []
    for ends in ((9, 15), (20, 21, 30)):
        tokens = torch.randint(VOCABULARY, (1, size), generator=draw)
        tokens[0, list(ends)] = 0
        packed = config.data.reset_attention_mask
        starts = document_starts(tokens, 0) if packed else None
        batch = Batch(
            tokens=tokens, labels=tokens.roll(-1, 1), loss_mask=torch.ones(1, size),
            position_ids=torch.arange(size)[None], starts=starts,
        )  # fmt: skip
        found.append(batch)
    return found


def compare(identity: Identity, config: RunConfig, world_size: int, most: int, backend: str = "inductor") -> None:
    """most: graphs of one rank, forward, that may be compiled: as many as this machine saw, for four blocks."""
    compiled.Compiler = partial(Compiler, backend=backend)  # type: ignore[misc, assignment]
    with groups.start(config.layout(world_size), identity, device="cpu", seed=1, parallel=config.parallel) as ranks:
        set_debugging(config.train)
        own = batches(config, ranks)
        tracked, drawn = tracked_states(), torch.get_rng_state()
        plain = sums_and_gradients(config, ranks, own)
        set_tracked_states(tracked)
        torch.set_rng_state(drawn)
        train = dataclasses.replace(config.train, compile=True)
        found = sums_and_gradients(dataclasses.replace(config, train=train), ranks, own)
        compilations = [one for one in take_compilations() if one.operations]
        assert compilations
        assert len(compilations) <= most, (len(compilations), compilations)
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert (found[name] - expected).abs().max() <= BOUND * expected.abs().max(), name


@pytest.mark.campaign
def test_the_same_losses_and_gradients_before_inductor() -> None:
    """As tests/gpu_path/test_compiled.py has it in the suite; with weights in shards: tests/test_layouts.py."""
    config, world_size = configured("", "debug", packed=False)
    run_ranks(world_size, compare, config, world_size, 2, "aot_eager")


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("layout", "shape", "packed", "fields", "most"),
    [
        ("", "debug", False, {}, 2),
        ("", "debug", False, {"dropout": 0.2}, 7),
        ("", "debug", False, FULL, 4),
        ("", "debug", False, {"recompute": "selective"}, 8),
        ("", "debug", False, {"cpu_offloading_num_layers": 2}, 2),
        ("", "debug", False, {"cross_entropy_chunk_tokens": 24}, 2),
        ("", "debug", False, {"deterministic_mode": True}, 2),
        ("", "debug", False, {"detect_anomaly": True}, 2),
        ("tp2", "debug", False, {}, 13),
        ("tp2sp", "debug", False, {}, 16),
        ("tp2sppp2", "debug", False, {"dropout": 0.2, **FULL}, 32),
        ("pp2", "debug", False, {}, 2),
        ("pp2vpp2", "debug", False, {}, 2),
        ("cp2", "debug", False, {}, 9),
        ("dp2zero3", "debug", False, {}, 2),
        ("dp2zero3", "debug", False, FULL, 4),
        ("", "debug", True, {}, 6),
        ("dp2zero3", "debug", True, {}, 6),
        ("ep2dp2", "mixtral_tiny", False, {}, 3),
        ("tp2spdp2ep2etp1", "mixtral_tiny", False, {}, 12),
        ("", "deepseek_v3_tiny", False, {}, 11),
        ("", "gpt2_tiny", False, {}, 2),
        ("", "gemma2_tiny", False, {}, 9),
        ("", "pythia_tiny", False, {}, 2),
        ("", "gpt_oss_tiny", False, {}, 10),
        ("", "mamba2_tiny", False, {}, 1),
        ("", "nemotron_h_tiny", True, {}, 7),
        ("", "qwen3_next_tiny", False, {}, 4),
    ],
)
def test_the_same_losses_and_gradients(
    layout: str, shape: str, packed: bool, fields: dict[str, Any], most: int
) -> None:
    config, world_size = configured(layout, shape, packed, **fields)
    run_ranks(world_size, compare, config, world_size, most)


class Layer(nn.Module):
    """As a layer of a stack is called; [s, b, 8] -> the same."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.outer(torch.tanh(self.inner(hidden_states)))


def test_layers_of_a_kind_are_compiled_once_and_what_differs_is_named() -> None:
    run_ranks(1, _kinds)


def _kinds(identity: Identity) -> None:
    """Without Inductor: it has no part in this."""
    same, other = [Layer() for _ in range(12)], Layer(4)
    names = list(same[0].state_dict())
    Compiler(torch.device("cpu"), backend="aot_eager").compile([*same, other])
    assert list(same[0].state_dict()) == names
    for length, of, compiled_now in ((4, same, 1), (4, [other], 1), (6, same, 1), (7, same, 0)):
        hidden = torch.randn(length, 2, 8)
        for layer in of:
            expected = Layer.forward(layer, hidden)
            assert torch.equal(layer(hidden), expected)
        found = take_compilations()
        assert len(found) == compiled_now, found
        causes = [one.cause for one in found]
        if length == 6:  # and from then on any
            assert causes == ["tensor 'hidden_states' size mismatch at index 0. expected 4, actual 6"]


def test_what_is_added_later_is_seen_and_as_written_compiles_nothing() -> None:
    run_ranks(1, _seen)


def _seen(identity: Identity) -> None:
    layer, seen = Layer(), list[int]()
    chunk = nn.Sequential(layer)
    Compiler(torch.device("cpu"), backend="aot_eager").compile([layer])
    hidden = torch.randn(4, 1, 8)
    expected = Layer.forward(layer, hidden)
    with as_written([chunk]):
        assert not compiled.is_compiled(layer)
        assert torch.equal(chunk(hidden), expected)
    assert take_compilations() == []
    assert compiled.is_compiled(layer)
    assert torch.equal(chunk(hidden), expected)
    assert len(take_compilations()) == 1
    transposed = hidden.view(1, 4, 8).transpose(0, 1)  # as an embedding's: the same memory, other strides
    assert transposed.stride() != hidden.stride()
    assert torch.equal(chunk(transposed), expected)
    assert take_compilations() == []
    layer.inner.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(chunk(hidden), expected)
    assert seen == [1]


@pytest.mark.campaign
def test_the_c_compiler_of_a_cpu_is_used() -> None:
    """Inductor, in a forked rank, forward and backward; the suite's: tests/gpu_path/test_compiled.py."""
    run_ranks(1, _fused)


def _fused(identity: Identity) -> None:
    with groups.start(Layout(), identity, device="cpu", seed=1) as ranks:
        layer, hidden = Layer(), torch.randn(4, 1, 8)
        Layer.forward(layer, hidden).square().sum().backward()
        expected = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        Compiler(ranks.device).compile([layer])
        layer(hidden).square().sum().backward()
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=BOUND, atol=BOUND)
        from torch._inductor import metrics

        assert metrics.generated_kernel_count


def test_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    run_ranks(1, _refused)


def _refused(identity: Identity) -> None:
    with pytest.raises(
        UserError, match=r"needs a C\+\+ compiler on a CPU: found none on .* \(looked for \S+\)\. Install g\+\+"
    ):
        Compiler(torch.device("cpu"))
