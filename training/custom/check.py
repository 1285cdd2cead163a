"""What is wrong with the user's own callbacks, loss, optimizer and transformation, found before ranks start."""

import tempfile
from pathlib import Path
from typing import Literal

from parallel import local_ranks, output
from parallel.launch import Identity
from parallel.lean_imports import lean
from program.errors import SharedMistake
from program.users_code import no_sudden_end
from training.config.run_config import RunConfig


def check(config: RunConfig, device: Literal["cpu", "cuda"], logs: Path | None = None) -> None:
    """Import and try them; costs the import of torch, unless there are none. Raises SharedMistake for one that cannot
    be trained with.

    Functions are tried in a process of its own, on the CPU: this one may fork ranks, and must not have computed. Only
    an optimizer for GPUs is tried later, by each rank on its GPU. logs: takes what is printed; None: no file does.
    """
    if not config.import_paths:
        return
    with tempfile.TemporaryDirectory() as scratch, output.own_output(logs or Path(scratch), Identity(), False):
        with lean(device):
            from parallel.cpu import eager
            from training import optimizer_class
            from training.custom import callbacks, loss, transform

        for path in config.train.callbacks:
            callbacks.load_callback(path)
        loss.load_loss(config.train.loss)
        transform.load_transform(config.data.transform)
        optimizer_class.load_class(config.optimizer.optimizer)

        @no_sudden_end()
        def try_out(_: Identity) -> int:
            if config.train.loss is not None:
                loss.check_loss(config.train.loss, config.parallel.context_parallel_size > 1)
            if device == "cpu":
                eager.install()
                optimizer_class.try_out(config.optimizer, config.parallel, device)
            return 0

        _, failure = local_ranks.fork_ranks(1, try_out)
    if failure is not None and failure.code != 2:
        tried = " and ".join(path for path in (config.train.loss, config.optimizer.optimizer) if path and ":" in path)
        raise SharedMistake(f"the process in which {tried} was tried ended: {failure.text.strip()}")
    if failure is not None:
        raise SharedMistake("\n".join(filter(None, (failure.text, failure.notes))))
