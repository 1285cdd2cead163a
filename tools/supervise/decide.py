"""Whether to start a run again after an attempt ended, and one line why: pretrain.sbatch and loop.sh ask this.

    python -m tools.supervise.decide --run_dir DIR --exit_code N [--max_attempts 5] [--bad_node NAME ...]
    python -m tools.supervise.decide --run_dir DIR --before FILE    (before an attempt; the same behind it, with N)

The marker `done`: no. Exit code 2, bad input: never. Exit code 75 or the marker `requeue`, stopped on request: yes,
and no failure. All else is a failure: yes, until max_attempts of them in a row committed no checkpoint, or two in a
row ended at the same iteration with the same words about program or data. What happened is kept in
RUN_DIR/attempts.jsonl; attempts of an earlier job (SLURM_JOB_ID) count no more.

Exit code 0: start again. 1: do not. 2: usage.
"""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro

from program import command
from program.errors import UserError, printable
from program.flags import parse_flags
from program.untrusted import InputError, read_json
from tools.shared.written import check_file, is_list_of_nodes
from tools.supervise import attempts, evidence, rule
from tools.supervise.attempts import AttemptRecord
from tools.supervise.rule import Decision, RunAttempt


@dataclass(kw_only=True)
class Decide:
    """Whether to start a run again after an attempt ended."""

    run_dir: Path
    """The run's folder."""

    exit_code: int | None = None
    """Exit code of the command that ran the attempt. None: there is an attempt to come, see --before."""

    max_attempts: int = 5
    """Give up after this many failures in a row without a new checkpoint."""

    bad_node: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A node that was found bad in this attempt; once for each."""

    before: Path | None = None
    """What lay in the run's folder before the attempt: written without --exit_code, else read. Without it, or where it
    cannot be read: what the last attempt on record has left."""

    exclude_file: Path | None = None
    """Written with the nodes that the next attempt should do without, one a line: the bad ones of all attempts of
    this job, and a node that two verdicts in a row named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: start again; 1: do not; 2: usage."""
    job = parse_flags(Decide, argv, "python -m tools.supervise.decide", __doc__)
    if job.exclude_file is not None:
        check_file(job.exclude_file, "--exclude_file", is_list_of_nodes, ("excluded_nodes.*",))
    if job.exit_code is None:
        if job.before is None:
            raise UserError("python -m tools.supervise.decide: give --exit_code N, or --before FILE to write.")
        job.before.write_text(json.dumps(asdict(evidence.left(job.run_dir))))
        return 0
    decision = settle(job, job.exit_code, os.environ)
    if job.exclude_file is not None:
        text = "".join(f"{node}\n" for node in decision.exclude)
        with contextlib.suppress(OSError):  # a hint; what decides is the exit code
            job.exclude_file.write_text(text)
    print(printable(decision.why), flush=True)
    return 0 if decision.again else 1


def settle(job: Decide, exit_code: int, environ: Mapping[str, str]) -> Decision:
    """Decide by what lies in the run's folder, and remember it there.

    Where nothing can be remembered nothing is started again: a crash loop would have no end.
    """
    name = environ.get("SLURM_JOB_ID", "")
    try:
        records, damaged = attempts.read(job.run_dir)
        own = attempts.of_job(records, name)
        attempt, markers = _attempt(job, exit_code, own or records)
        decision = rule.decide(attempt, [record.attempt for record in own], job.max_attempts)
        # A verdict cannot tell a bad node from a bad program where there is only one.
        named = decision.exclude if environ.get("SLURM_JOB_NUM_NODES", "1") != "1" else ()
        exclude = [*(own[-1].exclude if own else ()), *job.bad_node, *named]
        lost = f" ({damaged} unreadable lines in {attempts.ATTEMPTS} are left out)" if damaged else ""
        decision = replace(decision, why=decision.why + lost, exclude=tuple(dict.fromkeys(exclude)))
        attempts.append(
            job.run_dir,
            AttemptRecord(
                attempt=attempt,
                job=name,
                time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                nodes=environ.get("SLURM_JOB_NODELIST") or socket.gethostname(),
                again=decision.again,
                why=decision.why,
                exclude=decision.exclude,
                markers=markers,
            ),
        )
    except OSError as error:
        path = job.run_dir / attempts.ATTEMPTS
        why = f"{rule.how(exit_code)}; attempts cannot be counted in {path} ({error.strerror}): not started again"
        return Decision(again=False, why=why, exclude=job.bad_node)
    return decision


def _attempt(job: Decide, exit_code: int, earlier: Sequence[AttemptRecord]) -> tuple[RunAttempt, dict[str, int]]:
    """The attempt that just ended, by what has changed since before it; and the markers that are there."""
    run_dir, now = job.run_dir, evidence.left(job.run_dir)
    before = evidence.Left(markers=earlier[-1].markers, iteration=earlier[-1].attempt.after) if earlier else None
    if job.before is not None:
        with contextlib.suppress(OSError, InputError):
            before = read_json(job.before, evidence.Left)
    new = evidence.fresh(now.markers, before.markers if before else {})
    verdict = evidence.read_verdict(run_dir) if evidence.VERDICT in new else evidence.EndEvidence()
    attempt = RunAttempt(
        exit_code=exit_code,
        before=before.iteration if before else None,
        after=now.iteration,
        done="done" in new,
        requeue="requeue" in new,
        verdict=verdict.text,
        node=verdict.node,
        cause=verdict.cause,
    )
    return attempt, now.markers


if __name__ == "__main__":
    raise SystemExit(command.run("tools.supervise.decide", main))
