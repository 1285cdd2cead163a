"""Effective training time: the simulation against the closed form, and what the tool prints."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.faults.results import CaseResult
from tools.plan.__main__ import main
from tools.plan.goodput.model import simulate
from training.checkpoint.young_daly import CAUSES, FaultTimes, advised_interval_s, closed_form

HOUR_S = 3600.0
OFTEN = FaultTimes(
    mtbf_s=HOUR_S, interval_s=600.0, stall_s=20.0, commit_s=0.0, verdict_s=30.0, queueing_s=50.0, restart_s=240.0
)
CASES = {
    "often": OFTEN,
    "rare": dataclasses.replace(OFTEN, mtbf_s=500 * HOUR_S),
    "in the background": dataclasses.replace(OFTEN, commit_s=300.0),
    "longer in the background than between saves": dataclasses.replace(OFTEN, commit_s=1000.0),
    "hardly ever a save": dataclasses.replace(OFTEN, interval_s=1.5 * HOUR_S),
    "restarts that fail": dataclasses.replace(OFTEN, restart_s=1.5 * HOUR_S),
    "nothing but lost work": dataclasses.replace(OFTEN, stall_s=0.0, verdict_s=0.0, queueing_s=0.0, restart_s=0.0),
}


@pytest.mark.parametrize("times", CASES.values(), ids=CASES.keys())
def test_the_simulation_agrees_with_the_closed_form(times: FaultTimes) -> None:
    expected = closed_form(times)
    simulated = simulate(times, 20_000 * times.mtbf_s, seed=1)
    for cause in CAUSES:
        assert simulated[cause] == pytest.approx(expected[cause], rel=0.05, abs=2e-3), cause
    for shares in (expected, simulated):
        assert tuple(shares) == CAUSES
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) >= 0


def test_without_a_time_to_commit_it_is_dalys() -> None:
    """T = M exp(R / M) (exp((t + d) / M) - 1) for t seconds of training, with all of R a restart."""
    from math import exp

    times = dataclasses.replace(OFTEN, verdict_s=0.0, queueing_s=0.0)
    mean, cycle = times.mtbf_s, times.interval_s + times.stall_s
    total_s = mean * exp(times.restart_s / mean) * (exp(cycle / mean) - 1)
    assert closed_form(times)["training"] == pytest.approx(times.interval_s / total_s)


def test_the_advised_interval_is_the_best_one() -> None:
    for stall_s, mean_s in ((5.0, 3 * HOUR_S), (60.0, 2 * HOUR_S), (300.0, HOUR_S)):
        best = dataclasses.replace(OFTEN, stall_s=stall_s, mtbf_s=mean_s)
        share = {
            factor: closed_form(
                dataclasses.replace(best, interval_s=factor * advised_interval_s(stall_s, mean_s))
            )["training"]
            for factor in (0.5, 0.9, 1.0, 1.1, 2.0)
        }  # fmt: skip
        assert max(share, key=lambda factor: share[factor]) == 1.0


def test_a_short_simulation_without_a_failure_is_whole() -> None:
    shares = simulate(dataclasses.replace(OFTEN, mtbf_s=1e12), 10 * 620.0, seed=0)
    assert shares["training"] == pytest.approx(600 / 620)
    assert shares["stall"] == pytest.approx(20 / 620)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "--days", "100"]) == 0
    printed = capsys.readouterr().out
    assert "1,024 GPUs: a failure every 2.0 days, a save every 22.0 minutes\n" in printed
    assert "16,384 GPUs: a failure every 3.1 hours, a save every 5.5 minutes\n" in printed
    assert "effective training time 93.9% expected" in printed
    assert "97 %    9,600 GPUs" in printed
    assert main(["goodput", "--days", "100"]) == 0
    assert capsys.readouterr().out == printed  # the same seed
    assert main(["goodput", "--num_gpus", "64", "--save_interval_s", "7200", "--days", "10"]) == 0
    assert (
        "64 GPUs: a failure every 32.6 days, a save every 2.0 hours (advised: 88.3 minutes)" in capsys.readouterr().out
    )


def test_a_runs_own_stall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalls = enumerate((9.0, 0.25, 0.2), start=1)
    lines = [json.dumps({"iteration": number, "loss": 1.0, "checkpoint_stall_s": stall}) for number, stall in stalls]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["goodput", "--run_dir", str(tmp_path), "--days", "1"]) == 0
    assert capsys.readouterr().out.startswith("a save stops training for 0.25 s")


def test_times_of_faults_come_from_the_campaign_s_own_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(case: str, **facts: str) -> CaseResult:
        columns = {"phase": "step", "printed": "words", "lost": "1", "weights": "equal", **facts}
        return CaseResult(campaign="jobs", case=case, kind=case, outcome="", seconds=1.0, problem="", facts=columns)

    results = [
        row("transient: kill -9", verdict_s="0.2", again_s="21.0"),
        row("transient: SIGSTOP", verdict_s="9.0", again_s="25.5"),
        row("transient: NaN", verdict_s="–", again_s="–"),
        row("transient: requeue", verdict_s="1.0", again_s="30.0"),
        row("operator: bad recipe", verdict_s="99.0", again_s="–"),
    ]
    (tmp_path / "faults.md").write_text("# Faults\n\n| a | b |\n|---|---|\n\n" + "\n".join(jobs.table(results)) + "\n")
    assert main(["goodput", "--faults", str(tmp_path / "faults.md"), "--days", "1"]) == 0
    assert "; verdict 1 s, queueing 60 s, restart 25.5 s; " in capsys.readouterr().out
    (tmp_path / "faults.md").write_text("# Faults\n\n| Injected | Phase |\n|---|---|\n| transient: x | y |\n")
    assert main(["goodput", "--faults", str(tmp_path / "faults.md")]) == 2
    assert 'no transient fault with "To verdict, s"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num_gpus", "0"], "--num_gpus must be 1 to 1,000,000,000, found 0."),
        (["--num_gpus", "9" * 40], "--num_gpus must be 1 to 1,000,000,000, found a number of more than 18 digits."),
        (["--failures_per_gpu_hour", "1e-308"], "--failures_per_gpu_hour must be between 1e-12 and 1e+12"),
        (["--days", "1e9"], "16,384 GPUs fail about 7.9e+09 times, at most 20,000,000 can be simulated."),
        (["--failures_per_gpu_hour", "0"], "--failures_per_gpu_hour must be above 0, found 0.0."),
        (["--stall_s", "-1"], "--stall_s must be 0 or more, found -1.0."),
        (["--restart_s", "nan"], "--restart_s must be 0 or more, found nan."),
        (["--num_gpus", "100000000"], "a failure every 1.8 s never lets a restart of 180 s end."),
        (["--run_dir", "no"], "no/metrics.jsonl: No such file or directory."),
    ],
)
def test_mistakes(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    command = [sys.executable, "-m", "tools.plan", "goodput", "--days", "1"]
    root = Path(__file__).resolve().parents[3]
    run = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.close()
    _, said = run.communicate()
    assert (said, run.returncode) == (b"", 0)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tools.plan.goodput.command, tools.supervise.decide\n"
        "import training.watchdog.exit_code_file\n"
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
