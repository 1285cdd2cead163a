import time

import numpy as np
import pytest
import torch

from data.config import DataConfig
from data.loader import Packing, Prefetcher, Ring, needs_batch, to_batch
from program.errors import UserError


class Counting:
    """A source whose sample g is [g, g+1, g+2]; sample 99 is bad."""

    def __init__(self):
        self.asked = []

    def fetch(self, sample_indices):
        self.asked.append(sample_indices.tolist())
        if 99 in sample_indices:
            raise UserError("sample 99")
        return (sample_indices[:, None] + np.arange(3)).astype(np.int32)


def test_batch_has_the_next_token_as_label():
    window = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=torch.int32)
    batch = to_batch(window, torch.device("cpu"))
    assert batch.tokens.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.labels.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert batch.loss_mask.tolist() == [[1, 1, 1]] * 2
    assert batch.position_ids.tolist() == [[0, 1, 2]] * 2
    assert batch.starts is None
    tensors = batch[:-1]
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.int64, torch.float32, torch.int64]
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_what_is_not_predicted_is_read_all_the_same():
    """Padding behind the last document, and a token that data.transform masks; padding is a document by itself."""
    window = torch.tensor([[5, 6, 9, ~7, 8, 9, -1, -1, -1]], dtype=torch.int32)
    batch = to_batch(window, torch.device("cpu"), Packing(eod=9, reset_attention=True, eod_mask_loss=True, masked=True))
    assert batch.tokens.tolist() == [[5, 6, 9, 7, 8, 9, 0, 0]]
    assert batch.labels.tolist() == [[6, 9, 7, 8, 9, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 0, 0]] and batch.loss_mask.dtype == torch.float32
    assert batch.starts.tolist() == [[0, 0, 0, 3, 3, 3, 6, 6]]
    plain = to_batch(window, torch.device("cpu"))
    assert plain.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 0, 0]] and plain.loss_mask.is_contiguous()


WINDOW = torch.tensor([[9, 5, 0, 6, 0, 0, 7, 8], [1, 2, 3, 4, 5, 6, 0, 1]], dtype=torch.int32)
"""Two samples of 7 tokens; 0 ends a document."""


def test_documents_restart_after_the_token_that_ends_them():
    batch = to_batch(WINDOW, torch.device("cpu"), Packing(eod=0, reset_attention=True, reset_positions=True))
    assert batch.starts.tolist() == [[0, 0, 0, 3, 3, 5, 6], [0] * 7]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.starts.dtype == batch.position_ids.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[1] * 7] * 2
    assert batch.labels.tolist() == WINDOW[:, 1:].tolist()


def test_documents_are_kept_apart_or_restart_alone():
    both = to_batch(WINDOW, torch.device("cpu"), Packing(eod=0, reset_attention=True, reset_positions=True))
    apart = to_batch(WINDOW, torch.device("cpu"), Packing(eod=0, reset_attention=True))
    assert apart.starts.equal(both.starts)
    assert apart.position_ids.tolist() == [list(range(7))] * 2
    restarting = to_batch(WINDOW, torch.device("cpu"), Packing(eod=0, reset_positions=True))
    assert restarting.starts is None
    assert restarting.position_ids.equal(both.position_ids)


def test_what_follows_an_end_of_document_has_no_loss_if_so_asked():
    batch = to_batch(WINDOW, torch.device("cpu"), Packing(eod=0, eod_mask_loss=True))
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1, 0]]
    assert batch.loss_mask.dtype == torch.float32
    assert batch.starts is None
    assert batch.position_ids.tolist() == [list(range(7))] * 2


def test_packing_is_what_the_data_section_asks_for():
    assert Packing.from_config(DataConfig(), 3) == Packing(eod=3)
    assert Packing.from_config(DataConfig(reset_attention_mask=True, eod_mask_loss=True), 3) == Packing(
        eod=3, reset_attention=True, eod_mask_loss=True
    )


def test_every_stage_reads_where_documents_are_kept_apart():
    ranks = [(pp, tp) for pp in range(4) for tp in range(2)]
    assert {rank for rank in ranks if needs_batch(rank[0], 4, rank[1], every_stage=True)} == {
        (pp, 0) for pp in range(4)
    }


@pytest.mark.parametrize("pipeline_size, expected", [(1, {(0, 0)}), (2, {(0, 0), (1, 0)}), (4, {(0, 0), (3, 0)})])
def test_first_and_last_stage_read_on_tensor_rank_0(pipeline_size, expected):
    ranks = [(pp, tp) for pp in range(pipeline_size) for tp in range(2)]
    assert {(pp, tp) for pp, tp in ranks if needs_batch(pp, pipeline_size, tp)} == expected


def test_prefetcher_gives_what_fetch_gives_in_order_and_ends():
    requests = [np.arange(n, n + 2) for n in range(0, 20, 2)]
    reader = Prefetcher(Counting(), iter(requests))
    found = [tokens.tolist() for tokens in reader]
    reader.close()
    assert found == [Counting().fetch(request).tolist() for request in requests]


def test_the_wait_for_the_disk_is_measured():
    """0.3 s for a request that was not read ahead; nothing for one that lies there."""

    class Slow(Counting):
        def fetch(self, sample_indices):
            time.sleep(0.3)
            return super().fetch(sample_indices)

    reader = Prefetcher(Slow(), iter([np.array([0]), np.array([1])]), depth=1)
    next(reader)
    assert reader.data_wait_s > 0.2
    while not reader._pending[0].done():
        time.sleep(0.01)
    next(reader)
    reader.close()
    assert reader.data_wait_s < 0.2


def test_prefetcher_is_two_requests_ahead_and_no_more():
    source = Counting()
    reader = Prefetcher(source, (np.array([n]) for n in range(50)))
    next(reader)
    reader.close()
    assert len(source.asked) <= 3
    assert source.asked[0] == [0]


def test_an_error_comes_with_the_batch_it_belongs_to():
    reader = Prefetcher(Counting(), iter([np.array([0]), np.array([99]), np.array([2])]))
    assert next(reader).tolist() == [[0, 1, 2]]
    with pytest.raises(UserError, match="sample 99"):
        next(reader)
    reader.close()


def test_a_ring_keeps_a_batch_until_the_second_next_after_it():
    requests = [np.arange(n, n + 2) for n in range(0, 40, 2)]
    expected = [Counting().fetch(request).tolist() for request in requests]
    reader = Prefetcher(Counting(), iter(requests), ring=Ring(4, pinned=False))
    before, seen, addresses = None, [], set()
    for tokens in reader:
        if before is not None:
            assert before.tolist() == seen[-1]
        seen.append(tokens.tolist())
        addresses.add(tokens.data_ptr())
        before = tokens
    reader.close()
    assert seen == expected
    assert len(addresses) == 4


def test_a_ring_takes_larger_batches_later():
    ring = Ring(1, pinned=False)
    for size in (2, 5, 3):
        tokens = np.arange(size * 3, dtype=np.int32).reshape(size, 3)
        assert ring.fill(0, tokens).tolist() == tokens.tolist()


@pytest.mark.gpu
def test_batches_from_pinned_memory_are_those_that_were_read():
    requests = [np.arange(n, n + 512) for n in range(0, 40 * 512, 512)]
    reader = Prefetcher(Counting(), iter(requests), ring=Ring(4))
    copies = []
    for tokens in reader:
        assert tokens.is_pinned()
        copies.append(tokens.to("cuda", non_blocking=True))
    reader.close()
    for copy, request in zip(copies, requests, strict=True):
        assert copy.cpu().tolist() == Counting().fetch(request).tolist()
