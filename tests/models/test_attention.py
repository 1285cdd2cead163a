"""Attention in blocks against a dense mask in float64: windows, documents, context parallelism, dropout, memory."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from campaign import some
from models.config import ModelConfig
from models.layers.blockwise_attention import AttentionMask, QueryBlock, Softmax, attend_in_blocks
from models.layers.chunked import Temperature
from models.layers.documents import Documents
from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from ranks import run_ranks

STARTS = [[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1]]
"""Two samples, in sixths of their length."""


def starts_of(length: int) -> Tensor:
    """Where documents start: [2, length] int64, from 2 to 3 documents a sample, which end inside of blocks."""
    rows = [[STARTS[sample][6 * at // length] * length // 6 for at in range(length)] for sample in range(2)]
    return torch.tensor(rows)


def inputs(length: int, heads: int = 4, groups: int = 2) -> list[Tensor]:
    """Query, key, value [length, 2, heads or groups, 8], and a gradient of the output [2, heads, length, 8]."""
    draw = torch.Generator().manual_seed(length)
    sizes = [(length, 2, heads, 8), (length, 2, groups, 8), (length, 2, groups, 8), (2, heads, length, 8)]
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


def dense(
    query: Tensor, key: Tensor, value: Tensor, left: int | None, starts: Tensor | None, softcap: float = 0.0
) -> Tensor:
    """[2, heads, t, 8] by softmax over all t x t scores."""
    t, heads = query.shape[0], query.shape[2]
    key, value = (tensor.repeat_interleave(heads // key.shape[2], dim=2) for tensor in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / query.shape[-1] ** 0.5
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    row, column = torch.arange(t)[:, None], torch.arange(t)
    hidden = column > row
    if left is not None:
        hidden = hidden | (column < row - left)
    hidden = hidden.expand(2, 1, t, t)
    if starts is not None:
        hidden = hidden | (column < starts[:, None, :, None])
    return torch.einsum("bnst,tbnd->bnsd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def with_gradients(output: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).abs().max().item() < 1e-12


def restarting(starts: Tensor) -> Documents:
    """Of whole samples, in which positions restart."""
    return Documents(starts, torch.arange(starts.shape[1]) - starts)


# ---- blocks against a dense mask


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left", [None, 0, 5, 20, 100])
@pytest.mark.parametrize("groups", [1, 4])
def test_blocks_are_dense_attention(left: int | None, packed: bool, groups: int) -> None:
    """37 tokens in blocks of 8, output and all gradients."""
    *leaves, grad = inputs(37, groups=groups)
    for leaf in leaves:
        leaf.requires_grad_()
    starts = starts_of(37) if packed else None
    sight = AttentionMask(left=left, documents=restarting(starts) if starts is not None else None)
    output = attend_in_blocks(*leaves, sight, block_rows=8)
    assert_same(with_gradients(output, leaves, grad), with_gradients(dense(*leaves, left, starts), leaves, grad))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left", [None, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_pieces_of_a_sample_see_what_is_before_them(rank: int, left: int | None, packed: bool) -> None:
    """The two zigzag pieces of 11 of 44 tokens, in blocks of 4."""
    query, key, value, _ = inputs(44)
    starts = starts_of(44) if packed else None
    pieces = (rank * 11, (3 - rank) * 11)
    rows = torch.cat([torch.arange(start, start + 11) for start in pieces])
    documents = None if starts is None else Documents(starts[:, rows], rows - starts[:, rows], 2)
    sight = AttentionMask(left=left, documents=documents)
    output = attend_in_blocks(query[rows], key, value, sight, pieces=pieces, block_rows=4)
    assert_same([output], [dense(query, key, value, left, starts)[:, :, rows]])


def test_a_scale_of_ones_own() -> None:
    query, key, value, _ = inputs(20)
    output = attend_in_blocks(query, key, value, AttentionMask(left=5), Softmax(scale=0.7), block_rows=8)
    assert_same([output], [dense(query * 0.7 * 8**0.5, key, value, 5, None)])


# ---- one more logit in each head's softmax


def dense_with_sink(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, left: int | None, starts: Tensor | None
) -> Tensor:
    """As ``dense``, with one more key, which scores ``sink`` with every query and whose value is 0."""
    t, heads = query.shape[0], query.shape[2]
    key, value = (tensor.repeat_interleave(heads // key.shape[2], dim=2) for tensor in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / query.shape[-1] ** 0.5
    row, column = torch.arange(t)[:, None], torch.arange(t)
    hidden = (column > row) | (column < row - (t if left is None else left))
    hidden = hidden.expand(2, 1, t, t) if starts is None else hidden | (column < starts[:, None, :, None])
    more = sink.view(1, -1, 1, 1).expand(2, -1, t, 1)
    weights = torch.cat([scores.masked_fill(hidden, -torch.inf), more], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bnst,tbnd->bnsd", weights, value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left", [None, 5])
def test_a_sink_takes_weight_from_all_tokens(left: int | None, packed: bool) -> None:
    """Output and all gradients, the sink's among them; scores are in fp32 here."""
    *leaves, grad = inputs(37)
    leaves.append(torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64))
    for leaf in leaves:
        leaf.requires_grad_()
    starts = starts_of(37) if packed else None
    sight = AttentionMask(left=left, documents=restarting(starts) if starts is not None else None)
    query, key, value, sink = leaves
    ours = with_gradients(attend_in_blocks(query, key, value, sight, sink=sink, block_rows=8), leaves, grad)
    expected = with_gradients(dense_with_sink(*leaves, left, starts), leaves, grad)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("left", [None, 5])
