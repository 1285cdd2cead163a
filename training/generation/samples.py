"""Samples during training: what the model makes of fixed prompts, every so many iterations and at the end.

They are lines of RUN_DIR/samples.jsonl, {"iteration", "prompt", "text"}, and are shown on the console. Training is the
same without them, bit by bit: they draw from generators of their own, and leave nothing in the model.
"""

from collections.abc import Callable
from pathlib import Path

from program.errors import SharedMistake, printable
from program.schema import without_problems
from training.config.train_config import TrainConfig
from training.generation.generate import Watch
from training.generation.settings import Sampling, TextLimits
from training.generation.texts import TextModel, continue_prompts, prompt_ids
from training.loop import Callback
from training.metrics.jsonl import JsonlSink
from training.progress import Progress
from training.step import StepResult
from training.watchdog.heartbeat import Heartbeat

FILE = "samples.jsonl"
SAMPLING = Sampling(temperature=0.7)
"""The same numbers are drawn every time, so that two samples differ by the weights alone."""


class SampleCallback(Callback):
    """Samples after every ``sample_interval``-th iteration; ``sample_at_end`` is for the program to call.

    A request to stop breaks them off: texts that have not ended are not written.
    """

    def __init__(
        self,
        train: TrainConfig,
        model: TextModel,
        seq_length: int,
        run_dir: Path,
        heartbeat: Heartbeat | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raises SharedMistake for a prompt that leaves no token of ``seq_length`` for a text."""
        self.train, self.model, self.ranks, self.run_dir = train, model, model.ranks, run_dir
        self.heartbeat, self.asked_to_stop = heartbeat or Heartbeat(), asked_to_stop
        self.limits = TextLimits(new_tokens=train.generate_tokens, seq_length=seq_length)
        self.sampled = -1
        """Iteration of the newest samples."""
        for prompt in train.sample_prompts if train.generate_tokens else ():
            if (size := len(prompt_ids(model.tokenizer, prompt))) >= seq_length:
                raise SharedMistake(
                    f"train.sample_prompts: {printable(prompt[:40])!r} has {size} tokens; expected at most "
                    f"{seq_length - 1}, model.seq_length without the first token of a text. Shorten it."
                )

    def after_step(self, progress: Progress, result: StepResult) -> None:
        interval = self.train.sample_interval
        if interval is not None and progress.iteration % interval == 0 and not result.requests.stop:
            self._sample(progress.iteration, f" after iteration {progress.iteration}")

    def sample_at_end(self, progress: Progress) -> None:
        """Those of the finished model, unless they have just been made."""
        if self.sampled != progress.iteration:
            self._sample(progress.iteration, "")

    def _sample(self, iteration: int, when: str) -> None:
        if not self.train.generate_tokens:
            return
        self.sampled = iteration
        found = self.heartbeat.within("generation", continue_prompts)(
            self.model,
            self.train.sample_prompts,
            self.limits,
            SAMPLING,
            watch=Watch(after_token=lambda _: self.heartbeat.beat(), asked_to_stop=self.asked_to_stop),
        )
        whole = [one for one in found if one.reason != "interrupted"]
        self._write(iteration, [(one.prompt, one.text) for one in whole])
        for one in whole:
            lines = "\n".join(f"    {line}" for line in (one.prompt + one.text).splitlines())
            self.ranks.say(f"\na sample continuation of {one.prompt!r}{when}:\n{lines}\n")
        if len(whole) < len(found):
            self.ranks.say(f"asked to stop: the samples after iteration {iteration} are broken off")

    def _write(self, iteration: int, texts: list[tuple[str, str]]) -> None:
        """A line each, by rank 0. A disk that does not take them ends no training.

        A model of bytes writes control characters, which no reader takes: U+FFFD stands for them.
        """
        if self.ranks.rank != 0:
            return
        try:
            file = JsonlSink(self.run_dir / FILE, self.ranks.say)
        except OSError as error:
            self.ranks.say(f"warning: {self.run_dir / FILE} cannot be written: {error.strerror}")
            return
        for prompt, text in texts:
            file.write(iteration, {"prompt": without_problems(prompt), "text": without_problems(text)})
        file.close()
