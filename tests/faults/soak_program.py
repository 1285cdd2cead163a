"""``pretrain_gpt.py`` for a soak: flags that the soak changes between starts, and a NaN where it asks for one.

Both come from files in the working folder: ``flags``, and ``nan`` with the number of an iteration.
"""

import runpy
import sys
from pathlib import Path

from tests.faults.job_program import Fault, _in_a_microbatch

FLAGS, NAN = "flags", "nan"
ROOT = Path(__file__).resolve().parents[2]


class FromFile(Fault):
    """A fault whose iteration is what the file says when it is asked for."""

    @property
    def iteration(self) -> int:
        """No iteration where there is no file."""
        try:
            return int(Path(NAN).read_text())
        except (OSError, ValueError):
            return -1


def main() -> None:
    """Run the real program; its ranks are forked from this process, and have the fault in them."""
    from training import forward_backward, train

    _in_a_microbatch(train, forward_backward, FromFile.__new__(FromFile))
    sys.argv = [str(ROOT / "pretrain_gpt.py"), *sys.argv[1:], *Path(FLAGS).read_text().split()]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
