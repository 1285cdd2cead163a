"""Where a logged iteration's numbers go, and how they are computed."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from program.errors import UserError
from training.config.log_config import LogConfig
from training.metrics.background import BackgroundSink
from training.metrics.console import ConsoleSink, duration
from training.metrics.jsonl import JsonlSink, read_jsonl
from training.metrics.rates import Rates
from training.metrics.redaction import REDACTED, redacted
from training.metrics.sinks import RunFacts, Sinks, open_sinks

REPO = Path(__file__).parents[3]
CANARY = "canary0123456789abcdef0123456789abcdef01"


Log = partial(LogConfig, tensorboard=False, prometheus="off")


def ignore(line: str) -> None:
    """A console without a reader."""


def write_jsonl(path: Path, *lines: tuple[int, Mapping[str, float | int]]) -> None:
    sink = JsonlSink(path)
    for iteration, values in lines:
        sink.write(iteration, values)
    sink.close()


# metrics.jsonl


def test_jsonl_keeps_every_digit_and_puts_iteration_first(tmp_path: Path) -> None:
    loss = 4.213_200_000_000_000_7
    write_jsonl(tmp_path / "m", (7, {"loss": loss, "consumed_tokens": 10**15 + 1}))
    line = (tmp_path / "m").read_text()
    assert line.startswith('{"iteration": 7, ')
    assert json.loads(line) == {"iteration": 7, "loss": loss, "consumed_tokens": 10**15 + 1}


def test_jsonl_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m")
    sink.write(1, {"loss": 1.0})
    assert read_jsonl(tmp_path / "m") == [{"iteration": 1, "loss": 1.0}]
    sink.close()


def test_jsonl_lines_wait_for_a_full_disk(tmp_path: Path) -> None:
    """A file may grow to 4,096 bytes only, as on a full disk; then to more, as when somebody made room."""
    code = """
import resource, signal, sys
from pathlib import Path
from training.metrics.trackers import DrawnCurves
from training.metrics.jsonl import JsonlSink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
sink = JsonlSink(Path(sys.argv[1]), print)
for iteration in range(200):
    size = 4096 if iteration < 150 else limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit))
    sink.write(iteration, {"loss": iteration / 7})
sink.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, check=True)
    assert [record["iteration"] for record in read_jsonl(tmp_path / "m")] == list(range(200))
    first, second = done.stdout.splitlines()
    assert "takes no more lines (File too large); they wait" in first and second.endswith("is written again")


