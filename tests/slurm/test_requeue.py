"""slurm/pretrain.sbatch on a real SLURM: which jobs start again, and which never do. Ranks are tiny programs."""

import json
import signal
from pathlib import Path

import pytest

import together
from tests.faults.private_cluster import PrivateCluster, ranks_left
from tests.slurm.submission import checkout, run_job, submit

TRAINER = """
import os, signal, sys, time
from pathlib import Path
restarts, rank = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.environ["SLURM_PROCID"]
run_dir = Path("run")

def leave(number, frame):
    print(f"rank {rank} heard {signal.Signals(number).name}", flush=True)
    if rank == "0":
        (run_dir / "requeue").write_text("7")
    time.sleep(0.5)
    sys.exit(75)

signal.signal(signal.SIGUSR2, leave)
signal.signal(signal.SIGTERM, leave)
print(f"rank {rank} is up in start {restarts + 1}", flush=True)
time.sleep(0 if restarts else 600)
if rank == "0":
    (run_dir / "done").write_text("9")
"""
"""Stands in for a run that, asked to stop, saves and leaves the marker, and that is done in its second start."""


def scenario_a_bad_node_is_left_out_of_the_next_start(cluster: PrivateCluster, tmp_path: Path) -> None:
    job = doctored(cluster, tmp_path, "n2", "")
    ended = cluster.wait(job)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), ended.output
    assert "the doctor finds n2 bad" in ended.output and "next time without n2,n4,n5,n6,n7,n8\n" in ended.output
    assert ended.output.count("trained on n[1,3]") == 4 and ended.output.count("trained") == 4
    assert attempts(tmp_path)[0]["exclude"] == ["n2"]


@pytest.mark.campaign
def scenario_bad_nodes_are_left_out_of_the_next_start_while_there_are_others(
    cluster: PrivateCluster, tmp_path: Path
) -> None:
    """Then n3, too: n2 must serve."""
    job = doctored(cluster, tmp_path, "n2", "n3", "")
    ended = cluster.wait(job)
    assert (ended.state, ended.restarts) == ("COMPLETED", 2), ended.output
    assert "the doctor finds n2 bad" in ended.output and "next time without n2,n4,n5,n6,n7,n8\n" in ended.output
    assert (
        "not all of n2,n3 can be left out" in ended.output and "next time without n3,n4,n5,n6,n7,n8\n" in ended.output
    )
    assert ended.output.count("trained on n[1-2]") == 4 and ended.output.count("trained") == 4
    assert cluster.show(job)["ExcNodeList"] in ("n3,n4,n5,n6,n7,n8", "n[3-8]"), "as it was given, or as SLURM folds it"
    assert attempts(tmp_path)[1]["exclude"] == ["n2", "n3"]
    assert ended.output.count("--time_limit_s 81 --cluster h100_ib\n") == 3, "of the doctor, which ends by itself"


def scenario_scancel_stays_cancelled_with_nothing_left(cluster: PrivateCluster, tmp_path: Path) -> None:
    job = submit(cluster, checkout(tmp_path, TRAINER))
    cluster.until(job, lambda: cluster.output(job).count("is up in start 1") == 4)
    assert len(ranks_left(cluster, job)) >= 5
    cluster.run("scancel", str(job))
    ended = cluster.wait(job)
    assert (ended.state, ended.restarts) == ("CANCELLED", 0), ended.output
    assert "heard SIGTERM" in ended.output and "requeue" not in ended.output
    cluster.until(job, lambda: not ranks_left(cluster, job))
    assert not (tmp_path / "run/attempts.jsonl").exists(), "what SLURM ends is not our attempt"


def scenario_bad_input_of_a_rank_of_srun_is_never_retried(cluster: PrivateCluster, tmp_path: Path) -> None:
    """Of one rank: its code is hidden by the end of the others; by torchrun in tests/tools/test_supervise_runs.py."""
    program = """
import os, sys, time
from training.watchdog.exit_code_file import exit_code_file
with exit_code_file(os.environ):
    if os.environ["SLURM_PROCID"] == "3":
        sys.exit(2)
    time.sleep(600)
"""
    job = run_job(cluster, checkout(tmp_path, program))
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), job.output
    assert "bad input" in job.output


