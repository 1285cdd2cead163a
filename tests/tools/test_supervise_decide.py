"""Whether an ended run is started again: the rule as a table, and what it reads and remembers in a run's folder."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tools.supervise import decide, evidence, rule
from tools.supervise.attempts import ATTEMPTS
from tools.supervise.rule import RunAttempt
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST

Ask = Callable[..., tuple[int, str]]
CRASH = RunAttempt(exit_code=1)
FURTHER = RunAttempt(exit_code=1, before=10, after=20)
ASKED = RunAttempt(exit_code=75)
NAMED = RunAttempt(exit_code=143, node="n3", verdict="rank 5 on n3 hangs")
ALIKE = RunAttempt(exit_code=1, verdict="no", cause="iteration 9: no")


@pytest.mark.parametrize(
    ("attempt", "earlier", "again", "says"),
    [
        (RunAttempt(exit_code=0, done=True, after=30), [], False, "done with a checkpoint of iteration 30"),
        (RunAttempt(exit_code=1, done=True), [], False, "done"),  # torchrun, ranks that fail after the end
        (RunAttempt(exit_code=0), [], False, "did what was asked"),  # exit_interval
        (RunAttempt(exit_code=2), [], False, "bad input"),
        (RunAttempt(exit_code=2, requeue=True), [], False, "bad input"),
        (ASKED, [], True, "stopped on request"),
        (RunAttempt(exit_code=1, requeue=True), [], True, "stopped on request"),  # torchrun
        (RunAttempt(exit_code=0, requeue=True), [], True, "stopped on request"),  # a step that was cancelled
        (ASKED, [CRASH, CRASH], True, "no failure"),
        (ASKED, [ASKED] * 19, False, "20 times in a row"),
        (ASKED, [ASKED] * 10 + [FURTHER] + [ASKED] * 18, True, "stopped on request"),
        (CRASH, [], True, "exit code 1; failure 1 of 3"),
        (CRASH, [CRASH], True, "failure 2 of 3"),
        (CRASH, [CRASH, CRASH], False, "3 failures in a row without a new checkpoint: not started again"),
        (CRASH, [CRASH, ASKED, CRASH, ASKED], False, "3 failures in a row"),  # requests do not reset it
        (CRASH, [CRASH, CRASH, FURTHER], True, "failure 1 of 3"),
        (CRASH, [CRASH, CRASH, RunAttempt(exit_code=75, before=1, after=2)], True, "failure 1 of 3"),
        (FURTHER, [CRASH, CRASH], True, "iteration 20; there is a new checkpoint: started again"),
        (RunAttempt(exit_code=1, before=20, after=20), [CRASH, CRASH], False, "not started again"),
        (RunAttempt(exit_code=1, before=20, after=10), [CRASH, CRASH], False, "not started again"),
        (RunAttempt(exit_code=137), [], True, "ended by SIGKILL"),
        (NAMED, [CRASH], True, "ended by SIGTERM (rank 5 on n3 hangs)"),
        (NAMED, [NAMED, ASKED], True, "n3 was named twice in a row"),
        (ALIKE, [], True, "failure 1 of 3"),
        (ALIKE, [ALIKE, ASKED], False, "(no); the same as the last time, at the same iteration: program or"),
        (ALIKE, [replace(ALIKE, before=0, after=8)], False, "not started again"),  # what went on led there again
        (ALIKE, [ALIKE, FURTHER], True, "failure 1 of 3"),
        (ALIKE, [replace(ALIKE, cause="iteration 8: no")], True, "failure 2 of 3"),
    ],
)  # fmt: skip
def test_the_rule(attempt: RunAttempt, earlier: list[RunAttempt], again: bool, says: str) -> None:
    decision = rule.decide(attempt, earlier, max_attempts=3)
    assert decision.again == again
    assert says in decision.why
    assert "\n" not in decision.why
    assert decision.exclude == (("n3",) if "twice" in says else ())


def commit(run_dir: Path, iteration: int) -> None:
    """What counts as a checkpoint."""
    root = folders.checkpoints(run_dir)
    folder = root / folders.name_of(iteration)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    folders.point_to(folder)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Asks about an attempt that ended with a code: (the exit code of decide, its line)."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")

    def ask(code: int, *flags: str) -> tuple[int, str]:
        found = decide.main(
            ["--run_dir", str(tmp_path / "run"), "--exit_code", str(code), "--max_attempts", "2", *flags]
        )
        printed = capsys.readouterr().out
        assert printed.count("\n") == 1
        return found, printed

    return ask


def test_a_crash_loop_ends_and_a_checkpoint_begins_the_count_anew(ended: Ask, tmp_path: Path) -> None:
    assert ended(1)[0] == 0  # makes the folder of a run that never began
    assert ended(1) == (1, "exit code 1; 2 failures in a row without a new checkpoint: not started again\n")
    commit(tmp_path / "run", 10)
    assert ended(1)[0] == 0
    assert ended(1) == (0, "exit code 1 with a checkpoint of iteration 10; failure 1 of 2 without a new checkpoint: "
                           "started again\n")  # fmt: skip
    (tmp_path / "run/checkpoints/iter_0000020.tmp-x").mkdir()  # never committed
    assert ended(1)[0] == 1


def test_a_new_job_has_a_budget_of_its_own(ended: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ended(1)[0] for _ in range(2)] == [0, 1]
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert [ended(1)[0] for _ in range(2)] == [0, 1]


def test_a_marker_counts_once(ended: Ask, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/requeue").write_text("5\n")
    assert ended(1)[1].startswith("stopped on request")
    assert ended(1)[1].startswith("exit code 1; failure 1 of 2")  # it died before it could take the marker away
    (tmp_path / "run/requeue").write_text("9\n")
    assert ended(1)[1].startswith("stopped on request")
    (tmp_path / "run/done").write_text("10\n")
    assert ended(0) == (1, "done\n")
    assert ended(143)[1].startswith("ended by SIGTERM; 2 failures")


def test_what_lay_there_before_the_attempt_is_not_its_own(ended: Ask, tmp_path: Path) -> None:
    """Of an earlier run that nothing has recorded, and of another host's loop, which was first to note this attempt."""
    commit(tmp_path / "run", 10)
    for name in ("done", "requeue"):
        (tmp_path / "run" / name).write_text("10\n")
    before = ("--before", str(tmp_path / "before"))
    assert decide.main(["--run_dir", str(tmp_path / "run"), *before]) == 0
    assert ended(1, *before) == (0, "exit code 1 with a checkpoint of iteration 10; failure 1 of 2 without a new "
                                    "checkpoint: started again\n")  # fmt: skip
    commit(tmp_path / "run", 20)
    assert "there is a new checkpoint" in ended(1, *before)[1]
    assert "there is a new checkpoint" in ended(1, *before)[1]


