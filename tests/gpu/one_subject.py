"""One subject in a process of its own: python -m tests.gpu.one_subject MODULE:FUNCTION FOLDER

FOLDER/task.json says what there is; what the subject finds comes into FOLDER/found.json.
"""

import importlib
import sys
import time
import traceback
from pathlib import Path

from program import command
from program.errors import UserError
from program.untrusted import read_json
from tests.gpu.machine import GpuMachine
from tests.gpu.sizes import SIZES
from tests.gpu.subject_run import SubjectRun, UnrunError


def main(function: str, folder: str) -> int:
    """Exit code 0: found.json says all; 2: a user's mistake, which is its problem."""
    task = read_json(Path(folder, "task.json"))
    run = SubjectRun(
        machine=GpuMachine.read(task["machine"]),
        sizes=SIZES[task["size"]],
        earlier=task["earlier"],
        before=task["before"],
        only=tuple(task["only"]),
        deadline=time.monotonic() + task["limit_s"],
        path=Path(folder, "found.json"),
    )
    run.save()
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(run)
        run.save()
    except UnrunError as error:
        run.unrun = str(error)
        run.save()
    except UserError as error:
        run.problem(str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        run.problem(f"{type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    command.leave(main(*sys.argv[1:]))  # not by way of libraries' ends, which may hang after a fault
