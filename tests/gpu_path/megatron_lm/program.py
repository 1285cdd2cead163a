"""python -m tests.gpu_path.megatron_lm.program CHECKOUT [flag ...]: Megatron-LM's pretrain_gpt.py, its steps logged.

Nothing of the checkout is changed. Its index builder in C++ is the installed megatron-core's, so it compiles nothing.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from tests.gpu.sides.megatron_lm import use_installed_helpers

CHECKOUT = Path(sys.argv[1])
use_installed_helpers()
sys.path.insert(0, str(CHECKOUT))
sys.argv = [str(CHECKOUT / "pretrain_gpt.py"), *sys.argv[2:]]

from megatron.core.datasets import utils  # noqa: E402
from megatron.training import training  # noqa: E402

from tests.gpu_path.megatron_lm.step_log import LOG  # noqa: E402

train_step, train = training.train_step, training.train


def logged_step(*args: Any, **kwargs: Any) -> Any:
    """In place of Megatron-LM's."""
    LOG.begin()
    result = train_step(*args, **kwargs)
    if result[0]:
        LOG.losses.append(float(result[0]["lm loss"]))
    return result


def logged_train(*args: Any, **kwargs: Any) -> Any:
    """In place of Megatron-LM's."""
    result = train(*args, **kwargs)
    LOG.write()
    return result


utils.compile_helpers = lambda: None
training.train_step, training.train = logged_step, logged_train
runpy.run_path(sys.argv[0], run_name="__main__")
