"""Where a run's time went: histories made by hand, whose answers are exact."""

import pytest

from training.run_dir.goodput import SPENT, MeasuredGoodput, measured_goodput
from training.run_dir.history import Event


def event(at_s: float, name: str, iteration: int | None = None, attempt: str = "a", **fields: float | str) -> Event:
    return Event(time_s=at_s, event=name, iteration=iteration, fields={"attempt": attempt, **fields})


def start(at_s: float, resumed: int = 0, attempt: str = "a", first_s: float = 10.0) -> list[Event]:
    """A launch, training 2 s before its first step is done, the first step ``first_s`` later."""
    return [
        event(at_s, "start", attempt=attempt),
        event(at_s + first_s - 2, "begin", resumed, attempt),
        event(at_s + first_s, "first_step", resumed + 1, attempt),
    ]


def seconds(found: MeasuredGoodput) -> dict[str, float]:
    assert all(one.end_s == other.begin_s for one, other in zip(found.spans, found.spans[1:], strict=False))
    assert sum(found.seconds(spent) for spent in SPENT) == pytest.approx(found.wall_s)
    return {spent: found.seconds(spent) for spent in SPENT if found.seconds(spent)}


def test_one_start_from_its_launch_to_its_end() -> None:
    events = [
        *start(1000),
        event(1100, "evaluation", 50, seconds=8.0),
        event(1104, "save", 50, seconds=4.0),
        event(1105, "commit", 50, stall_s=4.0),
        event(1200, "save", 100, seconds=5.0),
        event(1201, "stop", 100, reason="done"),
        event(1204, "end", exit_code=0),
    ]
    found = measured_goodput(events)
    # 10 s to the first step, 3 s after the loop; 191 s in the loop, 9 of them for saves, 8 for the evaluation
    assert seconds(found) == {"productive": 174, "checkpoint": 9, "evaluation": 8, "restart": 13}
    assert found.restarts == 0 and found.share == 174 / 204


def test_what_a_killed_start_did_after_its_last_checkpoint_is_lost() -> None:
    events = [
        *start(0),
        event(100, "save", 50, seconds=2.0),
        event(101, "commit", 50, stall_s=2.0),
        event(170, "death", 85, died_s=150.0),
        *start(170, resumed=50, attempt="b"),
        event(280, "save", 100, "b", seconds=0.0),
        event(280, "stop", 100, "b"),
        event(280, "end", None, "b", exit_code=0),
    ]
    found = measured_goodput(events)
    # 88 s of 10 to 98, and 100 s of the second start; 50 s from the end of the save to the death; 20 s of a gap
    assert seconds(found) == {"productive": 188, "checkpoint": 2, "restart": 10 + 20 + 10, "lost": 50}
    assert found.restarts == 1


def test_iterations_that_two_later_starts_did_again_are_lost_once_each() -> None:
    """The second start falls back behind the first one's newest checkpoint; the third to the second's first."""
    events = [
        *start(0),
        event(110, "save", 100, seconds=0.0),
        event(210, "save", 200, seconds=0.0),
        event(220, "death", died_s=220.0),
        *start(220, resumed=100, attempt="b"),
        event(280, "save", 150, "b", seconds=0.0),
        event(300, "death", None, "b", died_s=300.0),
        *start(300, resumed=150, attempt="c"),
        event(360, "stop", 200, "c"),
        event(360, "end", None, "c", exit_code=75),
    ]
    found = measured_goodput(events)
    assert seconds(found) == {"productive": 100 + 50 + 50, "restart": 30, "lost": 110 + 20}


def test_where_the_resumed_iteration_is_no_known_moment_a_line_between_two_tells_it() -> None:
    events = [
        *start(0),
        event(109, "save", 100, seconds=0.0),  # 99 iterations in 99 s
        event(120, "death", died_s=120.0),
        *start(120, resumed=41, attempt="b"),  # of a copy elsewhere
    ]
    assert seconds(measured_goodput(events, now_s=150.0)) == {"productive": 40 + 20, "restart": 20, "lost": 70}


def test_a_gap_after_a_stop_on_request_is_idle_and_after_a_fault_part_of_the_restart() -> None:
    def stopped(code: int) -> dict[str, float]:
        again = start(200, resumed=40, attempt="b")
        loop_end = [event(50, "save", 40, seconds=0.0), event(50, "commit", 40), event(50, "stop", 40)]
        return seconds(measured_goodput([*start(0), *loop_end, event(50, "end", exit_code=code), *again], now_s=210))

    assert stopped(75) == {"productive": 40, "restart": 20, "idle": 150}
    assert stopped(1) == {"productive": 40, "restart": 170}


