"""The process beside each rank that says why a run stopped, and ends it.

A program of its own (exec), so that it inherits no lock, no thread and no CUDA, and goes on where its rank is stopped,
blocked or dead. It ends with its rank. Each one tells of its own rank's sudden death; the first one of a node that
works also tells the other nodes of the node's ranks, asks who stands where when nothing moves, and ends all ranks of
the node after a verdict. Every file on the shared file system is written or read by these first ones only.

Costs 16 MB of memory and 50 ms at the start for each rank, and one small file every few seconds (see ``pace``) for
each node.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from training.watchdog import pace, stacks, verdict_file
from training.watchdog.heartbeat import Page
from training.watchdog.node_monitor import NodeMonitor
from training.watchdog.pace import LOOK_S
from training.watchdog.process import Ending, lives, memory_kills, status
from training.watchdog.verdict import NodeReport, Verdict, decide_verdict

GRACE_S = 15.0
"""After a crash: the other ranks notice by themselves, or their launcher ends them; after that we do."""
DEPUTY_S = 45.0
"""So much beyond its timeout a rank's own watchdog acts, should the first one of the node be stuck."""
ASKED_S = 5.0
"""A rank that was asked to stop with its whole group, and could not note it, is given longer than this by SLURM, by
Kubernetes and by tools/supervise/loop.sh (30 s each) before SIGKILL. One that ends sooner ended by itself: loop.sh asks
what a launcher that was killed has left over, whose ranks may still be ending."""
AGAIN = 1 / 4
"""Of the timeout: after nodes were asked for nothing, they are not asked again before that. It costs all stacks."""
_ROOT = Path(__file__).resolve().parents[2]


def start(page: Path) -> subprocess.Popen[bytes]:
    """The watchdog of the rank that beats in ``page``. Raises OSError."""
    # Neither site-packages (-S) nor the environment's PYTHON... (-E): a third of the memory and of the start.
    command = [sys.executable, "-E", "-S", "-m", __name__, str(page)]
    return subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


