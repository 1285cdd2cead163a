"""Requests as rows, and rows as rounds that every replica runs alike."""

import numpy as np
import pytest

from models.config import ModelConfig
from models.kernels import KernelsConfig
from parallel.config import ParallelConfig
from parallel.layout import Layout
from training.config.run_config import RunConfig
from training.evaluation.batching import EMPTY, pack, rounds, row_shape
from training.evaluation.scoring import zigzag_positions


def test_requests_that_read_the_same_share_a_row() -> None:
    packed = pack([([1, 2, 3], [7]), ([1, 2], [9, 9]), ([1, 2, 3], [8]), ([1, 2], [3, 5])], 64)
    assert packed.count == 4 and packed.lengths.tolist() == [3, 3]
    assert packed.tokens.tolist() == [1, 2, 3, 1, 2, 9]
    seen = sorted(zip(packed.target_requests.tolist(), packed.target_rows.tolist(), packed.target_positions.tolist(),
                      packed.target_ids.tolist(), strict=True))  # fmt: skip
    assert seen == [(0, 0, 2, 7), (1, 1, 1, 9), (1, 1, 2, 9), (2, 0, 2, 8), (3, 0, 1, 3), (3, 0, 2, 5)]
    assert packed.target_rows.tolist() == sorted(packed.target_rows.tolist())


def test_what_is_too_long_is_cut_from_the_left() -> None:
    packed = pack([([1, 2, 3, 4, 5, 6], [7, 8])], 4)
    assert packed.tokens.tolist() == [4, 5, 6, 7]
    assert packed.target_positions.tolist() == [2, 3] and packed.target_ids.tolist() == [7, 8]
    whole = pack([([1], [2, 3, 4, 5])], 4)
    assert whole.tokens.tolist() == [1, 2, 3, 4] and whole.target_positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [([1], []), ([], [1]), ([1], [2, 3, 4, 5, 6])])
def test_what_no_row_can_hold_is_refused(wrong: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match=r"continuation of at most model.seq_length = 4"):
        pack([wrong], 4)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp=3), Layout(pp=2), Layout(pp=2, vpp=2, dp=2), Layout(tp=2, cp=2, dp=2)]
)
@pytest.mark.parametrize("count", [1, 7, 500])
@pytest.mark.parametrize("fixed", [False, True])
def test_each_row_runs_once_in_rounds_of_one_shape(layout: Layout, count: int, fixed: bool) -> None:
    config = RunConfig(
        model=ModelConfig(seq_length=256), parallel=ParallelConfig(sequence_parallel=layout.tp > 1),
        kernels=KernelsConfig(tp_comm_overlap=fixed),
    )  # fmt: skip
    shape = row_shape(config, 2, layout)
    lengths = np.random.default_rng(1).integers(1, 257, count)
    found = rounds(lengths, shape, layout)
    rows = np.concatenate([one.rows.ravel() for one in found])
    assert sorted(rows[rows != EMPTY].tolist()) == list(range(count))
    for one in found:
        microbatches, dp, each = one.rows.shape
        assert dp == layout.dp and each * one.length <= 512 and (microbatches % layout.pp == 0 or layout.vpp == 1)
        assert one.length == 256 or (
            one.length % (2 * layout.cp * layout.tp if layout.cp > 1 else 1) == 0 and not fixed
        )
        assert lengths[one.rows[one.rows != EMPTY]].max() <= one.length
        assert not fixed or (one.length, each) == (256, 2)
    if count == 500 and not fixed:
        assert sum(one.rows.size * one.length for one in found) < 1.3 * lengths.sum()


def test_positions_on_context_ranks_are_those_of_the_slices() -> None:
    everywhere = [zigzag_positions(np.arange(16), 16, 2, rank) for rank in range(2)]
    assert everywhere[0].tolist() == [0, 1, 2, 3, *[-1] * 8, 4, 5, 6, 7]
    assert everywhere[1].tolist() == [-1] * 4 + [0, 1, 2, 3, 4, 5, 6, 7] + [-1] * 4
