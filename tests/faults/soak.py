"""A supervised run with faults at random moments for as long as it is let; then its report must tell that story.

    python -m tests.faults.soak --minutes 30 [--folder runs/soak] [--page docs/examples/report.html] [--seed N]

pretrain_gpt.py on 4 local ranks under tools/supervise/loop.sh. Ranks and launchers get SIGKILL, a rank SIGSTOP, a batch
becomes NaN, the run is asked to save and go on, its layout changes. Each fault is written down when it is injected, and
at the end compared with what the run's history and page say. Exit code 1 where they differ.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from program import command
from program.flags import parse_flags
from tests.faults.browser import problems_in_a_browser
from tests.faults.processes import Family, family, kill
from tests.faults.soak_program import FLAGS, NAN, ROOT
from tests.faults.soak_story import INJECTED, Injected, story_problems
from training.run_dir.history import Event, read_history
from training.start.record import last_line

RUN, RECIPE = "run", ROOT / "tests/faults/soak.toml"
FATAL = {"SIGKILL of a rank", "SIGKILL of the launcher", "SIGSTOP of a rank"}
KINDS = ("SIGKILL of a rank", "NaN", "SIGKILL of the launcher", "SIGSTOP of a rank", "request to go on", "layout")
LIMIT_S = 180.0
"""Within which a fault must be over: the run trains again, or has said what it found."""
ITERATIONS_PER_MINUTE = 2000
"""More than there will be: the soak ends the run, not its last iteration."""


@dataclass(kw_only=True)
class Soak:
    """A supervised run with faults at random moments; then its report must tell that story."""

    minutes: float = 30.0
    """How long faults are injected."""

    folder: Path = ROOT / "runs/soak"
    """Where it works; what was there is removed."""

    page: Path | None = None
    """Also put the page there, without this machine's paths. None: it stays in the run's folder."""

    seed: int = 0
    """Decides which faults come when."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the report tells what was injected."""
    job = parse_flags(Soak, argv, "python -m tests.faults.soak", __doc__)
    folder = job.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_data(folder)
    shutil.copy(RECIPE, folder / RECIPE.name)
    (folder / FLAGS).write_text("")
    began_s = time.time()
    with (folder / "console.log").open("wb") as console:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
        program = [sys.executable, "-m", "tests.faults.soak_program", RECIPE.name, "--run_dir", RUN]
        program += ["--train.train_iters", str(int(job.minutes * ITERATIONS_PER_MINUTE))]
        supervisor = subprocess.Popen(
            [ROOT / "tools/supervise/loop.sh", *program], cwd=folder, stdout=console, stderr=console,
            env=environ | {"PYTHON": sys.executable, "RUN_DIR": RUN, "BACKOFF_S": "1"},
        )  # fmt: skip
        try:
            injected = Injector(folder, supervisor, Random(job.seed)).run(60 * job.minutes)
        finally:
            supervisor.send_signal(signal.SIGTERM)
            code = supervisor.wait(LIMIT_S)
    problems = [] if code == 75 else [f"the supervisor ended with exit code {code}, expected 75"]
    problems += story_problems(folder / RUN, injected, began_s, time.time())
    problems += problems_in_a_browser(folder / RUN / "report.html", folder)
    if job.page is not None:
        job.page.parent.mkdir(parents=True, exist_ok=True)
        job.page.write_text((folder / RUN / "report.html").read_text().replace(f"{folder}/", ""))
    print(f"soak: {len(injected)} faults in {time.time() - began_s:.0f} s, {len(problems)} problems; {folder / RUN}")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def _write_data(folder: Path) -> None:
    """Two sources: what the repository says, and what it does."""
    for name, pattern in (("docs", "docs/*.md"), ("code", "training/**/*.py")):
        texts = (path.read_text() for path in sorted(ROOT.glob(pattern)))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


class Injector:
    """Injects one fault after the other, each when the one before is over."""

    def __init__(self, folder: Path, supervisor: subprocess.Popen[bytes], draw: Random) -> None:
        self.folder, self.run_dir, self.supervisor, self.draw = folder, folder / RUN, supervisor, draw
        self.injected: list[Injected] = []
        self.stages = 2

    def run(self, seconds: float) -> list[Injected]:
        """What was injected. Raises RuntimeError where a fault is not over in time."""
        end_s = time.monotonic() + seconds
        pause_s = min(60.0, max(8.0, seconds / 20))
        self._await("the first step", lambda: bool(self._events("first_step")))
        order = list(KINDS)
        while time.monotonic() + pause_s < end_s:
            time.sleep(self.draw.uniform(0.5, 1.5) * pause_s)
            if not order:
                order = self.draw.sample(KINDS, len(KINDS))
            self._inject(order.pop(0))
        return self.injected

    def _inject(self, kind: str) -> None:
        steps, found, now = len(self._events("first_step")), len(self._events("replayed")), self._family()
        if kind == "layout":
            self.stages = 3 - self.stages
            (self.folder / FLAGS).write_text(f"--parallel.pipeline_model_parallel_size {self.stages}")
        rank = self.draw.randrange(len(now.ranks))
        iteration = self._iteration()
        self._note(Injected(time_s=time.time(), kind=kind, rank=rank, iteration=iteration))
        if kind == "NaN":
            (self.folder / NAN).write_text(str(iteration + 40))
            self._await("the replay", lambda: len(self._events("replayed")) > found)
            (self.folder / NAN).unlink()  # the iteration may come again after the next fault
            return
        if kind == "SIGKILL of a rank":
            kill([now.ranks[rank]])
        elif kind == "SIGKILL of the launcher":
            kill([now.launcher])
        elif kind == "SIGSTOP of a rank":
            os.kill(now.ranks[rank].pid, signal.SIGSTOP)
        else:  # saves, ends and goes on, in the new layout if it is one
            self.supervisor.send_signal(signal.SIGUSR2)
        self._await("the next start's first step", lambda: len(self._events("first_step")) > steps)

    def _note(self, one: Injected) -> None:
        self.injected.append(one)
        with (self.folder / INJECTED).open("a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        print(f"soak: {one.kind} (rank {one.rank}) after iteration {one.iteration}", flush=True)

    def _family(self) -> Family:
        """The launcher and its ranks, once there are four that train."""
        found: list[Family] = []

        def look() -> bool:
            children = family(self.supervisor.pid).ranks  # the launcher, and the heartbeat of the run's lock
            found[:] = [each for child in children if len((each := family(child.pid)).ranks) == 4]
            return len(found) == 1

        self._await("four ranks", look)
        return found[0]

    def _iteration(self) -> int:
        iteration = last_line(self.run_dir / "metrics.jsonl").get("iteration")
        return iteration if isinstance(iteration, int) else 0

    def _events(self, name: str) -> list[Event]:
        return [event for event in read_history(self.run_dir) if event.event == name]

    def _await(self, what: str, over: object) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not over():  # type: ignore[operator]
            if self.supervisor.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come within {LIMIT_S:.0f} s; see {self.folder / 'console.log'}")
            time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(command.run("tests.faults.soak", main))
