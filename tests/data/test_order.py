import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import global_batch_indices, permute, rank_indices, sample_windows


@settings(max_examples=30)
@given(st.integers(1, 1000), st.text(max_size=8))
def test_permute_is_a_bijection(size, key):
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(st.integers(1, 2**61), st.data())
def test_a_position_does_not_depend_on_its_neighbours(size, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)))
    together = permute(positions, size, "k")
    alone = [permute(positions[i : i + 1], size, "k")[0] for i in range(len(positions))]
    np.testing.assert_array_equal(together, alone)
    assert together.min() >= 0
    assert together.max() < size


@pytest.mark.parametrize("positions", [[-1], [10], [3, 11]])
def test_positions_outside_the_range_are_refused(positions):
    with pytest.raises(ValueError, match="10"):
        permute(np.array(positions), 10, "k")


def test_every_place_is_reached_from_everywhere():
    """Over many keys each of 5 positions lands on each of 5 places about equally often (6 sigma)."""
    keys = 2000
    counts = np.zeros((5, 5))
    for key in range(keys):
        counts[np.arange(5), permute(np.arange(5), 5, str(key))] += 1
    assert np.abs(counts - keys / 5).max() < 6 * np.sqrt(keys * 0.2 * 0.8)


def test_order_looks_shuffled():
    order = permute(np.arange(10_000), 10_000, "k")
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_the_order_never_changes():
    """A changed number here means that every run resumed across the change sees other batches."""
    assert sample_windows(np.array([0, 1, 2, 1000, 1001]), 1000, 1234).tolist() == [988, 760, 708, 806, 61]


@given(st.integers(1, 300), st.integers(0, 5), st.integers(-5, 5))
def test_each_epoch_visits_every_window_once(samples_per_epoch, epoch, seed):
    samples = np.arange(samples_per_epoch) + epoch * samples_per_epoch
    windows = sample_windows(samples, samples_per_epoch, seed)
    np.testing.assert_array_equal(np.sort(windows), np.arange(samples_per_epoch))


def test_epochs_and_seeds_have_orders_of_their_own():
    samples = np.arange(3000)
    windows = sample_windows(samples, 1000, 1).reshape(3, 1000)
    assert not (windows[0] == windows[1]).all()
    assert not (windows[1] == windows[2]).all()
    assert not (windows[0] == sample_windows(samples[:1000], 1000, 2)).all()


def flattened(consumed, global_batch_size, micro_batch_size, data_parallel_size):
    """All ranks' shares in the order microbatch, data rank, sample."""
    micro = global_batch_size // (micro_batch_size * data_parallel_size)
    shares = [
        rank_indices(consumed, micro, micro_batch_size, rank, data_parallel_size) for rank in range(data_parallel_size)
    ]
    return np.stack(shares, axis=1).ravel()


@pytest.mark.parametrize("data_parallel_size", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_every_layout_reads_one_global_batch_in_one_order(data_parallel_size, micro_batch_size):
    batch = flattened(96, 32, micro_batch_size, data_parallel_size)
    np.testing.assert_array_equal(batch, global_batch_indices(96, 32))


def test_share_of_a_rank_is_megatrons():
    share = rank_indices(100, num_microbatches=3, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=4)
    assert share.tolist() == [[100 + m * 8 + 2, 100 + m * 8 + 3] for m in range(3)]