@pytest.mark.campaign
def scenario_bad_input_of_another_job_on_the_folder_does_not_stop_this_one(
    cluster: PrivateCluster, tmp_path: Path
) -> None:
    """The second job is submitted by mistake: it is refused, and leaves its note. Then the first one crashes."""
    program = """
import os, sys, time
from pathlib import Path
from training.watchdog.exit_code_file import exit_code_file
if "--train.seed" in sys.argv:
    with exit_code_file(os.environ):
        sys.exit(2)
print("up", flush=True)
while not os.environ.get("SLURM_RESTART_COUNT") and not Path("crash").exists():
    time.sleep(0.1)
sys.exit(0 if os.environ.get("SLURM_RESTART_COUNT") else 1)
"""
    folder = checkout(tmp_path, program)
    first = submit(cluster, folder)
    cluster.until(first, lambda: cluster.output(first).count("up\n") == 4)
    second = run_job(cluster, folder, "recipe.toml", "--train.seed", "7")
    assert (second.state, second.exit_code, second.restarts) == ("FAILED", 2, 0), second.output
    (folder / "crash").touch()
    ended = cluster.wait(first)
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 1), ended.output
    left = [path.name for path in (folder / "run").iterdir()]
    assert left == ["attempts.jsonl"], "what a job is asked through the folder goes with it"


@pytest.mark.campaign
def scenario_program_that_cannot_be_opened_is_no_bad_input(cluster: PrivateCluster, tmp_path: Path) -> None:
    """Python itself ends with 2 then. The file server is mended by the next start."""
    folder = checkout(tmp_path, "print('trained')")
    (folder / "pretrain_gpt.py").rename(folder / "away.py")
    (folder / "site.env").write_text('[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || cp away.py pretrain_gpt.py\n')
    job = run_job(cluster, folder, CLUSTER_ENV="site.env")
    assert (job.state, job.restarts) == ("COMPLETED", 1) and job.output.count("trained\n") == 4, job.output
    assert "No such file" in job.output


@pytest.mark.campaign
def scenario_request_just_after_the_start_of_srun_is_heard(cluster: PrivateCluster, tmp_path: Path) -> None:
    """USR2, as near a time limit, between two commands of the batch shell: srun has begun, and it is not yet noted whom
    to tell."""
    folder = checkout(tmp_path, TRAINER)
    before = "trap '[[ $BASH_COMMAND != running=\\$1* ]] || kill -USR2 $$' DEBUG"
    (folder / "site.env").write_text(f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] && set -T && {before}\n')
    job = run_job(cluster, folder, CLUSTER_ENV="site.env")
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 1), job.output
    assert "stopped on request" in job.output


def scenario_request_that_no_rank_could_hear_yet_is_no_failure_and_a_crash_loop_stops(
    cluster: PrivateCluster, tmp_path: Path
) -> None:
    """Such ranks die of USR2."""
    program = """
import os, signal, time
signal.signal(signal.SIGUSR2, signal.SIG_DFL)
print("rank-is-up", flush=True)
time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") == "1" else 600)
raise SystemExit(1)
"""
    job = submit(cluster, checkout(tmp_path, program), MAX_ATTEMPTS="1")
    cluster.until(job, lambda: cluster.output(job).count("rank-is-up") == 4)  # lines of ranks mix
    cluster.run("scancel", "--batch", "--signal=USR2", str(job))
    ended = cluster.wait(job)
    assert (ended.state, ended.restarts) == ("FAILED", 1), ended.output
    heard, crashed = attempts(tmp_path)
    assert (heard["exit_code"], heard["again"], crashed["again"]) == (75, True, False)
    # srun reports its tasks' largest code: 143 where it terminated one, after another's exit, before its own exit
    assert ended.exit_code == crashed["exit_code"] in (1, 128 + signal.SIGTERM), ended.output


