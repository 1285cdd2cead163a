"""What units at work hold beside the shards, by hand."""

import numpy as np
import pytest

from models.costs.candidate import Candidate
from models.costs.cases import MemoryCase, MemoryColumns
from models.costs.peak import stage_memory
from models.costs.program import OURS, sharded
from models.costs.sizes import sizes
from models.costs.states import BlockStack, gathered_bytes
from models.families import named


def gathered(name: str, layout: Candidate, stage: int = 0, *, at_the_loss: bool = False) -> float:
    shape = named(name)
    stack = BlockStack(shape)
    held, blocks = stack.held(layout, stage), stack.blocks(layout)[stage]
    case = MemoryCase(model=sizes(shape, 4096), layout=layout, software=sharded(OURS, layout.zero))
    one = np.ones(1)
    parts = held.dense * one, held.expert * one
    found = gathered_bytes(MemoryColumns([case]), stage * one, parts, blocks.plain + blocks.mixtures * one)
    return float((found.at_the_loss if at_the_loss else found.at_work)[0])


TABLE = 128256 * 4096
BLOCK = (8_030_261_248 - 2 * TABLE) / 32


@pytest.mark.parametrize(
    ("layout", "stage", "expected"),
    [
        # Whole weights, the next block's buffer and gradients, in 16 bits; the output layer's gradients in fp32.
        (Candidate(dp=8, zero=3), 0, 6 * BLOCK + 4 * TABLE),
        (Candidate(dp=8, zero=2), 0, 2 * BLOCK + 4 * TABLE),  # weights are counted as such, and not gathered again
        (Candidate(dp=4, pp=2, zero=3), 0, 10 * BLOCK),  # another block's gradients
        # The output layer and its gradient, beside the last block's buffer, are more than that.
        (Candidate(dp=8, zero=3, precision="fp32"), 0, 4 * BLOCK + 8 * TABLE),
        (Candidate(dp=8, zero=1), 0, 0),
    ],
    ids=str,
)
def test_units_of_llama(layout: Candidate, stage: int, expected: float) -> None:
    assert gathered("llama3_8b", layout, stage) == pytest.approx(expected, rel=1e-3)


def test_no_gradients_of_blocks_are_there_while_the_loss_is_computed() -> None:
    """The output layer and its gradient, beside the last block's buffer; nothing is added up with a later moment."""
    layout = Candidate(dp=8, zero=3)
    assert gathered("llama3_8b", layout, at_the_loss=True) == pytest.approx(4 * TABLE + 2 * BLOCK, rel=1e-3)
    shape, one = named("llama3_8b"), np.ones(1)
    parts = []
    for zero in (1, 3):
        layout = Candidate(dp=64, zero=zero, microbatches=2)  # type: ignore[arg-type]
        case = MemoryCase(model=sizes(shape, 8192), layout=layout, software=sharded(OURS, zero))
        found = stage_memory(MemoryColumns([case]), [BlockStack(shape)], [layout], [0])
        parts.append(found.activations)
    assert parts[1] - parts[0] == pytest.approx((4 * TABLE + 2 * BLOCK) * one, rel=1e-3)


def test_tied_embeddings_stay_whole() -> None:
    """Weight and gradient, in 16 bits, until the backward pass ends."""
    tied, table = gathered("llama32_1b", Candidate(dp=8, zero=3)), 128256 * 2048
    block = (1_235_814_400 - table) / 16
    assert tied == pytest.approx(10 * block + 4 * table, rel=1e-3)


def test_casts_of_experts_stay_with_each_microbatch_unless_computed_again() -> None:
    layout = Candidate(dp=8, pp=4, ep=8, zero=3, microbatches=8, precision="fp8")
    wide = Candidate(dp=8, pp=4, ep=8, zero=3, microbatches=8)
    again = Candidate(dp=8, pp=4, ep=8, zero=3, microbatches=8, precision="fp8", recompute="moe")
    expert = BlockStack(named("mixtral_8x7b")).held(layout, 0).expert
    assert gathered("mixtral_8x7b", layout) - gathered("mixtral_8x7b", wide) == pytest.approx(2 * expert * 4, rel=1e-3)
    assert gathered("mixtral_8x7b", again) == gathered("mixtral_8x7b", wide)
