"""Compiled blocks: the same losses and gradients, one compilation for each kind of layer, and what runs as written."""

import dataclasses
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
from ranks import run_ranks
from tools.parity.layouts import shrink, with_layout
from training.cli import parse
from training.config.run_config import RunConfig
from training.metrics.compilation import take_compilations

BOUND = 1e-5
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def configured(layout: str, shape: str, packed: bool, **fields: Any) -> tuple[RunConfig, int]:
    """fields: of the section train, and "dropout" of the model."""
    config, dropout = parse.load(Path("slurm/recipes/debug.toml")), fields.pop("dropout", 0.0)
    return with_layout(
        shrink(
            dataclasses.replace(
                config,
                model=dataclasses.replace(
                    config.model, shape=shape, hidden_dropout=dropout, attention_dropout=dropout
                ),
                train=dataclasses.replace(config.train, **fields),
                data=dataclasses.replace(config.data, reset_attention_mask=packed, reset_position_ids=packed),
            ),
            num_layers=4,
        ),
        layout,
    )


def batches(config: RunConfig, ranks: groups.Ranks) -> list[Batch]:
    """Two, whose documents begin elsewhere, each with this rank's part of the sequence."""
    draw, size, found = torch.Generator().manual_seed(7), config.model.seq_length, []
    for ends in ((9, 30), (20, 21, 50)):
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


def compare(identity: Identity, config: RunConfig, world_size: int, most: int) -> None:
    """most: graphs of one rank, forward, that may be compiled; 0: any number."""
    with groups.start(
        config.layout(world_size), identity, device="cpu", seed=1, timeout_minutes=5, parallel=config.parallel
    ) as ranks:
        own = batches(config, ranks)
        torch.manual_seed(3)
        plain = sums_and_gradients(config, ranks, own)
        torch.manual_seed(3)
        train = dataclasses.replace(config.train, compile=True)
        found = sums_and_gradients(dataclasses.replace(config, train=train), ranks, own)
        compilations = [one for one in take_compilations() if one.operations]
        assert compilations
        assert not most or len(compilations) <= most, compilations
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert (found[name] - expected).abs().max() <= BOUND * expected.abs().max(), name


@pytest.mark.parametrize(
    ("layout", "shape", "packed", "fields", "most"),
    [
        ("", "debug", False, {}, 2),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("", "debug", False, {"dropout": 0.2}, 2),
                ("", "debug", False, FULL, 4),
                ("", "debug", False, {"recompute_granularity": "selective"}, 0),
                ("", "debug", False, {"cpu_offloading_num_layers": 2}, 2),
                ("", "debug", False, {"cross_entropy_chunk_tokens": 24}, 2),
                ("", "debug", False, {"deterministic_mode": True}, 2),
                ("", "debug", False, {"detect_anomaly": True}, 2),
                ("tp2", "debug", False, {}, 0),
                ("tp2sp", "debug", False, {}, 0),
                ("tp2sppp2", "debug", False, {"dropout": 0.2, **FULL}, 0),
                ("pp2", "debug", False, {}, 2),
                ("pp2vpp2", "debug", False, {}, 2),
                ("cp2", "debug", False, {}, 0),
                ("dp2zero3", "debug", False, {}, 2),
                ("dp2zero3", "debug", False, FULL, 4),
                ("", "debug", True, {}, 0),
                ("dp2zero3", "debug", True, {}, 0),
                ("ep2dp2", "mixtral_tiny", False, {}, 0),
                ("tp2spdp2ep2etp1", "mixtral_tiny", False, {}, 0),
                ("", "deepseek_v3_tiny", False, {}, 0),
                ("", "gpt2_tiny", False, {}, 2),
                ("", "gemma2_tiny", False, {}, 0),
                ("", "pythia_tiny", False, {}, 0),
                ("", "gpt_oss_tiny", False, {}, 0),
                ("", "mamba2_tiny", False, {}, 0),
                ("", "nemotron_h_tiny", True, {}, 0),
                ("", "qwen3_next_tiny", False, {}, 0),
            )
        ),
    ],
)
def test_the_same_losses_and_gradients(
    layout: str, shape: str, packed: bool, fields: dict[str, Any], most: int
) -> None:
    config, world_size = configured(layout, shape, packed, **fields)
    run_ranks(world_size, compare, config, world_size, most)
