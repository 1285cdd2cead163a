"""A rank without a watchdog of its own, that beats in iteration 5 and sleeps: ``python sleeper.py PAGE ABOUT MUTE``.

ABOUT: JSON of ``heartbeat.RankInfo`` but for the process. MUTE: 1: it does not write its stacks.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from program.processes import start_of
from training.watchdog import stacks
from training.watchdog.heartbeat import Heartbeat, RankInfo


def main(path: str, about: str, mute: str) -> None:
    """Until it is killed."""
    page = Path(path)
    if mute == "1":
        signal.signal(stacks.STACKS_SIGNAL, signal.SIG_IGN)
    else:
        stacks.register(page.with_suffix(".stacks"))
    main_thread, started = threading.main_thread().ident or 0, start_of(os.getpid())
    heartbeat = Heartbeat(
        page, RankInfo(pid=os.getpid(), process_start=started, main_thread=main_thread, **json.loads(about))
    )
    heartbeat.enter("step", 5)
    heartbeat.stepped()
    print("sleeps", flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