def test_jsonl_is_strict_json_for_numbers_that_json_lacks(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "m", (1, {"loss": math.nan, "grad_norm": math.inf, "learning_rate": -math.inf}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    (record,) = read_jsonl(tmp_path / "m")
    assert math.isnan(record["loss"]) and record["grad_norm"] == math.inf and record["learning_rate"] == -math.inf


def test_later_line_of_an_iteration_wins_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_jsonl(path, (10, {"loss": 3.0}), (10, {"validation_loss": 3.1}), (20, {"loss": 2.0}), (25, {"loss": 1.9}))
    write_jsonl(path, (20, {"loss": 2.5}), (20, {"validation_loss": 2.6}))
    assert read_jsonl(path) == [
        {"iteration": 10, "loss": 3.0},
        {"iteration": 10, "validation_loss": 3.1},
        {"iteration": 20, "loss": 2.5},
        {"iteration": 20, "validation_loss": 2.6},
        {"iteration": 25, "loss": 1.9},
    ]


def test_a_resumes_evaluations_replace_those_of_before(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_jsonl(path, (20, {"loss": 2.0}), (20, {"validation_loss/wiki": 3.1}), (20, {"eval/arc/acc": 0.2}))
    write_jsonl(path, (20, {"loss": 2.5}), (20, {"validation_loss/wiki": 3.2}), (20, {"eval/arc/acc": 0.3}))
    assert read_jsonl(path) == [
        {"iteration": 20, "loss": 2.5},
        {"iteration": 20, "validation_loss/wiki": 3.2},
        {"iteration": 20, "eval/arc/acc": 0.3},
    ]


def test_torn_last_line_is_ignored_and_mended_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"iteration": 1, "loss": 2.0}\n{"iteration": 2, "lo')
    assert [record["iteration"] for record in read_jsonl(path)] == [1]
    write_jsonl(path, (2, {"loss": 1.5}))
    assert path.read_text() == '{"iteration": 1, "loss": 2.0}\n{"iteration": 2, "loss": 1.5}\n'


def test_whole_last_line_without_newline_is_kept_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"iteration": 1, "loss": 2.0}')
    write_jsonl(path, (2, {"loss": 1.5}))
    assert [record["iteration"] for record in read_jsonl(path)] == [1, 2]


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"iteration": 1}\n{"itera\n{"iteration": 3}\n')
    with pytest.raises(UserError, match=r"m, line 2: .*itera"):
        read_jsonl(path)


# The console


def test_console_line() -> None:
    said: list[str] = []
    ConsoleSink(said.append, 150).write(
        10,
        {
            "loss": 4.21321,
            "grad_norm": 1.239,
            "learning_rate": 3e-3,
            "consumed_samples": 80,
            "iteration_s": 0.612,
            "tokens_per_s": 13300.4,
            "tokens_per_s_per_gpu": 1660.2,
            "mfu": 0.4119,
            "memory_gib": 61.23,
            "skipped": 0,
            "eta_s": 85.3,
        },
    )
    assert said == [
        "iteration     10/150 | loss 4.2132 | norm 1.24 | lr 3.00e-03 | 0.61 s | 13,300 tok/s | "
        "1,660 tok/s/GPU | MFU 41.2% | mem 61.2 GiB | ETA 1m 25s"
    ]


def test_console_shows_nothing_for_what_is_not_there() -> None:
    said: list[str] = []
    ConsoleSink(said.append, 150).write(10, {"grad_norm": 1.0})
    assert said == ["iteration     10/150 | norm 1.00"]


def test_console_validation_line() -> None:
    said: list[str] = []
    console = ConsoleSink(said.append, 150)
    console.write(100, {"validation_loss": 3.9120})
    console.write(101, {"validation_loss": 1e4})
    assert said[0] == "iteration    100/150 | validation loss 3.912 (perplexity 50.0)"
    assert said[1].endswith("(perplexity inf)")


def test_console_lines_of_sets_and_tasks() -> None:
    said: list[str] = []
    console = ConsoleSink(said.append, 150)
    console.write(100, {"validation_loss": 3.912, "validation_loss/wiki": 2.1})
    console.write(100, {"validation_loss/wiki": 2.1, **{f"validation_loss/{n}": 1.0 for n in range(13)}})
    console.write(100, {"eval/arc/acc": 0.25123, "eval/arc/acc_norm": 0.5, "eval/gsm8k/exact_match/strict": 0.0})
    assert said[0] == "iteration    100/150 | validation loss 3.912 (perplexity 50.0) | wiki 2.100 (8.2)"
    assert said[1].startswith("iteration    100/150 | validation loss wiki 2.100 (perplexity 8.2) | 0 1.000 (2.7)")
    assert said[1].endswith(" | 10 1.000 (2.7) | 2 more")
    assert said[2] == "iteration    100/150 | arc acc 0.2512, acc_norm 0.5 | gsm8k exact_match/strict 0"


def test_console_marks_skipped_updates() -> None:
    said: list[str] = []
    console = ConsoleSink(said.append, 9)
    console.write(1, {"loss": 2.0, "skipped": 1, "loss_scale": 65536.0})
    console.write(2, {"loss": 2.0, "skipped": 3})
    assert said[0] == "iteration      1/9 | loss 2.0000 | UPDATE SKIPPED | scale 65,536"
    assert "3 UPDATES SKIPPED" in said[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m 00s"), (85, "1m 25s"), (3599, "59m 59s"), (11270, "3h 07m"), (187200, "2d 04h")],
)
def test_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Rates


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run_iterations(rates: Rates, clock: Clock, *iterations: tuple[float, int]) -> None:
    """Let iterations of (seconds, tokens) pass, with a long evaluation after each."""
    for seconds, tokens in iterations:
        rates.begin()
        clock.now += seconds
        rates.end(tokens)
        clock.now += 500.0


def test_rates_leave_out_warmup_and_pauses() -> None:
    clock = Clock()
    rates = Rates(world_size=4, clock=clock)
    run_iterations(rates, clock, (90.0, 100), (10.0, 100), (1.0, 100), (3.0, 300))
    assert rates.report(remaining_iterations=10) == {
        "iteration_s": 2.0,
        "tokens_per_s": 100.0,
        "tokens_per_s_per_gpu": 25.0,
        "eta_s": 20.0,
    }


def test_warmup_alone_has_no_rates_and_no_eta() -> None:
    clock = Clock()
    rates = Rates(world_size=1, clock=clock)
    run_iterations(rates, clock, (90.0, 100))
    assert rates.report(remaining_iterations=9) == {"iteration_s": 90.0}
    run_iterations(rates, clock, (5.0, 100), (2.0, 100))
    assert rates.report(remaining_iterations=7)["iteration_s"] == 2.0


def test_each_report_begins_an_interval_and_eta_is_a_median_over_all() -> None:
    clock = Clock()
    rates = Rates(world_size=1, clock=clock)
    run_iterations(rates, clock, (9.0, 1), (9.0, 1), (1.0, 1), (1.0, 1))
    rates.report(remaining_iterations=0)
    run_iterations(rates, clock, (7.0, 14))
    report = rates.report(remaining_iterations=10)
    assert (report["iteration_s"], report["eta_s"], report["tokens_per_s"]) == (7.0, 10.0, 2.0)
    assert rates.report(remaining_iterations=10) == {}


def test_mfu_needs_a_known_peak() -> None:
    clock = Clock()
    for peak, expected in ((None, {}), (100.0, {"mfu": 0.3, "hfu": 0.4})):
        rates = Rates(
            world_size=2,
            flops_per_token=6.0,
            hardware_flops_per_token=8.0,
            peak_flops_per_gpu=peak,
            clock=clock,
        )
        run_iterations(rates, clock, (1.0, 1), (1.0, 1), (2.0, 20))
        report = rates.report(remaining_iterations=1)
        assert {name: report[name] for name in ("mfu", "hfu") if name in report} == pytest.approx(expected)


# Sinks that training can do without


class Broken:
    """A sink that fails at a chosen method, and counts."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at, self.written = fails_at, 0

    def write(self, iteration: int, values: Mapping[str, float | int]) -> None:
        self.written += 1
        if self.fails_at == "write":
            raise ConnectionError("network is gone\nand a long story")

    def close(self) -> None:
        if self.fails_at == "close":
            raise ConnectionError("network is gone\nand a long story")


@pytest.mark.parametrize("fails_at", ["open", "write", "close"])
def test_failing_background_sink_is_reported_once_and_ends(fails_at: str) -> None:
    said: list[str] = []
    inner = Broken(fails_at)

    def open_inner() -> Broken:
        if fails_at == "open":
            raise ConnectionError("network is gone\nand a long story")
        return inner

    sink = BackgroundSink("wandb", open_inner, said.append)
    for iteration in range(5):
        sink.write(iteration, {"loss": 1.0})
    sink.close()
    sink.write(9, {"loss": 1.0})
    assert len(said) == 1 and said[0].startswith(
        "wandb is off for the rest of this run (ConnectionError: network is gone)."
    )
    assert inner.written == {"open": 0, "write": 1, "close": 5}[fails_at]


def test_hanging_background_sink_delays_nothing() -> None:
    said: list[str] = []
    never = threading.Event()

    def hang() -> Broken:
        never.wait()
        raise ConnectionError("given up")

    sink = BackgroundSink("wandb", hang, said.append, close_timeout_s=0.01)
    sink.write(1, {"loss": 1.0})
    sink.close()
    never.set()
    sink._thread.join()
    assert len(said) == 1 and "wandb did not finish" in said[0]


def test_lines_that_a_slow_sink_has_no_room_for_are_dropped_and_said_once() -> None:
    said: list[str] = []
    taken: list[int] = []
    asked, ready = threading.Event(), threading.Event()

    class Slow(Broken):
        def write(self, iteration: int, values: Mapping[str, float | int]) -> None:
            asked.set()
            ready.wait()
            taken.append(iteration)

    sink = BackgroundSink("MLflow", lambda: Slow("nothing"), said.append, most_numbers=10)
    for iteration in range(1, 8):
        sink.write(iteration, {"loss": 1.0, "mtp_loss": [1.0, 2.0]})
        asked.wait()
    ready.set()
    while len(taken) < 3:
        pass
    sink.write(8, {"loss": 1.0, "expert_load": {"0": [0.0] * 100}})
    sink.close()
    assert taken == [1, 2, 3, 8]  # three numbers a line; a line alone is taken whatever its size
    assert said == [
        "MLflow is too slow: 10 numbers wait for it, and lines from iteration 4 on are dropped while they do. "
        "Training goes on; metrics.jsonl has every number."
    ]


def test_sinks_end_side_by_side() -> None:
    """Each waits for the others to have been asked to end, too: one after the other, the first would never do."""
    said: list[str] = []
    ending = threading.Barrier(3)

    class Slow(Broken):
        def close(self) -> None:
            ending.wait(timeout=20)

    names = ("TensorBoard", "wandb", "MLflow")
    Sinks(sinks=tuple(BackgroundSink(name, lambda: Slow("nothing"), said.append) for name in names)).close()
    assert said == []


def test_what_a_failed_sink_says_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", CANARY)
    said: list[str] = []

    def open_inner() -> Broken:
        raise ConnectionError(f"{CANARY} is not welcome at https://me:{CANARY[:-1]}@host/")

    BackgroundSink("MLflow", open_inner, said.append).close()
    assert "([redacted] is not" not in said[0] and "[redacted] is not welcome at https://[redacted]@host/" in said[0]
    assert CANARY[:-1] not in said[0]


def test_values_handed_to_a_background_sink_are_a_copy() -> None:
    seen: list[Mapping[str, float | int]] = []
    ready = threading.Event()

    class Keeper(Broken):
        def write(self, iteration: int, values: Mapping[str, float | int]) -> None:
            ready.wait()
            seen.append(values)

    values = {"loss": 1.0}
    sink = BackgroundSink("TensorBoard", lambda: Keeper("nothing"), ignore)
    sink.write(1, values)
    values["loss"] = 2.0
    ready.set()
    sink.close()
    assert seen == [{"loss": 1.0}]


# All of it


def test_secrets_are_redacted_and_ordinary_names_are_not() -> None:
    config: dict[str, object] = {
        "HF_TOKEN": "x",
        "MY_KEY_FILE": "x",
        "db_password": 1234,
        "section": {"api_key": ["x"], "tokenizer": "bytes", "num_tokens": 5},
        "megatron": [
            "moe_token_dispatcher_type=alltoall",
            "apply_query_key_layer_scaling=true",
            "hub_token = x",
        ],
    }
    assert redacted(config) == {
        "HF_TOKEN": REDACTED,
        "MY_KEY_FILE": REDACTED,
        "db_password": REDACTED,
        "section": {"api_key": REDACTED, "tokenizer": "bytes", "num_tokens": 5},
        "megatron": [
            "moe_token_dispatcher_type=alltoall",
            "apply_query_key_layer_scaling=true",
            f"hub_token={REDACTED}",
        ],
    }


def test_sinks_and_rates_import_no_torch() -> None:
    modules = ("rates", "sinks")  # these import the others, except `recorder`, which asks the ranks
    program = "import sys\n" + "".join(f"import training.metrics.{name}\n" for name in modules)
    program += "print({'torch', 'megatron', 'wandb', 'tensorboard'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("tensorboard", [True, False])
def test_only_the_sinks_asked_for_leave_files(tmp_path: Path, tensorboard: bool) -> None:
    sinks = open_sinks(tmp_path, Log(tensorboard=tensorboard), RunFacts(train_iters=3), ignore)
    sinks.write(1, {"loss": 1.0})
    sinks.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events"] * tensorboard + ["metrics.jsonl"]
