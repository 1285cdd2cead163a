"""What every rank does with the loaded model: continue the prompts that it was given, or one line after another."""

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from program.errors import UserError, printable
from tools.generate.prompts import Prompt, new_tokens_for
from tools.shared.loaded_model import LoadedModel
from training.generation.settings import Sampling, TextLimits

if TYPE_CHECKING:
    from data.tokenizers.base import Tokenizer
    from training.generation.generate import TextRow, Watch
    from training.generation.texts import Continuation

SEPARATOR = "---"
"""A line between texts of a file, in format text."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """How texts are generated and printed."""

    new_tokens: int | None
    """None: see ``new_tokens_for``."""
    limits: TextLimits
    sampling: Sampling
    begin: int | None
    """Id before each prompt."""
    use_cache: bool
    stream: bool
    json: bool
    batch_size: int


class Answers:
    """The program's stdout, on every rank alike; rank 0 has it."""

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.closed = model, False
        self.is_terminal = model.stdout is not None and os.isatty(model.stdout)

    def write(self, text: str) -> None:
        """Nothing once what read it has gone (``| head``): ``closed`` then asks all ranks to stop. A terminal gets no
        control characters, which a model may write."""
        try:
            self.model.write("" if self.closed else printable(text) if self.is_terminal else text)
        except BrokenPipeError:
            self.closed = True


def answer(prompts: Sequence[Prompt], job: Job, model: LoadedModel) -> None:
    """Every prompt's text, in their order, as it is done."""
    from training.generation.generate import Watch

    answers, tokenizer = Answers(model), _tokenizer(model)
    _introduce(model, job)
    at_once, began_s, tokens = job.batch_size * model.ranks.layout.dp, time.monotonic(), 0
    for first in range(0, len(prompts), at_once):
        batch = prompts[first : first + at_once]
        printed = _printed(tokenizer, job, answers.write) if job.stream else lambda _: None
        watch = Watch(after_token=printed, asked_to_stop=lambda: answers.closed)
        found = _continue(model, job, [one.text for one in batch], first, watch)
        tokens += sum(one.tokens for one in found)
        for prompt, one in zip(batch, found, strict=True):
            if job.json:
                answers.write(_line(prompt, one))
            else:
                separator = f"{SEPARATOR}\n" if prompt is not prompts[0] else ""
                answers.write("\n" if job.stream else f"{separator}{one.text}\n")
        if any(one.reason == "interrupted" for one in found):
            return  # nothing reads any more
        _say_progress(model, first + len(batch), len(prompts), tokens, time.monotonic() - began_s)


def converse(job: Job, model: LoadedModel) -> None:
    """One line of stdin after another, until it ends; Ctrl-C ends the text that is written."""
    import torch.distributed as dist

    from training.generation.generate import Watch

    answers, tokenizer, number = Answers(model), _tokenizer(model), 0
    _introduce(model, job)
    model.ranks.say("A line is a prompt. Ctrl-C ends a text, Ctrl-D the program.")
    with _interrupts(model) as interrupted:
        while True:
            line: list[str | None] = [_next_line(model, interrupted)] if model.ranks.rank == 0 else [None]
            dist.broadcast_object_list(line, src=0, device=model.ranks.device)
            if line[0] is None or answers.closed:
                return
            try:
                _continue(
                    model, job, [line[0]], number,
                    Watch(
                        after_token=_printed(tokenizer, job, answers.write),
                        asked_to_stop=lambda: answers.closed or interrupted.flag,
                    ),
                )  # fmt: skip
            except UserError as error:
                model.ranks.say(f"{error}")
                continue
            answers.write("\n")
            number += 1


def _continue(
    model: LoadedModel, job: Job, texts: Sequence[str], number: int, watch: "Watch"
) -> "Sequence[Continuation]":
    """Raises UserError, on every rank, for a prompt that is too long."""
    from training.generation.texts import continue_prompts, prompt_ids

    tokenizer, seq_length = _tokenizer(model), job.limits.seq_length
    sizes = [len(prompt_ids(tokenizer, text, job.begin)) for text in texts]
    new_tokens = new_tokens_for(sizes, [f"{text[:40]!r}" for text in texts], job.new_tokens, seq_length)
    return continue_prompts(
        model.text_model,
        texts,
        replace(job.limits, new_tokens=new_tokens),
        job.sampling,
        begin=job.begin,
        first_number=number,
        use_cache=job.use_cache,
        watch=watch,
    )


def _tokenizer(model: LoadedModel) -> "Tokenizer":
    assert model.tokenizer is not None, "looked at before ranks started"
    return model.tokenizer


def _printed(tokenizer: "Tokenizer", job: Job, write: Callable[[str], None]) -> "Callable[[Sequence[TextRow]], None]":
    from training.generation.texts import Printed

    return Printed(tokenizer, job.limits.stops, write)


def _line(prompt: Prompt, one: "Continuation") -> str:
    record = {**prompt.record, "text": one.text, "tokens": one.tokens, "finish_reason": one.reason}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _introduce(model: LoadedModel, job: Job) -> None:
    from training.generation.generate import no_cache_reason

    how = "greedy" if job.sampling.temperature == 0 else f"temperature {job.sampling.temperature:g}"
    how += f", top_k {job.sampling.top_k}" if job.sampling.top_k else ""
    how += f", top_p {job.sampling.top_p:g}" if job.sampling.top_p < 1 else ""
    reason = no_cache_reason(model.chunks, model.ranks) if job.use_cache else "--no_cache"
    without = f"; without a KV cache ({reason})" if reason else ""
    shape = f"{model.shape.num_layers} layers, hidden {model.shape.hidden_size}"
    model.ranks.say(
        f"{model.folder} ({model.config.model.title}: {shape}), {model.ranks.layout} on {model.ranks.device.type}, "
        f"{model.numbers}; {how}{without}"
    )


def _say_progress(model: LoadedModel, done: int, of: int, tokens: int, seconds: float) -> None:
    prompts = f"{done} of {of} prompts, " if of > 1 else ""
    model.ranks.say(f"{prompts}{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")


@dataclass(slots=True)
class _Interrupted:
    flag: bool = False
    reading: bool = False
    """A prompt is awaited: there is no text to end."""


@contextmanager
def _interrupts(model: LoadedModel) -> Iterator[_Interrupted]:
    """Ctrl-C sets the flag, on rank 0."""
    interrupted = _Interrupted()

    def take(_number: int, _frame: FrameType | None) -> None:
        interrupted.flag = True
        if interrupted.reading:
            model.ranks.say("Ctrl-D ends the program.")
            model.ranks.show_progress("> ")

    if model.ranks.rank != 0:
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, take)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _next_line(model: LoadedModel, interrupted: _Interrupted) -> str | None:
    """The next prompt; None at the end of stdin. Empty lines are skipped."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    interrupted.reading, line = True, "\n"
    while line and not line.strip():
        if sys.stdin.isatty():
            model.ranks.show_progress("> ")
        line = sys.stdin.readline()
    interrupted.reading = interrupted.flag = False
    return line.removesuffix("\n") or None