def test_verdicts_are_told_and_their_node_is_excluded(ended: Ask, tmp_path: Path) -> None:
    verdict, exclude = tmp_path / "run/watch/start-a/verdict.json", tmp_path / "exclude"
    verdict.parent.mkdir(parents=True)
    flags = ("--exclude_file", str(exclude), "--max_attempts", "99")
    verdict.write_text(json.dumps({"kind": "hang", "line": "rank 1 hangs", "host": "n1", "rank": 1}))
    assert "(rank 1 hangs)" in ended(1, *flags)[1]
    assert "hangs" not in ended(1, *flags)[1]  # an old one
    assert exclude.read_text() == ""
    for _ in range(2):
        verdict.write_text(json.dumps({"kind": "killed", "line": "rank 1\nhangs", "host": "n2", "rank": None}))
        assert "(rank 1 hangs)" in ended(1, *flags, "--bad_node", "n4")[1]
    assert exclude.read_text() == "n4\nn2\n"
    ended(1, *flags, "--bad_node", "n5", "--bad_node", "n4")
    assert exclude.read_text() == "n4\nn2\nn5\n"
    verdict.write_text('{"line": ')
    assert ended(1, *flags)[0] == 0


KILLED = "rank 3 of 8 on n6 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("kind", "line", "blamed", "own"),
    [
        ("hang", "rank 3 of 8 on n6 hangs", True, False),
        ("killed", KILLED, True, False),
        ("lost", "node n6 is gone", True, False),
        ("killed", f"{KILLED} by the kernel's out-of-memory killer", False, False),
        ("echo", "RuntimeError: Connection reset by peer", False, False),
        ("exception", "ValueError: no", False, True),
        ("exception", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", False, False),
        ("exception", "RuntimeError: CUDA error: uncorrectable ECC error", True, False),
        ("exception", "OSError: [Errno 28] No space left on device", False, False),
        ("fault", "after iteration 4: weights of rank 3 (n6) differ", True, False),
    ],
)
def test_who_is_blamed_for_what(kind: str, line: str, blamed: bool, own: bool, tmp_path: Path) -> None:
    """own: program or data, which would end every attempt alike."""
    table = {"kind": kind, "line": line, "host": "n6", "iteration": 9, "phase": "step"}
    path = tmp_path / "watch/start-a/verdict.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(table))
    verdict = evidence.read_verdict(tmp_path)
    assert (verdict.node, verdict.cause) == ("n6" if blamed else "", f"iteration 9: {line}" if own else "")
    path.write_text(json.dumps(table | {"host": "", "phase": "start"}))
    assert evidence.read_verdict(tmp_path) == evidence.EndEvidence(text=line)


