"""Tasks while a model trains: every ``eval.interval`` iterations, and after the last one."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from program.errors import UserError
from training.config.run_config import RunConfig
from training.evaluation import scores
from training.evaluation.asked import Asked, BrokenOff
from training.evaluation.batching import RowShape
from training.evaluation.generating import TextGenerator
from training.evaluation.harness_tokens import HarnessTokenizer
from training.evaluation.scoring import Scorer
from training.evaluation.shared_model import HarnessError, SharedModel
from training.evaluation.tasks import PreparedTasks
from training.generation.texts import TextModel
from training.loop import Callback
from training.metrics.console import duration
from training.progress import Progress
from training.step import StepResult
from training.watchdog.heartbeat import Heartbeat


class TaskCallback(Callback):
    """Scores ``eval.tasks`` with the running model, on rank 0's word, and tells ``record``.

    After the last iteration it waits for the checkpoint, so that a job that ends while tasks run has lost nothing. An
    evaluation that is broken off by a request to stop has no figures. What fails in the harness is said, and training
    goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: PreparedTasks | None,
        model: TextModel,
        shape: RowShape,
        record: Callable[[int, Mapping[str, float]], None],
        run_dir: Path,
        heartbeat: Heartbeat,
        asked: Callable[[], bool],
    ) -> None:
        """tasks: on rank 0. asked: whether this rank was asked to stop."""
        self.interval, self.train_iters, self.tasks = config.eval.interval, config.train.train_iters, tasks
        chunks, ranks, self.tokenizer = model.chunks, model.ranks, HarnessTokenizer(model.tokenizer)
        self.ranks, self.record, self.run_dir, self.heartbeat = ranks, record, run_dir, heartbeat
        self.asked = Asked(asked, ranks)
        scorer = Scorer(chunks=chunks, ranks=ranks, shape=shape, before_round=self._before_round)
        generator = TextGenerator(
            chunks=chunks, ranks=ranks, tokenizer=self.tokenizer, seq_length=shape.seq_length,
            at_once=max(1, shape.tokens // shape.seq_length), before_round=self._before_round,
            after_token=heartbeat.beat, asked_to_stop=asked,
        )  # fmt: skip
        self.model = SharedModel(scorer, generator, ranks)
        self.lm: object = None
        """The harness' face of the model, on rank 0 from the first evaluation on: it keeps what it has encoded."""
        self.began_s, self.is_last = 0.0, False

    def start(self, progress: Progress) -> None:
        if progress.iteration >= self.train_iters:
            self.ranks.say("tasks are not scored: no iteration is left; python -m tools.evaluate scores a checkpoint")

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.is_last = progress.iteration >= self.train_iters or result.requests.finish
        if self.interval is not None and progress.iteration % self.interval == 0 and not self.is_last:
            self._evaluate(progress)

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        if self.is_last:
            self._evaluate(progress)

    def _evaluate(self, progress: Progress) -> None:
        iteration = progress.iteration
        self.began_s = time.monotonic()
        try:
            results = self.heartbeat.within("evaluation", self.model.run)(self._run_harness)
        except BrokenOff:
            self.ranks.say(
                f"asked to stop: tasks after iteration {iteration} are broken off; python -m tools.evaluate scores a "
                "checkpoint"
            )
            return
        except HarnessError as error:
            self.ranks.say(f"warning: tasks after iteration {iteration} failed in lm-evaluation-harness: {error}")
            return
        finally:
            self.asked.last()
        if self.tasks is None or results is None:
            return
        took = duration(time.monotonic() - self.began_s)
        self.ranks.say(f"tasks after iteration {iteration}: {self.tasks.requests:,} requests in {took}")
        self.record(iteration, scores.logged(results, self.tasks))
        try:
            scores.append(self.run_dir / "evaluations.jsonl", scores.entries(results, self.tasks, iteration))
        except (OSError, UserError) as error:
            self.ranks.say(f"warning: {self.run_dir / 'evaluations.jsonl'} cannot be written: {error}")

    def _run_harness(self) -> scores.Results:
        """On rank 0."""
        from training.evaluation.harness import ShardedLM, run_tasks

        assert self.tasks is not None
        if not isinstance(self.lm, ShardedLM):
            self.lm = ShardedLM(self.model, self.tokenizer, self.model.scorer.shape.seq_length)
        return run_tasks(self.lm, self.tasks)

    def _before_round(self, done: int, count: int) -> None:
        """Raises BrokenOff, on all ranks before the same round."""
        self.heartbeat.beat()
        if self.asked():
            raise BrokenOff
        if done:
            left_s = (time.monotonic() - self.began_s) / done * (count - done)
            self.ranks.show_progress(f"tasks {done / count:.0%}, ETA {duration(left_s)}")
