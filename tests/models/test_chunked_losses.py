"""Losses of a few tokens at a time are those of all at once: of each parameter the same gradient, in any layout."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from campaign import some
from data.loader import Batch, document_starts
from gradients import VOCABULARY, sums_and_gradients
from models.layers import chunked_losses
from parallel import groups
from parallel.launch import Identity
from ranks import run_ranks
from tools.parity.layouts import shrink, with_layout
from training.cli import parse
from training.config.run_config import RunConfig

RECIPE = "slurm/recipes/debug.toml"
SAMPLES, MICROBATCHES = 2, 2
HEADS = ("0.output_layer.weight", "1.output_layer.weight", "0.embedding.word_embeddings.weight")
"""By chunk. In bf16 their gradients are the one difference: sums of pieces that a product of all tokens rounds once."""
PIECE = 24
"""Tokens: with two samples 12 rows, which do not divide a sequence of 64."""


def configured(layout: str, packed: bool = False, num_layers: int = 2, **model: Any) -> tuple[RunConfig, int]:
    config = parse.load(Path(RECIPE))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=SAMPLES))
    apart = dict.fromkeys(("reset_attention_mask", "reset_position_ids"), packed)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **apart))
    return with_layout(shrink(config, num_layers=num_layers), layout)


def in_pieces(config: RunConfig, tokens: int | None) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, cross_entropy_chunk_tokens=tokens))


def batches(config: RunConfig, ranks: groups.Ranks) -> list[Batch]:
    """The same one several times, masked here and there."""
    size = config.model.seq_length // ranks.layout.cp
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (SAMPLES, size + 1), generator=draw)
    mask = (torch.rand(SAMPLES, size, generator=draw) < 0.8).float()
    own = Batch(
        tokens=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), loss_mask=mask,
        position_ids=torch.arange(size)[None].expand(SAMPLES, -1),
        starts=document_starts(tokens[:, :-1], 3) if config.data.reset_attention_mask else None,
    )  # fmt: skip
    return [own] * MICROBATCHES


def compare(identity: Identity, config: RunConfig, world_size: int) -> None:
    with groups.start(config.layout(world_size), identity, device="cpu", seed=1, parallel=config.parallel) as ranks:
        whole = sums_and_gradients(in_pieces(config, None), ranks, batches(config, ranks))
        calls: list[int] = []
        real = chunked_losses.ChunkedHead._piece

        def counted(head: Any, losses: Any, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            calls.append(hidden.shape[0])
            return real(head, losses, hidden, *rest)

        chunked_losses.ChunkedHead._piece = counted  # type: ignore[method-assign]
        pieces = sums_and_gradients(in_pieces(config, PIECE), ranks, batches(config, ranks))
        size = config.model.seq_length // ranks.layout.cp
        depths = 1 + (config.model.mtp_num_layers or 0)
        if ranks.is_last_stage:
            assert (
                len(calls) == 2 * MICROBATCHES * depths * -(-size // (PIECE // SAMPLES))
                and max(calls) == PIECE // SAMPLES
            )
        assert whole.keys() == pieces.keys()
        for name, expected in whole.items():
            tolerance = 1e-6 * float(expected.abs().max())
            if config.precision.dtype == "bf16" and name in HEADS:
                assert (pieces[name] - expected).norm() < 2**-8 * expected.norm()
            else:
                torch.testing.assert_close(pieces[name], expected, rtol=1e-6, atol=tolerance)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("tp2", {}),
    ("tp2sp", {"untie_embeddings_and_output_weights": False}),
    ("pp2vpp2", {"num_layers": 4}),
    ("cp2", {}),
    ("tp2sppp2", {"mtp_num_layers": 1}),
    ("pp2", {"mtp_num_layers": 2, "untie_embeddings_and_output_weights": False}),
    ("dp2zero3", {"mtp_num_layers": 1}),
    ("tp2", {"packed": True}),
    ("tp2sp", {"final_logit_softcapping": 2.0, "logits_scaling": 3.0, "embedding_multiplier": 2.0}),
]


EACH = [(*case, "fp32") for case in CASES] + [(*CASES[number], "bf16") for number in (2, 7, 8)]


@pytest.mark.parametrize(("layout", "model", "dtype"), some(EACH, [EACH[number] for number in (3, 4, 6, 7, 8, 9, 10)]))
def test_the_same_losses_and_gradients(layout: str, model: dict[str, Any], dtype: Literal["fp32", "bf16"]) -> None:
    config, world_size = configured(layout, **model)
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype=dtype))
    run_ranks(world_size, compare, config, world_size)


def test_in_16_bits_the_weights_gradient_is_as_near_to_the_true_one() -> None:
    """Of 64 pieces: their sum in 16 bits would be 15 % farther."""
    run_ranks(1, in_16_bits)


def in_16_bits(identity: Identity) -> None:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 2, 64, generator=draw, dtype=torch.float64)
    weight = torch.randn(257, 64, generator=draw, dtype=torch.float64)
    labels, upstream = torch.randint(257, (2, 256), generator=draw), torch.rand(2, 256, generator=draw)

    def piece(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide.permute(1, 2, 0), labels, reduction="none")

    def gradients(dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = [tensor.to(torch.bfloat16).to(dtype).requires_grad_() for tensor in (hidden, weight)]
        losses = chunked_losses._InPieces.apply(*own, labels, piece, rows)
        (losses * upstream.to(losses.dtype)).sum().backward()
        return own[0].grad, own[1].grad  # type: ignore[return-value]

    true, whole, pieces = gradients(torch.float64, 256), gradients(torch.bfloat16, 256), gradients(torch.bfloat16, 4)
    assert torch.equal(pieces[0], whole[0])
    far = [float((found.double() - true[1]).norm() / true[1].norm()) for found in (whole[1], pieces[1])]
    assert far[1] < 1.1 * far[0] < 1e-2, far
