"""A hook: step_log where the program is Triplane's."""

from typing import Any

from tests.gpu_path.megatron_lm.step_log import LOG
from training import train

one_step, run = train.one_step, train.train


def logged_step(*args: Any, **kwargs: Any) -> Any:
    """In place of training.train's."""
    LOG.begin()
    return one_step(*args, **kwargs)


def logged_run(*args: Any, **kwargs: Any) -> int:
    """In place of training.train's."""
    code = run(*args, **kwargs)
    LOG.write()
    return code


train.one_step, train.train = logged_step, logged_run
