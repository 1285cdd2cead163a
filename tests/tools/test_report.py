"""The page about a run: of a real one that was killed and started again, and of folders written by hand."""

import html
import json
import os
import re
import time
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from campaign import param
from program.processes import machine, start_of
from programs import Program
from tests.tools.page_checks import check_page, sections_of
from tests.tools.report_folder import ITERATIONS, KILLED, RESUMED, write_run
from tools.report import page
from tools.report.__main__ import main
from tools.report.curves import limits
from tools.report.markup import value_text
from tools.report.metrics_table import MOST_TABLES, read_metrics
from tools.report.page import render
from tools.report.run_data import read_run
from tools.report.time_spent import budget
from training.run_dir.goodput import SPENT, measured_goodput
from training.run_dir.history import note, read_history

HOSTILE = "<script>alert(1)</script>\"'&<!--\u202e"


def wait_for(what: str, path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or what not in path.read_text():
        assert time.monotonic() < deadline, f"{what} never came to {path}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[tuple[Path, str]]:
    """A run whose launcher was killed, with its ranks, and that was then started again to its end; and the page that
    was there in between, which no process of the run itself can have written."""
    folder = tmp_path_factory.mktemp("report")
    run_dir = folder / "run"
    flags = ["slurm/recipes/debug.toml", "--run_dir", str(run_dir), "--data.cache_dir", str(cache_dir), "--nproc", "2"]
    flags += ["--log.log_interval", "1", "--log.tensorboard", "False", "--checkpoint.save_interval", "5"]
    flags += ["--train.train_iters", "20", "--train.eval_interval", "10", "--train.eval_iters", "2"]
    flags += ["--profile.timeline_interval", "10", "--train.generate_tokens", "8", "--train.sample_interval", "10"]
    first = Program([*flags, "--train.train_iters", "4000"], folder / "first")
    wait_for('"event": "commit", "iteration": 5,', run_dir / "history.jsonl")
    wait_for('"iteration": 7,', run_dir / "metrics.jsonl")
    first.kill()
    wait_for("FAILED", run_dir / "report.html")
    between = (run_dir / "report.html").read_text()
    second = Program([*flags, "--parallel.elastic", "True"], folder / "second")
    out, _ = second.communicate()
    assert second.returncode == 0, out
    yield run_dir, between


def test_the_history_tells_the_run(killed: tuple[Path, str]) -> None:
    events = read_history(killed[0])
    names = [event.event for event in events]
    assert names[:3] == ["start", "begin", "first_step"] and names[-1] == "end"
    assert [name for name in names if name in ("start", "death", "begin", "stop", "end")] == [
        "start", "begin", "death", "start", "begin", "stop", "end",
    ]  # fmt: skip
    death = next(event for event in events if event.event == "death")
    assert "was killed by SIGKILL" in death.text("text") and (death.iteration or 0) >= 7
    begins = [event for event in events if event.event == "begin"]
    assert begins[0].iteration == 0 and begins[1].iteration in (5, 10, 15)  # a loaded machine sees 7 late
    assert begins[1].text("layout") == "TP 1 x PP 1 x DP 2" and begins[1].fields["world_size"] == 2
    assert {"torch", "python", "triplane"} <= begins[1].fields["versions"].keys()  # type: ignore[union-attr]
    assert [event.iteration for event in events if event.event == "evaluation"][-2:] == [10, 20]
    assert events[-1].number("exit_code") == 0 and "attempt" in events[-1].fields
    commits = {event.iteration for event in events if event.event == "commit"}
    assert commits == {5, 10, 15, 20} and all(event.number("bytes") for event in events if event.event == "commit")


def test_each_line_knows_restarts_and_goodput(killed: tuple[Path, str]) -> None:
    """The last line's goodput is that of the whole history at its moment."""
    lines = [json.loads(line) for line in (killed[0] / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert lines[0]["restarts"] == 0 and lines[-1]["restarts"] == 1
    last, events = lines[-1], read_history(killed[0])
    before = [event for event in events if event.time_s <= last["time_s"]]
    assert last["goodput"] == pytest.approx(measured_goodput(before, now_s=last["time_s"]).share, abs=0.01)
    whole = measured_goodput(events)
    assert whole.restarts == 1 and all(whole.seconds(spent) > 0 for spent in SPENT if spent != "idle")
    assert sum(whole.seconds(spent) for spent in SPENT) == pytest.approx(whole.wall_s)


def test_the_watchdog_writes_the_page_of_a_killed_run(killed: tuple[Path, str]) -> None:
    words = check_page(killed[1])
    assert "FAILED" in words and "was killed by SIGKILL in iteration" in words
    assert "restart" not in sections_of(killed[1])["events"]


def test_the_page_of_the_run(killed: tuple[Path, str]) -> None:
    """As the run itself has written it at its end."""
    text = (killed[0] / "report.html").read_text()
    words = check_page(text)
    assert "Iteration 20 of 20 (100%)" in words and "1 restart" in words and "FAILED" not in words
    found = sections_of(text)
    assert list(found) == [
        "loss", "speed", "goodput", "memory", "data", "machines", "pipeline", "samples", "events", "configuration",
        "versions",
    ]  # fmt: skip
    assert "restart at iteration" in found["loss"] and "done again after a restart" in found["loss"]
    assert "validation_loss" in found["loss"] and "tokens" in found["loss"]
    assert "start 2" in found["goodput"] and "lost" in found["goodput"]
    assert "predicted" in found["memory"] and "measured" in found["memory"]
    assert "training is done" in found["events"] and "exit code 0" in found["events"]
    assert "killed by SIGKILL" in found["events"] and "4 checkpoints committed" in found["events"]
    assert "train.eval_interval" in found["configuration"] and "train.seed" not in found["configuration"]
    assert "stage 0, rank 1" in found["pipeline"] and "rank 1: update: " in found["pipeline"]
    assert "def read(self, path):" in found["samples"] and "iteration 20" in found["samples"]
    run = read_run(killed[0])
    assert run.status == "done" and run.iteration == 20
    spent = budget(run)
    mean_s = sum(run.metrics.columns["iteration_s"].values) / 20
    assert sum(seconds for what, seconds in spent.items() if what not in ("checkpoint", "evaluation")) == pytest.approx(
        mean_s, rel=0.3
    )


def test_texts_of_the_folder_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "<b>run" if os.name == "posix" else tmp_path / "run"
    write_run(folder, HOSTILE)
    assert main([str(folder)]) == 0
    text = (folder / "report.html").read_text()
    words = check_page(text)
    assert list(sections_of(text)) == [
        "loss", "evaluations", "speed", "goodput", "memory", "data", "experts", "layers", "machines", "pipeline",
        "profiles", "samples", "events", "more", "configuration", "versions",
    ]  # fmt: skip
    for part, what in sections_of(text).items():
        if part not in ("speed", "goodput", "memory", "layers", "machines"):
            assert "alert(1)" in what, part
    assert "<script" not in text and html.escape("<script>alert(1)</script>") in text and "\u202e" not in text
    assert "<b>run" in words and "report.html" in capsys.readouterr().out


def test_what_is_wrong_is_said_at_the_top(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = read_run(tmp_path)
    words = html.unescape(render([run]).partition("<nav>")[0])
    assert "stopped as asked" in words and f"Iteration {ITERATIONS:,} of 1,000 (60%), 1.258G tokens" in words
    assert "MFU 41" in words and "healthy" not in words
    assert "Spike: iteration 420" in words and "Straggler: rank 9" in words and "NaN or Inf, replayed" in words
    marks = re.findall(r"<title>((?:layout change|iteration|restart)[^<]*)", sections_of(render([run]))["loss"])
    assert any(f"layout change at iteration {RESUMED}" in mark for mark in marks)
    assert any("9.3 sigma" in mark for mark in marks) and any("loss nan" in mark for mark in marks)
    assert run.goodput.seconds("lost") > 2.0 * (KILLED - RESUMED)


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a" / "run")
    write_run(tmp_path / "b" / "run", seed=1, learning_rate=6e-4)
    assert main([str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), "--output", str(tmp_path / "two.html")]) == 0
    text = (tmp_path / "two.html").read_text()
    words = check_page(text)
    assert "a/run" in words and "b/run" in words
    rows = re.findall(r"<tr>(.*?)</tr>", sections_of(text)["configuration"])
    assert len(rows) == 2 and re.findall(r">([^<]+)<", rows[1]) == ["optimizer.lr", "0.0003", "0.0006"]
    assert not {"events", "samples", "pipeline"} & set(sections_of(text))
    assert (
        main([str(tmp_path / "a" / "run"), str(tmp_path / "a" / "run"), "--output", str(tmp_path / "same.html")]) == 0
    )
    assert "The configurations do not differ." in (tmp_path / "same.html").read_text()


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """The owner lives: this process. Then it does not, and nothing says why."""
    owner = {"attempt": "aa", "host": "h", "machine": machine(), "pid": os.getpid(), "started": 0.0}
    (tmp_path / "owner.json").write_text(json.dumps(owner | {"process_start": start_of(os.getpid())}))
    note(tmp_path, "start", attempt="aa", world_size=2)
    note(tmp_path, "begin", 0, attempt="aa", layout="TP 1")
    line = {"iteration": 10, "time_s": time.time(), "loss": 2.0, "eta_s": 120.0, "iteration_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert run.status == "running" and "About 2m 00s to go" in render([run])
    (tmp_path / "owner.json").write_text(json.dumps(owner | {"process_start": 1}))
    run = read_run(tmp_path)
    assert run.status == "failed" and "no watchdog has left a verdict" in check_page(render([run]))


def test_spikes_survive_the_thinning(tmp_path: Path) -> None:
    """One iteration of 20,000: its height is in the picture."""
    losses = [2.0 + (number % 7) / 100 for number in range(20_000)]
    losses[12_345] = 2.9
    losses[4_000] = float("nan")
    lines = (
        json.dumps({"iteration": at, "loss": str(loss) if loss != loss else loss}) for at, loss in enumerate(losses)
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = render([read_run(tmp_path)])
    check_page(text)
    curve = max(re.findall(r'<polyline points="([^"]*)"', sections_of(text)["loss"]), key=len)
    heights = [float(point.split(",")[1]) for point in curve.split()]
    assert len(heights) < 3000 and sorted(heights)[0] < min(sorted(heights)[1] - 10, 40)


def test_a_resumed_run_shows_what_counts(tmp_path: Path) -> None:
    def line(at: int, loss: float, **more: object) -> str:
        return json.dumps({"iteration": at, "loss": loss, "expert_load": {"0": [0.5, 0.5]}, **more})

    lines = [line(at, 5.0) for at in range(1, 9)] + ['{"iteration": 8, "validation_loss": 4.0}']
    lines += [line(at, 3.0) for at in range(5, 7)] + ["no json", "[1]", '{"loss": 1}', '{"iteration": 7, "los']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found.columns["loss"].iterations == [1, 2, 3, 4, 5, 6]
    assert found.columns["loss"].values == [5.0, 5.0, 5.0, 5.0, 3.0, 3.0]
    assert found.column("validation_loss") is None and found.lost == [([5, 6, 7, 8], [5.0] * 4)]
    assert [at for at, _ in found.tables["expert_load"].rows()] == [1, 2, 3, 4, 5, 6]
    assert found.unreadable == 3  # without the torn last one


def test_values_that_are_none_are_left_out(tmp_path: Path) -> None:
    values = [
        "1" * 400,
        "1e999",
        "-1e999",
        '"nan"',
        "true",
        "null",
        "[[1]]",
        '{"a": {"b": 1}}',
        '"text"',
        "[1, 2]",
        "3",
    ]
    lines = [f'{{"iteration": {at}, "loss": {value}, "mine": {value}}}' for at, value in enumerate(values)]
    lines += ['{"iteration": -1, "loss": 1}', f'{{"iteration": {10**30}, "loss": 1}}', '{"iteration": 1.5, "loss": 1}']
    lines += [f'{{"iteration": {at}, "loss": {value}, "own": 1}}' for at, value in enumerate(["1" * 400] * 3, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    check_page(render([read_run(tmp_path)]))


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    """A control character in a sample of an older version; a torn last line is not counted."""
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    lines = [
        json.dumps({"iteration": at, "prompt": "p", "text": text}) for at, text in enumerate(("a\x19", "b\x85", "c"))
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, '{"iteration": 3, "te']))
    run = read_run(tmp_path)
    assert [line["text"] for line in run.samples] == ["c"] and run.unreadable == {"samples.jsonl": 2}
    assert "2 lines of samples.jsonl cannot be read." in check_page(render([run]))


def test_a_value_is_spelled_as_in_a_recipe() -> None:
    values = ["a", None, True, ["my_cb:X", 'a"b'], [1, 2.5, False], [{"name": "x"}]]
    spelled = ["a", "unset", "true", '["my_cb:X", "a\\"b"]', "[1, 2.5, false]", '[{name = "x"}]']
    assert [value_text(value) for value in values] == spelled


def test_only_communication_is_exposed(tmp_path: Path) -> None:
    write_run(tmp_path)
    heads = re.findall(r"<tr>(<th.*?)</tr>", sections_of(render([read_run(tmp_path)]))["profiles"])
    assert [re.findall(r">([^<]+)<", head)[0] for head in heads] == ["kernel or operator", "communication", "host wait"]
    assert ["exposed" in head for head in heads] == [False, True, False]


def test_a_short_run(tmp_path: Path) -> None:
    """Nothing of it is cut off as a spike, its loss is no mean of the whole, its only validation set has a name."""
    lines: list[dict[str, object]] = [{"iteration": at, "loss": 9.0 - at / 2} for at in range(1, 13)]
    held = ((4, 4.626), (8, 4.4), (12, 4.365))
    lines += [{"iteration": at, "validation_loss": loss, "validation_loss/held": loss + 0.2} for at, loss in held]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render([read_run(tmp_path)])
    words = check_page(text)
    assert "beyond this scale" not in text and "Loss 3.0000, validation loss 4.3650." in words
    assert "validation loss of held" in words
    low, high = limits([4.626, 4.4, 4.365]) or (0, 0)
    assert low < 4.365 and high > 4.626


def test_tables_are_thinned_and_the_newest_is_kept(tmp_path: Path) -> None:
    lines = (json.dumps({"iteration": at, "loss": 1.0, "layer_x": {"0": at}}) for at in range(1, 5001))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    kept = [at for at, _ in read_metrics(tmp_path / "metrics.jsonl").tables["layer_x"].rows()]
    assert kept[0] == 1 and kept[-1] == 5000 and MOST_TABLES / 3 < len(kept) <= MOST_TABLES
    assert {later - earlier for earlier, later in pairwise(kept[:-1])} == {32}


@pytest.mark.campaign
def test_a_folder_full_of_everything_stays_below_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts, many metrics, experts, blocks, starts, prompts, tasks and spans."""
    write_run(tmp_path, "x" * 3000)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines[::10]:
        line |= {f"mine/{number}": (line["iteration"] * 7919 * number) % 1000 / 7 for number in range(60)}
        line["expert_load"] = {str(block): [1 / 256] * 256 for block in range(60)}
        line |= {f"layer_{number}": {str(block): block + 1.5 for block in range(100)} for number in range(4)}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines[::10])) + "\n")
    with (tmp_path / "history.jsonl").open("a") as file:
        for at in range(1500):
            event = {
                "time_s": 1.8e9 + at,
                "event": ["spike", "start", "begin"][at % 3],
                "iteration": at,
                "text": "y" * 5000,
            }
            file.write(json.dumps(event | {"layout": f"TP {at}"}) + "\n")
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        for at in range(5_000):
            record = {"iteration": at // 25, "task": f"t{at % 25}", "metrics": {"acc": at}}
            file.write(json.dumps(record) + "\n")
    text = render([read_run(tmp_path)])
    check_page(text)
    assert "y" * 300 in text and "y" * 600 not in text
    monkeypatch.setattr(page, "MOST_CHARACTERS", 300_000)
    smaller = sections_of(render([read_run(tmp_path)]))
    assert "Left out" in smaller["more"] and "Left out" not in smaller["loss"]
    assert sum(map(len, smaller.values())) < 320_000 < len(text)


@pytest.mark.parametrize("turns", [6, param(16)])
def test_damaged_files_cost_only_themselves(tmp_path: Path, turns: int) -> None:
    """Bytes of every file changed at random: a page comes all the same, and is well-formed."""
    from random import Random

    write_run(tmp_path)
    whole = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    draw = Random(1)
    for turn in range(turns):
        for path, data in whole.items():
            changed = bytearray(data[: draw.randrange(1, len(data))] if turn % 5 == 0 else data)
            for _ in range(draw.randrange(1, 60)):
                changed[draw.randrange(len(changed))] = draw.choice(b'0{}[]",:-e9\x00n<')
            path.write_bytes(changed[:20_000] if turn % 2 else changed)
        check_page(render([read_run(tmp_path)]))


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no run's folder is given"),
        (["{folder}/none"], "no such folder"),
        (["{folder}"], "no run has trained in it"),
        (["{run}", "--output", "{folder}/none/page.html"], "cannot be written"),
        (["{run}", "--bundle", "{folder}/bundle.zip"], "ends in .tar.gz"),
        (["{run}", "{run}", "--bundle", "{folder}/bundle.tar.gz"], "one run's folder"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    assert main([one.format(folder=tmp_path, run=run) for one in arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_report_asked_of_a_dead_owner_only(tmp_path: Path) -> None:
    from training.run_dir.report import report_for_the_dead

    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    owner = {"attempt": "aa", "host": "h", "machine": machine(), "pid": os.getpid(), "started": 0.0}
    note(tmp_path, "start", attempt="aa", report=False)

    def asked(process_start: int | None) -> bool:
        (tmp_path / "owner.json").write_text(json.dumps(owner | {"process_start": process_start}))
        report_for_the_dead(tmp_path)
        return (tmp_path / "report.html").exists()

    assert not asked(1)  # log.report is off
    note(tmp_path, "start", attempt="aa", report=True)
    assert not asked(start_of(os.getpid()))  # it lives, and writes the page itself
    assert asked(1)


def test_a_large_file_without_lines_does_not_fill_the_memory(tmp_path: Path) -> None:
    """A hole of 300 MiB between two lines, as a crash of a file server leaves."""
    path = tmp_path / "metrics.jsonl"
    line = b'{"iteration": 1, "loss": 5.0}\n'
    with path.open("wb") as file:
        file.write(line)
        file.seek(300 << 20)
        file.write(b"\n" + line.replace(b"1", b"2"))
    tracemalloc.start()
    try:
        found = read_metrics(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert found.columns["loss"].iterations == [1, 2] and found.unreadable
