"""What Transformer Engine's modules keep of a block, tensor by tensor, against the formulas. No GPU has counted these:
published runs that fitted have (tests/planner)."""

import pytest

from models.costs.activations import block_bytes
from models.costs.candidate import Candidate
from models.costs.cases import MemoryCase, MemoryColumns
from models.costs.program import AS_OURS, OURS, Published
from models.costs.sizes import sizes
from models.families import named

SEQ = 4096


def kept(name: str, precision: str, *, experts: bool = False, published: Published = AS_OURS) -> float:
    """Bytes of a block for each token, of one rank alone."""
    layout = Candidate(precision=precision)
    columns = MemoryColumns(
        [MemoryCase(model=sizes(named(name), SEQ), layout=layout, software=OURS, published=published)]
    )
    return float(block_bytes(columns, experts=experts).kept[0]) / SEQ


@pytest.mark.parametrize(
    ("precision", "read", "again"), [("bf16", 2, 0), ("fp8", 1, 1), ("mxfp8", 1 + 1 / 32, 0), ("nvfp4", 9 / 16, 0)]
)
def test_a_dense_block_keeps_what_its_products_read_as_they_read_it(precision: str, read: float, again: int) -> None:
    """read: bytes of an element that a product has read. again: attention's output a second time, in fp8."""
    hidden, keys, ffn, heads = 4096, 1024, 14336, 32
    norms = 2 * (2 * hidden + read * hidden)
    attention = 2 * (hidden + 2 * keys) + (2 + again) * hidden + 4 * heads
    mlp = 2 * 2 * ffn + read * ffn
    assert kept("llama3_8b", precision) == pytest.approx(norms + attention + mlp)


@pytest.mark.parametrize(("precision", "read", "again"), [("bf16", 2, 0), ("fp8", 1, 1), ("mxfp8", 1 + 1 / 32, 0)])
def test_experts_keep_neither_their_output_nor_a_second_copy(precision: str, read: float, again: int) -> None:
    hidden, queries, keys, heads, experts, topk, ffn = 2048, 4096, 512, 32, 128, 8, 768
    norms = 2 * (2 * hidden + read * hidden)
    normed = 2 * (queries + keys)  # what the norms of queries and keys have read
    attention = 2 * (queries + 2 * keys) + normed + (2 + again) * queries + 4 * heads
    mixture = topk * (read * hidden + 2 * 2 * ffn + read * ffn) + 2 * 4 * experts
    assert kept("qwen3_30b_a3b", precision, experts=True) == pytest.approx(norms + attention + mixture)


def test_what_is_computed_again_is_not_kept() -> None:
    hidden, topk, ffn = 2048, 8, 768
    whole = kept("qwen3_30b_a3b", "mxfp8", experts=True)
    norms = kept("qwen3_30b_a3b", "mxfp8", experts=True, published=Published(recomputes_norms=True))
    assert whole - norms == pytest.approx(2 * hidden * 33 / 32)
    activation = Published(recomputes_expert_activation=True)
    assert whole - kept("qwen3_30b_a3b", "mxfp8", experts=True, published=activation) == pytest.approx(
        topk * ffn * 33 / 32
    )
    queries, values = 128 * 192, 128 * 128
    latents = kept("deepseek_v3", "bf16", experts=True) - kept(
        "deepseek_v3", "bf16", experts=True, published=Published(recomputes_latents=True)
    )
    assert latents == pytest.approx(2 * (2 * queries + values))