def test_a_start_that_is_dead_and_has_no_successor_counts_up_to_its_last_checkpoint() -> None:
    events = [*start(0), event(60, "save", 40, seconds=0.0), event(61, "commit", 40)]
    assert seconds(measured_goodput(events, last_line_s=75.0)) == {"productive": 50, "restart": 10, "lost": 15}
    assert seconds(measured_goodput(events, now_s=75.0)) == {"productive": 65, "restart": 10}


def test_a_start_that_never_trained_is_all_restart() -> None:
    events = [event(0, "start"), event(30, "death", died_s=25.0), *start(40, attempt="b")]
    found = measured_goodput(events, now_s=60.0)
    assert seconds(found) == {"productive": 10, "restart": 50} and found.restarts == 1


def test_the_wait_for_the_copy_of_a_background_save_is_known_with_its_commit() -> None:
    events = [*start(0), event(60, "save", 40, seconds=1.0), event(70, "commit", 40, stall_s=3.0)]
    assert seconds(measured_goodput(events, now_s=100.0)) == {"productive": 87, "checkpoint": 3, "restart": 10}


def test_what_an_attempt_writes_after_another_took_the_folder_is_left_out() -> None:
    """It was taken for dead, and lives: its events lie among those of the next one."""
    mine = [*start(0), event(60, "save", 40, seconds=0.0), event(60, "commit", 40)]
    other = start(100, resumed=40, attempt="b")
    late = [event(105, "save", 80, seconds=5.0), event(106, "death", died_s=106.0), event(107, "end", exit_code=1)]
    quiet = seconds(measured_goodput([*mine, *other], now_s=150.0))
    assert quiet == {"productive": 50 + 40, "restart": 10 + 40 + 10}
    assert seconds(measured_goodput([*mine, other[0], *late, *other[1:]], now_s=150.0)) == quiet


def test_a_launch_that_waited_for_the_lock_began_before_its_first_word() -> None:
    events = [*start(0), event(60, "save", 60, seconds=0.0), event(60, "commit", 60), event(100, "death", died_s=70.0)]
    again = [event(100, "start", attempt="b", age_s=20.0), *start(100, 60, "b")[1:]]
    # dead at 70, launched at 80, first step at 110; of a launch that began before the death, from the death on
    assert seconds(measured_goodput([*events, *again], now_s=110.0)) == {"productive": 50, "restart": 50, "lost": 10}
    early = [event(100, "start", attempt="b", age_s=90.0), *again[1:]]
    found = measured_goodput([*events, *early], now_s=110.0)
    assert seconds(found)["restart"] == 50 and found.wall_s == 110


def test_a_clock_that_steps_back_takes_no_time_away() -> None:
    """By an hour, between two events: what lies between them is unknown, and counts as nothing."""
    events = [
        *start(10_000),
        event(10_100, "save", 50, seconds=5.0),
        event(6_500, "evaluation", 60, seconds=3.0),
        event(6_600, "save", 100, seconds=5.0),
        event(6_600, "stop", 100),
        event(6_600, "end", exit_code=0),
    ]
    found = measured_goodput(events)
    # the evaluation's own 3 s lie before its event, where there is no time left
    assert seconds(found) == {"productive": 85 + 95, "checkpoint": 10, "restart": 10} and found.wall_s == 200


@pytest.mark.parametrize("events", [[], [event(5, "save", 3, seconds=2.0)]], ids=["nothing", "no start"])
def test_without_a_start_there_is_nothing(events: list[Event]) -> None:
    found = measured_goodput(events, now_s=100.0)
    assert seconds(found) == {} and found.share == 0.0 and found.restarts == 0


def test_any_order_of_any_events_adds_up() -> None:
    """Histories that no run writes: what is said of them may be wrong, but nothing fails or counts twice."""
    from random import Random

    draw = Random(0)
    names = ("start", "begin", "first_step", "save", "commit", "evaluation", "stop", "end", "death", "spike")
    for _ in range(500):
        events = [
            event(
                draw.uniform(0, 100), draw.choice(names), draw.choice([None, draw.randrange(50)]), draw.choice("ab"),
                seconds=draw.uniform(-5, 50), stall_s=draw.uniform(-5, 50), died_s=draw.uniform(-50, 200),
                age_s=draw.uniform(-5, 200), exit_code=draw.choice([0, 1, 2, 75]),
            )
            for _ in range(draw.randrange(12))
        ]  # fmt: skip
        seconds(measured_goodput(events, draw.choice([None, 120.0]), draw.choice([0.0, 90.0])))