def test_scores_have_a_soft_cap(left: int | None) -> None:
    """Output and all gradients; scores are in fp32 here. A cap of 1 changes most of them."""
    *leaves, grad = inputs(37)
    for leaf in leaves:
        leaf.requires_grad_()
    output = attend_in_blocks(*leaves, AttentionMask(left=left), Softmax(softcap=1.0), block_rows=8)
    expected = with_gradients(dense(*leaves, left, None, softcap=1.0), leaves, grad)
    for mine, theirs in zip(with_gradients(output, leaves, grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert (output - dense(*leaves, left, None)).abs().max() > 0.1


# ---- chunks, and queries that grow (Llama 4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_a_query_sees_its_own_chunk_of_its_document(chunk: int, packed: bool) -> None:
    """A chunk is a document that begins at a multiple of its length: output and all gradients, in blocks of 8."""
    *leaves, grad = inputs(37)
    for leaf in leaves:
        leaf.requires_grad_()
    starts, positions = starts_of(37) if packed else torch.zeros(2, 37, dtype=torch.int64), torch.arange(37)
    chunks = positions - (positions - starts) % chunk
    sight = AttentionMask(chunk=chunk, documents=restarting(starts) if packed else None)
    output = attend_in_blocks(*leaves, sight, block_rows=8)
    assert_same(with_gradients(output, leaves, grad), with_gradients(dense(*leaves, None, chunks), leaves, grad))


def test_a_block_gets_the_keys_of_its_chunk_only() -> None:
    assert [block.keys for block in AttentionMask(chunk=12).blocks([0], 24, 8)] == [
        slice(0, 8), slice(0, 16), slice(12, 24)
    ]  # fmt: skip


def test_queries_grow_with_their_position() -> None:
    """arXiv:2501.19399: a step after 3, 7, 11, ... tokens, where floor_scale is 4; one later in Ministral 3."""
    query = torch.ones(9, 1, 2, 3)
    for first, steps in ((1, [0, 0, 0, 1, 1, 1, 1, 2, 2]), (0, [0, 0, 0, 0, 1, 1, 1, 1, 2])):
        grown = Temperature(scale=0.5, floor=4, first=first).apply(query, torch.arange(9)[:, None])
        torch.testing.assert_close(grown[:, 0, 0, 0], 1 + 0.5 * torch.log1p(torch.tensor(steps).float()))


# ---- which keys a block needs


def test_a_block_gets_the_keys_of_its_window_and_documents_only() -> None:
    starts = torch.tensor([[0] * 10 + [10] * 14, [0] * 3 + [3] * 21])
    assert list(AttentionMask(left=4).blocks([0], 24, 8)) == [
        QueryBlock(slice(0, 8), 0, slice(0, 8)),
        QueryBlock(slice(8, 16), 8, slice(4, 16)),
        QueryBlock(slice(16, 24), 16, slice(12, 24)),
    ]
    packed = AttentionMask(documents=restarting(starts))
    assert [block.keys for block in packed.blocks([0], 24, 8)] == [slice(0, 8), slice(0, 16), slice(3, 24)]
    both = AttentionMask(left=15, documents=restarting(starts))
    assert [block.keys.start for block in both.blocks([0], 24, 8)] == [0, 0, 3]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.untyped_storage().nbytes() // part.element_size())
        return result


@pytest.mark.parametrize("window", [True, False], ids=["window", "documents"])
def test_no_mask_has_as_many_elements_as_the_sequence_squared(window: bool) -> None:
    """2,048 tokens, forward and backward; a window of 256 costs masks of 512 x 768. Nor does autograd keep any mask."""
    s = 2048
    leaves = [torch.randn(s, 1, 2, 16, requires_grad=True) for _ in range(3)]
    sight = (
        AttentionMask(left=256) if window else AttentionMask(documents=restarting(torch.zeros(1, s, dtype=torch.int64)))
    )
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = attend_in_blocks(*leaves, sight)
        output.sum().backward()
    assert largest.elements <= 512 * (768 if window else s)
    assert sum(kept) <= 3 * s * 2 * 16


# ---- dropout


def test_the_backward_pass_drops_what_the_forward_pass_dropped() -> None:
    """The output is linear in the values: output . grad = values . their gradient, if the same weights were dropped."""
    query, key, value, grad = inputs(37)
    value.requires_grad_()
    torch.manual_seed(1)
    output = attend_in_blocks(query, key, value, AttentionMask(left=20), Softmax(dropout=0.5), block_rows=8)
    after = torch.rand(1)
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    output.backward(grad)
    assert value.grad is not None
    assert (output * grad).sum().item() == pytest.approx((value * value.grad).sum().item(), rel=1e-12)
    assert torch.equal(torch.rand(1), expected)  # nothing was drawn from the generator that others use
    torch.manual_seed(1)
    assert not torch.equal(torch.rand(1), after)
    assert (output - dense(query, key, value, 20, None)).abs().max().item() > 0.1


# ---- context parallelism


def _over_context(identity: Identity, cp: int, left: int | None, packed: bool) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from models.layers.attention import SDPAttention
    from parallel import groups
    from training.batches import zigzag

    layout = layout_of(ParallelConfig(context_parallel_size=cp), cp)
    with groups.start(layout, identity, device="cpu", seed=1) as ranks:
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
            context_parallel_size=cp, window_size=(left, 0) if left else None,
        )  # fmt: skip
        core = SDPAttention(config, 1, AttnMaskType.causal, "self", pg_collection=ranks.pgs)
        *leaves, grad = inputs(40)
        for leaf in leaves:
            leaf.requires_grad_()
        starts = starts_of(40) if packed else None
        whole = dense(*leaves, left, starts).permute(2, 0, 1, 3).reshape(40, 2, -1)
        grad = grad.permute(2, 0, 1, 3).reshape(40, 2, -1)
        expected = with_gradients(whole, leaves, grad)

        def mine(tensor: Tensor) -> Tensor:
            return zigzag(tensor.transpose(0, 1), cp, ranks.at.cp).transpose(0, 1).detach()

        local = [mine(leaf).requires_grad_() for leaf in leaves]
        documents = None
        if starts is not None:
            documents = Documents(*(zigzag(one, cp, ranks.at.cp) for one in (starts, torch.arange(40) - starts)), cp)
        output = core(*local, None, attn_mask_type=None, packed_seq_params=documents)
        assert_same(with_gradients(output, local, mine(grad)), [mine(tensor) for tensor in expected])


CONTEXTS = list(itertools.product((2, 4), (None, 7), (False, True)))


@pytest.mark.parametrize(
    ("cp", "left", "packed"), some(CONTEXTS, [(2, None, False), (2, 7, True), (4, None, True), (4, 7, False)])
)
def test_context_ranks_together_are_dense_attention(cp: int, left: int | None, packed: bool) -> None:
    """Output and all gradients, 2 samples, 2 heads a group."""
    run_ranks(cp, _over_context, cp, left, packed)


# ---- which layers are windowed


def _windows(identity: Identity) -> None:
    from models import gpt
    from models.layers.attention import SDPAttention
    from parallel import groups

    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    model = ModelConfig(seq_length=64, window_size=(10, 0), window_attn_skip_freq="[1,0,0,1]", mtp_num_layers=1)
    with groups.start(layout_of(parallel, 2), identity, device="cpu", seed=1) as ranks:
        blueprint = gpt.Blueprint(
            model=model, shape=resolve(model, 257), parallel=parallel, precision=PrecisionConfig(dtype="fp32")
        )
        (chunk,) = gpt.build(blueprint, ranks)
        windows = [module.left for module in chunk.modules() if isinstance(module, SDPAttention)]
        assert windows == ([10, None] if ranks.is_first_stage else [None, 10, 10])


def test_windows_are_counted_in_blocks_of_the_whole_model() -> None:
    """4 blocks on 2 stages; a depth of multi-token prediction attends as the first block does."""
    run_ranks(2, _windows)
