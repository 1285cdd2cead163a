"""Global batch sizes: ramps against megatron-core's calculator, samples after iterations, uneven sizes."""

import pytest

from training.config.batch_schedule import BatchSchedule
from training.config.schedules import batch_schedule
from training.config.train_config import TrainConfig

RAMPS = [
    BatchSchedule(global_batch_size=16, rampup_batch_size=(4, 4, 100)),
    BatchSchedule(global_batch_size=24, rampup_batch_size=(8, 2, 1000)),
    BatchSchedule(global_batch_size=10, rampup_batch_size=(2, 8, 7)),
    BatchSchedule(global_batch_size=40, rampup_batch_size=(2, 2, 13)),  # more sizes than samples
    BatchSchedule(global_batch_size=6, rampup_batch_size=(6, 2, 50)),
]


def test_constant_size() -> None:
    schedule = BatchSchedule(global_batch_size=8)
    assert schedule.sizes() == [8]
    assert [schedule.global_batch_size_at(samples) for samples in (0, 8, 10**15)] == [8, 8, 8]
    assert schedule.num_microbatches(0, micro_batch_size=2, dp=2) == 2
    assert schedule.consumed_after(10**9) == 8 * 10**9


@pytest.mark.parametrize("schedule", RAMPS)
def test_ramp_has_the_sizes_of_mcore_s_calculator(schedule: BatchSchedule) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    start, increment, samples = schedule.rampup_batch_size or (0, 0, 0)
    sizes = range(start, schedule.global_batch_size + 1, increment)
    growths = max(1, len(sizes) - 1)
    # Of sizes that would begin at the same sample, only the last one is ever used.
    thresholds = {-(-number * samples // growths): size for number, size in enumerate(sizes)}
    steps = " ".join(f"{threshold}:{size}" for threshold, size in thresholds.items())
    theirs = StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=2, data_parallel_size=1, decrease_batch_size_if_needed=False, rank=1, schedule=steps
    )
    for consumed in range(samples + 50):
        theirs.update(consumed, consistency_check=True)
        assert schedule.global_batch_size_at(consumed) == theirs.get_current_global_batch_size(), consumed
        assert schedule.num_microbatches(consumed, micro_batch_size=2, dp=1) == theirs.get(), consumed


def test_ramp_grows_at_equal_distances() -> None:
    schedule = BatchSchedule(global_batch_size=16, rampup_batch_size=(4, 4, 90))
    found = {samples: schedule.global_batch_size_at(samples) for samples in (0, 29, 30, 59, 60, 89, 90, 91)}
    assert found == {0: 4, 29: 4, 30: 8, 59: 8, 60: 12, 89: 12, 90: 16, 91: 16}
    assert schedule.sizes() == [4, 8, 12, 16]


STEPS = BatchSchedule(global_batch_size=6, steps=((0, 4), (10, 16), (50, 6)))


def test_steps_have_the_sizes_of_mcore_s_calculator() -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    theirs = StepBatchsizeNumMicroBatchesCalculator(2, 1, False, 1, "0:4 1.28K:16 6400:6", seq_length=128)
    train = TrainConfig(global_batch_size=6, step_batch_size_schedule="0:4, 1.28K:16 6400:6")
    assert train.problems() == [] and batch_schedule(train, 128) == STEPS and STEPS.problems(2, 1) == []
    for consumed in range(100):
        theirs.update(consumed, consistency_check=True)
        assert STEPS.global_batch_size_at(consumed) == theirs.get_current_global_batch_size(), consumed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16 2.4B:320", 'expected "TOKENS:SIZE" as in 2.4B:320, found "16"'),
        ("1K:16 2K:32", "from 0 tokens on"),
        ("0:16 1K:32 1000:64", "each from another token on"),
        ("0:0 1K:8", "sizes of 1 or more"),
        ("0:4 100:8", "begin with another sample, of model.seq_length tokens, found the samples [0, 0]"),
        ("0:4 1K:16", "ends with 16 samples, which train.global_batch_size must be, found 8"),
        ("0:3 1K:8", "3 are not multiples of train.micro_batch_size 1 x DP 2 = 2 samples. Use 3: 2 or 4"),
    ],
)
def test_steps_that_cannot_be_are_reported(text: str, expected: str) -> None:
    train = TrainConfig(global_batch_size=8, step_batch_size_schedule=text)
    (problem,) = train.problems() or batch_schedule(train, 128).problems(1, 2)
    assert problem.startswith("train.step_batch_size_schedule") and expected in problem


@pytest.mark.parametrize("schedule", [*RAMPS, STEPS])
def test_consumed_after_counts_iteration_by_iteration(schedule: BatchSchedule) -> None:
    consumed = 0
    for iteration in range(300):
        assert schedule.consumed_after(iteration) == consumed
        consumed += schedule.global_batch_size_at(consumed)


def test_consumed_after_is_fast_where_a_ramp_is_long() -> None:
    schedule = BatchSchedule(global_batch_size=4096, rampup_batch_size=(16, 16, 10**10))
    huge = schedule.consumed_after(10**8)
    # Far behind the ramp every iteration adds the full size.
    assert schedule.consumed_after(10**8 + 1) - huge == 4096


def test_uneven_global_batch_is_reported_with_sizes_that_work() -> None:
    (problem,) = BatchSchedule(global_batch_size=10).problems(micro_batch_size=2, dp=2)
    assert "train.global_batch_size 10 is not a multiple of train.micro_batch_size 2 x DP 2 = 4" in problem
    assert "Use 8 or 12" in problem
    (problem,) = BatchSchedule(global_batch_size=3).problems(micro_batch_size=1, dp=4)
    assert "Use 4," in problem
    assert BatchSchedule(global_batch_size=12).problems(micro_batch_size=2, dp=2) == []


def test_uneven_size_within_a_ramp_is_reported_with_a_ramp_that_works() -> None:
    schedule = BatchSchedule(global_batch_size=16, rampup_batch_size=(4, 3, 1000))
    (problem,) = schedule.problems(micro_batch_size=1, dp=4)
    assert "3 of 5 batch sizes on the way to 16 (7, 10, 13)" in problem
    assert "A near ramp that works: [4, 4, 1000]" in problem
    assert BatchSchedule(global_batch_size=16, rampup_batch_size=(4, 4, 1000)).problems(1, 4) == []


@pytest.mark.parametrize("piece", [2, 3, 4, 8])
@pytest.mark.parametrize("ramp", [(1, 1, 10), (5, 19, 10), (23, 1, 10), (24, 7, 10)])
def test_proposed_ramp_works(piece: int, ramp: tuple[int, int, int]) -> None:
    proposed = BatchSchedule(global_batch_size=24, rampup_batch_size=ramp)._working_ramp(piece)
    start, increment, samples = proposed
    assert BatchSchedule(global_batch_size=24, rampup_batch_size=(start, increment, samples)).problems(piece, 1) == []


@pytest.mark.parametrize("ramp", [(0, 1, 10), (20, 1, 10), (4, 0, 10), (4, 4, 0), (4, 5, 10)])
def test_malformed_ramp_is_reported(ramp: tuple[int, int, int]) -> None:
    (problem,) = BatchSchedule(global_batch_size=16, rampup_batch_size=ramp).problems(1, 1)
    assert problem.startswith("train.rampup_batch_size: ")
    assert f"found ({ramp[0]}, {ramp[1]}, {ramp[2]}) with train.global_batch_size 16" in problem
