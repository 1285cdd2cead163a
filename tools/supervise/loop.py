"""Attempts one after the other, until the rule or the operator says stop."""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import printable
from parallel.local_ranks import STOPPED
from tools.supervise import evidence
from tools.supervise.child import Child
from tools.supervise.decide import nodes_of, settle
from tools.supervise.notice import Notice
from tools.supervise.requests import Requests
from tools.supervise.rule import BAD_INPUT, Decision
from training.watchdog.exit_code_file import EXIT_CODE_FILE

POLL_S = 0.05
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_S = 300
"""How long a torchrun that is asked to end lets its ranks save; its own default, 30 s, is short for large models."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Budget:
    """How often, and how soon, a run that failed is started again."""

    max_attempts: int
    backoff_s: float
    max_backoff_s: float

    def pause_s(self, decision: Decision) -> float:
        """Before the next attempt: doubled with each failure in a row; none after a stop on request."""
        if decision.exit_code == STOPPED:
            return 0.0
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(64, max(0, decision.failures - 1)))


def supervise(command: Sequence[str], run_dir: Path, budget: Budget, requests: Requests, notice: Notice) -> int:
    """Run ``command`` until it is done, cannot be helped, or the operator ends it: the last attempt's exit code.

    Raises OSError where the command cannot be started.
    """
    job = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    number = 1
    while True:
        before, seen = evidence.newest_iteration(run_dir), evidence.marker_times(run_dir)
        code = attempt(command, requests, notice)
        decision = settle(
            run_dir,
            code,
            job=job,
            nodes=nodes_of(os.environ),
            single_node=True,
            max_attempts=budget.max_attempts,
            before=before,
            seen=seen,
            ended_by=requests.ended_by.name if requests.ended_by else "",
        )
        if not decision.again:
            say(f"attempt {number}: {decision.why}")
            return decision.exit_code
        pause_s = budget.pause_s(decision)
        say(f"attempt {number}: {decision.why}{f' in {pause_s:g} s' if pause_s else ''}")
        requests.next_attempt()
        rest(pause_s, requests, notice)
        if requests.ended_by:
            say(f"ended by {requests.ended_by.name} between two attempts; the same command continues {run_dir}")
            return decision.exit_code
        number += 1


def attempt(command: Sequence[str], requests: Requests, notice: Notice) -> int:
    """Run ``command`` once, handing on what is asked of it: its exit code, when nothing of it runs any more."""
    with tempfile.TemporaryDirectory(prefix="triplane-supervise-") as folder:
        code_file = Path(folder) / "exit_code"
        code = follow(
            Child(command, {SHUTDOWN: str(SHUTDOWN_S), **os.environ, EXIT_CODE_FILE: str(code_file)}), requests, notice
        )
        return BAD_INPUT if code_file.exists() else code


def follow(child: Child, requests: Requests, notice: Notice) -> int:
    """From its start until nothing of it runs any more: its exit code, 75 where a request ended it at once."""
    while (code := child.code()) is None:
        requests.hand_on(child)
        if notice.poll() and not requests.asked:
            say("notice: this machine is about to be taken away; the run is asked to save")
            requests.ask(child, signal.SIGUSR2)
        time.sleep(POLL_S)
    notice.close()
    if ended := child.end_leftovers():
        say(f"{ended} processes that were left over have been ended")
    unhandled = requests.asked and code in (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGUSR2)
    return STOPPED if unhandled and not requests.ended_by else code


def rest(pause_s: float, requests: Requests, notice: Notice) -> None:
    """Wait, and as long as a notice stands: what is about to be taken away is not started on again."""
    until_s = time.monotonic() + pause_s
    if notice.stands:
        say("waiting: the notice still stands")
    while not requests.ended_by and (time.monotonic() < until_s or notice.poll()):
        time.sleep(POLL_S)
    notice.close()


def say(text: str) -> None:
    """On stderr, among what the run itself prints."""
    print(printable(f"supervise: {text}"), file=sys.stderr, flush=True)
