"""history.jsonl: what is appended, and what a reader makes of what a kill or a full disk has left."""

import json
import os
from pathlib import Path

from training.run_dir.history import HISTORY, note, noted_by, read_history, unnoted


def test_an_event_is_a_line_with_its_time(tmp_path: Path) -> None:
    note(tmp_path, "save", 40, seconds=1.5, text="two\nlines")
    note(tmp_path, "end", exit_code=0)
    save, end = read_history(tmp_path)
    assert (save.event, save.iteration, save.number("seconds"), save.text("text")) == ("save", 40, 1.5, "two\nlines")
    assert end.iteration is None and end.time_s >= save.time_s > 1.7e9
    assert len((tmp_path / HISTORY).read_text().splitlines()) == 2


def test_rank_0_alone_keeps_events_under_its_attempt(tmp_path: Path) -> None:
    assert noted_by(tmp_path, 3, "a") is unnoted
    noted_by(tmp_path, 1, "a")("save", 1)
    noted_by(tmp_path, 0, "a")("save", 2, loss=float("nan"), memory={"peak": float("inf")})
    (event,) = read_history(tmp_path)
    assert event.fields == {"attempt": "a", "loss": "nan", "memory": {"peak": "inf"}} and event.number("loss") == 0.0


def test_a_torn_last_line_spoils_no_other(tmp_path: Path) -> None:
    note(tmp_path, "start")
    path = tmp_path / HISTORY
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert [event.event for event in read_history(tmp_path)][:1] == ["start"]
        note(tmp_path, "end")
        found = [event.event for event in read_history(tmp_path)]
        assert found == (["start", "start", "end"] if cut == len(whole) - 1 else ["start", "end"])


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    lines = [
        "[]", "{}", '{"time_s": "x", "event": "save"}', '{"time_s": 1, "event": 3}', "\x00\x00", '{"time_s": 1e300, '
        '"event": "save"}', "[" * 1000, '{"time_s": 5, "event": "save", "iteration": "many", "more": [1]}',
    ]  # fmt: skip
    (tmp_path / HISTORY).write_text("\n".join(lines))
    (event,) = read_history(tmp_path)
    assert event.iteration is None and event.fields == {"more": [1]}


def test_what_cannot_be_written_or_read_ends_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / HISTORY)
    note(tmp_path, "save", 1)  # would wait for a reader
    assert read_history(tmp_path) == [] == read_history(tmp_path / "none")
    note(tmp_path / "none", "save", 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / HISTORY).symlink_to("/dev/full")
    note(tmp_path / "full", "save", 1)


def test_the_folder_has_no_path_in_it(tmp_path: Path) -> None:
    note(tmp_path, "death", 3, text=f"rank 1 hangs. Stacks: {tmp_path}/watch/start-1", more=[str(tmp_path)])
    (event,) = read_history(tmp_path)
    assert event.text("text") == "rank 1 hangs. Stacks: RUN_DIR/watch/start-1"
    assert event.fields["more"] == ["RUN_DIR"]


def test_lines_are_strict_json(tmp_path: Path) -> None:
    note(tmp_path, "save", 1, values=[float("-inf")])
    (line,) = (tmp_path / HISTORY).read_text().splitlines()
    assert json.loads(line, parse_constant=lambda _: 1 / 0)["values"] == ["-inf"]