class Watchdog:
    """What one watchdog knows."""

    def __init__(self, page: Page) -> None:
        self.page, self.about, self.folder = page, page.about, Path(page.about.folder)
        self.node = NodeMonitor(page, time.monotonic())
        self.own = self.node.peers[self.about.rank]
        self.ending = Ending(self.about.pid, self.about.process_start)
        mine = status(os.getpid(), None)
        self.asked_s, self.looks, self.start = float("inf"), 0, None if mine is None else mine.start
        self.next_s, self.answered, self.called_s, self.judging, self.unwritten = 0.0, "", float("-inf"), "", ""
        self.verdict: Verdict | None = None
        self.verdict_s = 0.0
        self.memory_kills = memory_kills()

    def run(self) -> None:
        """Watch until the rank has ended."""
        while not self.ending.within(LOOK_S):
            self.poll()
            late = self.own.still_s > self.own.timeout_s + DEPUTY_S
            if (self.node.leads or late) and time.monotonic() >= self.next_s:
                self.next_s = time.monotonic() + self.lead()
        self.poll()
        self.tell_of_sudden_death()
        self.leave()
        if self.about.rank == 0:
            from training.run_dir.report import report_for_the_dead  # only now: most watchdogs never need it

            report_for_the_dead(self.folder.parents[1])

    def poll(self, done: bool = False) -> None:
        self.looks += 1
        self.page.sign(os.getpid(), self.start, self.looks, done)
        self.node.poll(time.monotonic())

    @property
    def nodes(self) -> float:
        """How many there are, if all have as many ranks as this one."""
        return self.about.world_size / len(self.node.peers)

    @property
    def answer_s(self) -> float:
        return pace.answer_s(self.about.step_timeout_s, self.nodes)

    def lead(self) -> float:
        """What the first watchdog of a node does, and for how many seconds it then need not."""
        verdict = self.verdict or verdict_file.read(self.folder)
        if verdict is not None:
            self.enforce(verdict)
            return LOOK_S
        call = self.call()
        if call != self.answered:
            self.answer(call)
        mine = NodeReport(host=self.about.host, ranks=self.node.reports(), answers=self.answered)
        verdict_file.tell(self.folder, mine)
        if self.judging:
            self.decide(mine)
        elif call and self.node.stands_still and time.monotonic() > self.called_s + 3 * self.answer_s:
            self.judging = call  # the node that asked has gone since
        return pace.JUDGING_S if call else pace.beat_s(self.about.step_timeout_s, self.nodes)

    def call(self) -> str:
        """What the nodes are asked to answer, by whichever node; by this one, if nothing moves here. Or nothing: ''."""
        found = verdict_file.asked(self.folder)
        again_s = self.called_s + AGAIN * self.own.timeout_s
        if not found and self.node.stands_still and (self.unwritten or time.monotonic() > again_s):
            self.judging, self.unwritten = self.unwritten or os.urandom(8).hex(), ""
            try:
                verdict_file.ask(self.folder, self.judging)
                found = verdict_file.asked(self.folder)  # another node may have been first
            except OSError:  # a full disk, say: what is known here has to do
                self.unwritten = found = self.judging
        if found != self.judging:
            self.judging = ""  # the others answer the call that is there, so the node that made it judges
        return found

    def answer(self, call: str) -> None:
        """Let the ranks write their stacks, if they stand still; the next report answers the call."""
        self.answered = call
        if call:
            self.called_s = time.monotonic()
        if call and self.node.stands_still:
            text = self.node.take_stacks()
            with contextlib.suppress(OSError):
                self.stacks_file().write_text(text)

    def stacks_file(self) -> Path:
        return self.folder / f"stacks-{self.about.host}.txt"

    def decide(self, mine: NodeReport) -> None:
        """The verdict, once all nodes have answered or had the time to; none where a rank somewhere moves."""
        nodes = [mine, *(node for node in verdict_file.node_reports(self.folder) if node.host != mine.host)]
        reports = [report for node in nodes if node.answers == self.judging for report in node.ranks]
        if any(not report.overdue and report.state not in "XZ" for report in reports):
            verdict_file.drop(self.folder)
            self.judging = ""
            return
        waited_s = time.monotonic() - self.called_s
        if len(reports) >= self.about.world_size or waited_s > self.answer_s:
            self.pronounce(decide_verdict(nodes, self.judging, self.about.world_size, self.about.folder, waited_s))

    def pronounce(self, verdict: Verdict) -> None:
        """Say it, if it is the attempt's first; the launcher of local ranks says it itself."""
        if not verdict_file.leave(self.folder, verdict):
            return
        if not self.about.told_by_launcher:
            with contextlib.suppress(OSError):
                os.write(2, f"pretrain_gpt.py: {verdict.line}\n".encode())
        self.enforce(verdict)

    def enforce(self, verdict: Verdict) -> None:
        """End this node's ranks: at once after a hang, else when they have had time to end by themselves."""
        if self.verdict is None:
            self.verdict, self.verdict_s = verdict, time.monotonic()
            if verdict.kind == "hang" and (text := self.node.take_stopped_stacks()):
                with contextlib.suppress(OSError), self.stacks_file().open("a") as file:
                    file.write(f"\n{text}")
        if verdict.kind == "hang" or time.monotonic() > self.verdict_s + GRACE_S:
            self.node.send(signal.SIGKILL)

    def tell_of_sudden_death(self) -> None:
        """The rank has ended: say how, unless it said so itself, was asked to, or another one's failure came first."""
        end, at = status(self.about.pid, self.about.process_start), self.own.reading
        left_with_word = [peer.reading.code for peer in self.node.peers.values() if peer.reading.phase == "ended"]
        asked = time.monotonic() > self.asked_s + ASKED_S
        if at.phase == "ended" or at.asked or asked or any(left_with_word):
            return
        if verdict_file.read(self.folder) is not None:
            return
        how = "ended without a word (SIGKILL, or an exit that Python does not see)"
        if end is not None and end.ended_by:
            how = f"was killed by {signal.Signals(end.ended_by).name}"
        text = (verdict_file.content(self.own.stacks_file()) or b"").decode(errors="replace")
        if error := stacks.crash(text):
            stood = stacks.stand(text, self.about.main_thread)
            how = f"crashed ({error}{', at ' + stood.at if stood else ''})"
            how += " since a file that it reads became shorter, or its disk failed," if "Bus error" in error else ""
        elif memory_kills() > self.memory_kills:
            how += " by the kernel's out-of-memory killer"
        line = (
            f"rank {self.about.rank} of {self.about.world_size} on {self.about.host} {how} "
            f"in iteration {at.iteration}, phase {at.phase}"
        )
        line += f", within {inside}" if (inside := self.page.inside()) else ""
        self.pronounce(Verdict(
            kind="killed", rank=self.about.rank, world_size=self.about.world_size, host=self.about.host,
            iteration=at.iteration, phase=at.phase, line=line,
        ))  # fmt: skip

    def leave(self) -> None:
        """The last watchdog of a node takes the ranks' pages away, and after a regular end the node's file."""
        self.poll(done=True)
        for peer in self.node.peers.values():
            pid, started, _, done = peer.page.watchdog()
            if not done and lives(pid, started or None):
                return
        self.node.remove()
        if verdict_file.read(self.folder) is None:
            with contextlib.suppress(OSError):
                (self.folder / f"node-{self.about.host}.json").unlink(missing_ok=True)
                self.folder.rmdir()
                self.folder.parent.rmdir()


def main(path: str) -> None:
    """Watch the rank that beats in ``path``. Signals to whole groups mean only a request to stop."""
    try:
        watchdog = Watchdog(Page(Path(path)))
    except FileNotFoundError:  # the rank has ended before, and another watchdog of the node has cleared up
        return

    def hear(_number: int, _frame: FrameType | None) -> None:
        watchdog.asked_s = min(watchdog.asked_s, time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, hear)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watchdog.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