def test_a_fault_that_names_no_host_is_of_program_or_data(ended: Ask, tmp_path: Path) -> None:
    path = tmp_path / "run/watch/start-a/verdict.json"
    path.parent.mkdir(parents=True)
    table = {"kind": "fault", "line": "iteration 9: loss nan", "host": "", "iteration": 9, "phase": "step"}
    path.write_text(json.dumps(table))
    assert ended(1)[0] == 0
    path.write_text(json.dumps(table))
    code, said = ended(1, "--max_attempts", "99")
    assert code == 1
    assert "(iteration 9: loss nan); the same as the last time" in said


def test_one_node_is_never_excluded(ended: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    verdict, exclude = tmp_path / "run/watch/start-a/verdict.json", tmp_path / "exclude"
    verdict.parent.mkdir(parents=True)
    for _ in range(2):
        verdict.write_text(json.dumps({"kind": "hang", "line": "rank 1 hangs", "host": "n1"}))
        ended(1, "--exclude_file", str(exclude))
    assert exclude.read_text() == ""


def test_damaged_lines_are_left_out_and_said(ended: Ask, tmp_path: Path) -> None:
    ended(1)
    path = tmp_path / "run" / ATTEMPTS
    whole = path.read_bytes()
    path.write_bytes(
        b"\xff\xfe\n[]\n" + b'{"exit_code": "x", "job": "7"}\n' + whole + whole[:40]
    )  # the last: a full disk
    code, line = ended(1)
    assert code == 1
    assert "2 failures in a row" in line
    assert f"(4 unreadable lines in {ATTEMPTS} are left out)" in line
    assert json.loads(path.read_text(errors="replace").splitlines()[-1])["again"] is False


def test_what_cannot_be_remembered_is_not_started_again(ended: Ask, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    code, line = ended(1)
    assert code == 1
    assert "attempts cannot be counted" in line
    assert "not started again" in line


def test_what_is_remembered(ended: Ask, tmp_path: Path) -> None:
    os.environ["SLURM_JOB_NODELIST"] = "n[1-2]"
    try:
        commit(tmp_path / "run", 3)
        ended(1)
        commit(tmp_path / "run", 6)
        ended(143)
    finally:
        del os.environ["SLURM_JOB_NODELIST"]
    first, second = map(json.loads, (tmp_path / "run" / ATTEMPTS).read_text().splitlines())
    assert (first["before"], first["after"], first["exit_code"]) == (None, 3, 1)
    assert (second["before"], second["after"], second["exit_code"], second["nodes"]) == (3, 6, 143, "n[1-2]")
    assert second["why"].startswith("ended by SIGTERM with a checkpoint of iteration 6")


def test_the_batch_script_refuses_counts_that_are_none_before_it_starts() -> None:
    environ = {**os.environ, "MAX_ATTEMPTS": "five"}
    done = subprocess.run(["bash", "slurm/pretrain.sbatch", "x.toml"], env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "pretrain.sbatch: MAX_ATTEMPTS: expected a whole number from 1 on, found 'five'\n"
