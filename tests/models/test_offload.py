"""Activations that wait on the host: the same losses and gradients, and the block's own are let go."""

import contextlib
import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from data.loader import Batch
from gradients import VOCABULARY, sums_and_gradients
from models.layers import offload
from parallel import groups
from parallel.launch import Identity
from ranks import run_ranks
from tools.parity.layouts import shrink, with_layout
from training.cli import parse
from training.config.run_config import RunConfig

FULL = {"recompute": "full:uniform:1"}


def configured(layout: str, shape: str, **fields: Any) -> tuple[RunConfig, int]:
    config = parse.load(Path("slurm/recipes/debug.toml"))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, shape=shape),
        train=dataclasses.replace(config.train, **fields),
    )
    return with_layout(shrink(config, num_layers=4), layout)


def microbatches(config: RunConfig) -> int:
    """Two of each stage, so that each gives back one pass while it goes on with another."""
    return 2 * config.parallel.pipeline_model_parallel_size


def batches(config: RunConfig) -> list[Batch]:
    draw, size = torch.Generator().manual_seed(7), config.model.seq_length
    return [
        Batch(
            tokens=(tokens := torch.randint(VOCABULARY, (1, size), generator=draw)),
            labels=tokens.roll(-1, 1), loss_mask=torch.ones(1, size), position_ids=torch.arange(size)[None],
        )
        for _ in range(microbatches(config))
    ]  # fmt: skip


def compare(identity: Identity, config: RunConfig, world_size: int) -> None:
    with groups.start(config.layout(world_size), identity, device="cpu", seed=1, parallel=config.parallel) as ranks:
        plain = sums_and_gradients(config, ranks, batches(config))
        kept, real = list[offload._Kept](), offload._Layer.keep

        def counted(layer: offload._Layer, tensor: torch.Tensor) -> offload._Kept:
            kept.append(real(layer, tensor))
            return kept[-1]

        offload._Layer.keep = counted  # type: ignore[method-assign]
        moved = dataclasses.replace(config, train=dataclasses.replace(config.train, cpu_offloading_num_layers=1))
        found = sums_and_gradients(moved, ranks, batches(config))
        assert len(kept) >= microbatches(config)
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    ("layout", "shape", "fields"),
    [
        ("", "debug", {}),
        pytest.param("", "debug", FULL, marks=pytest.mark.campaign),
        ("tp2sp", "debug", {"recompute": "selective"}),
        ("pp2vpp2", "debug", {}),
        pytest.param("tp2sppp2", "debug", FULL, marks=pytest.mark.campaign),
        pytest.param("dp2zero3", "debug", {}, marks=pytest.mark.campaign),
        ("tp2spep2etp1", "mixtral_tiny", {}),
        pytest.param("", "deepseek_v3_tiny", {}, marks=pytest.mark.campaign),
        ("dp2zero3", "gpt2_tiny", FULL),
    ],
)
def test_the_same_losses_and_gradients(layout: str, shape: str, fields: dict[str, Any]) -> None:
    config, world_size = configured(layout, shape, **fields)
    run_ranks(world_size, compare, config, world_size)


def test_weights_and_what_shares_their_memory_stay() -> None:
    run_ranks(1, _weights_stay)


def test_what_has_left_is_let_go() -> None:
    run_ranks(1, _let_go)


def _let_go(identity: Identity) -> None:
    """Of a block's own result, which autograd wants again, nothing holds the memory once the next block begins; and of
    its copy on the host, once the backward pass has used it."""
    layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8)),
                                  torch.nn.Linear(8, 8)])  # fmt: skip
    own, between = offload.Offload([layers[0]], list(layers), torch.device("cpu"), 0), list[Any]()
    gc.disable()  # which would find cycles, some microbatches later

    def noted(_module: object, _inputs: object, output: torch.Tensor) -> None:
        between.append(weakref.ref(output.untyped_storage()))

    layers[0][1].register_forward_hook(noted)
    for blocks, is_held in ((own, False), (None, True)):
        with own.forward_pass() if blocks else contextlib.nullcontext():
            last = layers[1](layers[0](torch.randn(4, 8)))
        assert (between.pop()() is not None) == is_held
        copies = [one for one in gc.get_objects() if type(one) is offload._Kept]
        assert bool(copies) == (not is_held)
        copies.clear()
        last.sum().backward()
        assert not any(type(one) is offload._Kept for one in gc.get_objects())


def _weights_stay(identity: Identity) -> None:
    """Of two linear layers the first is offloaded: its input leaves; its weight and the other's input stay."""
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    own, saved = offload.Offload([layers[0]], list(layers), torch.device("cpu"), 0), list[torch.Tensor]()
    real = offload._Layer.keep

    def noted(layer: offload._Layer, tensor: torch.Tensor) -> offload._Kept:
        saved.append(tensor)
        return real(layer, tensor)

    offload._Layer.keep = noted  # type: ignore[method-assign]
    first = torch.randn(4, 8, requires_grad=True)
    with own.forward_pass():
        last = layers[1](layers[0](first))
    assert [tensor.data_ptr() for tensor in saved] == [first.data_ptr()]
    last.sum().backward()