def scenario_doctor_that_hangs_is_not_waited_for(cluster: PrivateCluster, tmp_path: Path) -> None:
    folder = checkout(tmp_path, "print('trained')")
    (folder / "tools").mkdir()
    (folder / "tools/doctor.py").write_text("import time\ntime.sleep(600)\n")
    job = run_job(cluster, folder, DOCTOR="1", DOCTOR_TIMEOUT_S="2", PYTHON=str(doctored_python(folder)))
    assert job.state == "COMPLETED" and job.output.count("trained\n") == 4, job.output
    assert "the doctor had not ended after 2 s" in job.output


@pytest.mark.campaign
def scenario_chain_of_jobs_continues_the_run(cluster: PrivateCluster, tmp_path: Path) -> None:
    """Where a site forbids requeueing: jobs of one name, one at a time, each goes on where the last one stopped."""
    program = """
import os, time
from pathlib import Path
count = Path("run/count")
if os.environ["SLURM_PROCID"] == "0":
    assert not Path("run/running").exists(), "two at a time"
    Path("run/running").touch()
    step = int(count.read_text()) + 1 if count.exists() else 1
    time.sleep(1)
    count.write_text(str(step))
    Path("run/running").unlink()
    Path("run/done" if step == 2 else "run/requeue").write_text(str(step))
    raise SystemExit(0 if step == 2 else 75)
time.sleep(2)
"""
    folder = checkout(tmp_path, program)
    flags = ("--job-name", "chain", "--dependency", "singleton", "--no-requeue")
    jobs = [submit(cluster, folder, flags=flags) for _ in range(2)]
    ended = [cluster.wait(job) for job in jobs]
    assert [job.state for job in ended] == ["FAILED", "COMPLETED"], ended
    assert "SLURM did not requeue the job" in ended[0].output
    assert (folder / "run/count").read_text() == "2"


@pytest.mark.slurm
@pytest.mark.parametrize("name", together.names(globals()))
def test_jobs(name: str, played: together.Played) -> None:
    played[name].result()


def attempts(folder: Path) -> list[dict[str, object]]:
    """What tools.supervise.decide noted of the run in ``folder``."""
    return [json.loads(line) for line in (folder / "run/attempts.jsonl").read_text().splitlines()]


def doctored(cluster: PrivateCluster, tmp_path: Path, *bad: str) -> int:
    """A job whose doctor is a stand-in that finds these nodes bad, start by start. The user excluded n4 to n8."""
    folder = checkout(tmp_path, "import os\nprint('trained on', os.environ['SLURM_JOB_NODELIST'])")
    (folder / "tools").mkdir()
    (folder / "tools/doctor.py").write_text(
        "import os, pathlib, sys\n"
        "if os.environ['SLURM_PROCID'] != '0': sys.exit(0)\n"
        "print('asked', *sys.argv[1:], flush=True)\n"
        f"bad = {bad}[int(os.environ.get('SLURM_RESTART_COUNT', '0'))]\n"
        "pathlib.Path(sys.argv[sys.argv.index('--bad_nodes') + 1]).write_text(bad)\n"
        "sys.exit(bool(bad))\n"
    )
    environ = {"DOCTOR": "1", "PYTHON": str(doctored_python(folder)), "CLUSTER": "h100_ib", "DOCTOR_TIMEOUT_S": "100"}
    return submit(cluster, folder, flags=("--exclude", "n[4-8]"), **environ)


def doctored_python(folder: Path) -> Path:
    """An interpreter for which ``-m tools.doctor`` is the program in ``folder``."""
    python = folder / "doctored_python"
    python.write_text(
        '#!/bin/bash\n[ "$1 $2" = "-m tools.doctor" ] && set -- tools/doctor.py "${@:3}"\nexec .venv/bin/python "$@"\n'
    )
    python.chmod(0o755)
    return python
