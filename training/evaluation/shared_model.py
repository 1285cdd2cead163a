"""The model on all ranks, asked from rank 0: only there does lm-evaluation-harness run.

    result = shared.run(work)    on every rank; rank 0 calls work, which may call shared.score and shared.generate

Rank 0 sends what is to be scored; the others wait for that, score with it, and wait again. What fails in the harness
fails on all ranks alike; what fails in the model fails its rank, as anywhere else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from parallel.groups import Ranks
from program.errors import StoppedOnRequest
from training.evaluation.asked import BrokenOff
from training.evaluation.batching import PackedRequests, pack
from training.evaluation.generating import TextGenerator, TextRequests
from training.evaluation.scoring import Scorer

Ids = Sequence[int]


class HarnessError(Exception):
    """What the harness raised on rank 0; all ranks raise it."""


class SharedModel:
    """See above. All ranks hold one, of the same model."""

    def __init__(self, scorer: Scorer, generator: TextGenerator, ranks: Ranks) -> None:
        self.scorer, self.generator, self.ranks = scorer, generator, ranks
        self.computing = False
        """Whether what is raised comes from the model, which other ranks compute with."""

    def score(self, requests: Sequence[tuple[Ids, Ids]]) -> np.ndarray:
        """On rank 0, within ``run``: what ``Scorer`` says of pairs of context and continuation, fp64 [requests, 2].

        Raises ValueError as ``pack``.
        """
        packed = pack(requests, self.scorer.shape.seq_length)
        with self._computing_on(packed):
            return self.scorer(packed)

    def generate(self, requests: TextRequests) -> list[str]:
        """On rank 0, within ``run``: a greedy text for each prompt."""
        with self._computing_on(requests):
            return self.generator(requests)

    def run[T](self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns, on rank 0; None elsewhere. Raises BrokenOff or HarnessError, on all ranks."""
        if self.ranks.rank != 0:
            self._serve()
            return None
        self.computing = False
        try:
            result = work()
        except (BrokenOff, StoppedOnRequest):
            raise
        except (Exception, SystemExit) as error:  # a task's own code may call sys.exit
            if self.computing:
                raise
            text = f"{type(error).__name__}: {error}"
            self._send(text)
            raise HarnessError(text) from error
        self._send(None)
        return result

    def _serve(self) -> None:
        while (asked := self._receive()) is not None:
            if isinstance(asked, str):
                raise HarnessError(asked)
            if isinstance(asked, TextRequests):
                self.generator(asked)
            else:
                self.scorer(asked)

    @contextmanager
    def _computing_on(self, message: PackedRequests | TextRequests) -> Iterator[None]:
        self._send(message)
        self.computing = True
        yield
        self.computing = False

    def _send(self, message: PackedRequests | TextRequests | str | None) -> None:
        dist.broadcast_object_list([message], src=0, device=self.ranks.device)

    def _receive(self) -> Any:
        received = [None]
        dist.broadcast_object_list(received, src=0, device=self.ranks.device)
        return received[0]
