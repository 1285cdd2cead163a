"""Text from a checkpoint, of any layout, on CPU or GPU.

    python -m tools.generate runs/demo --prompt "def main("

Only the text that follows the prompt goes to stdout; all else goes to stderr. Exit code 2: bad input; 130: Ctrl-C.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from data.tokenizers.gpt2_pair import read_beside
from parallel import launch
from program import command
from program.errors import UserError
from program.flags import parse_flags
from program.limits import too_small
from tools.generate.prompts import Prompt, new_tokens_for, prompt_of, read_prompts
from tools.generate.work import Job, answer, converse
from tools.shared.carried_tokenizer import eos_ids, own_ends
from tools.shared.held_checkpoint import deleted_is_said
from tools.shared.loaded_model import on_ranks, shown_once
from tools.shared.opened_checkpoint import ModelFlags, OpenedCheckpoint, open_checkpoint
from training.generation.settings import Sampling, TextLimits

PROGRAM = "tools.generate"
WAITING_MINUTES = 7 * 24 * 60.0
"""How long ranks wait for a line of stdin."""


@dataclass(kw_only=True)
class Generate(ModelFlags):
    """Continue prompts with a checkpoint's model."""

    prompt: str | None = None
    """Text to continue. Empty: a document from its beginning."""

    file: Path | None = None
    """File of prompts, one a line; of NAME.jsonl the "prompt" of each line's JSON object."""

    interactive: tyro.conf.FlagCreatePairsOff[bool] = False
    """Read prompts from stdin, a line each, and print texts as they come. Ctrl-C ends a text, Ctrl-D the program."""

    max_new_tokens: int | None = None
    """Tokens of each text at most. None: 128, or what model.seq_length leaves behind the prompt."""

    temperature: float = 0.7
    """Divides the logits before a token is drawn. 0: greedy, the most probable token."""

    top_p: float = 1.0
    """Draw from the most probable tokens that together reach this probability, above 0 and at most 1."""

    top_k: int = 0
    """Draw from this many most probable tokens. 0: from all."""

    seed: int = 0
    """Of the draws; the same seed gives the same texts, in any layout up to rounding."""

    stop: tuple[str, ...] = ()
    """Texts that end a text, beside the tokenizer's end of document and the eos_token_id of an imported model."""

    bos: tyro.conf.FlagCreatePairsOff[bool] = False
    """Begin each prompt with the tokenizer's begin-of-text id, as many models that were imported expect."""

    batch_size: int = 8
    """Prompts of --file that a replica computes at once. Memory of the KV cache grows with it."""

    stream: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the text of --prompt as it comes."""

    format: Literal["text", "jsonl"] | None = None
    """jsonl: an object a line, with prompt, text, tokens and finish_reason (end, stop, length). text: texts alone,
    between two of them a line with ---. None: text for --prompt, jsonl for --file."""

    no_cache: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compute the whole text for each token: slow, to compare with."""

    def problems(self) -> list[str]:
        """What is wrong with the flags alone."""
        given = {
            "--prompt": self.prompt is not None,
            "--file": self.file is not None,
            "--interactive": self.interactive,
        }
        chosen = [flag for flag, used in given.items() if used]
        found = []
        if len(chosen) != 1:
            found.append(f"expected one of {', '.join(given)}; found {' and '.join(chosen) or 'none'}.")
        found += too_small(self, "--", 1, "max_new_tokens", "batch_size")
        if self.stream and (self.prompt is None or self.format == "jsonl"):
            found.append("--stream is for --prompt in format text.")
        if self.interactive and self.format == "jsonl":
            found.append("--format jsonl is for --prompt and --file.")
        if "" in self.stop:
            found.append("--stop: an empty text would end every text at once.")
        return found + self.sampling.problems("--")

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the texts are printed; 2: bad input; 130: Ctrl-C."""
    flags = parse_flags(Generate, argv, f"python -m {PROGRAM}", __doc__)
    with shown_once(os.environ):
        return generate(flags)


def generate(flags: Generate) -> int:
    """The exit code. Raises UserError."""
    if problems := flags.problems():
        raise UserError("\n  ".join(problems))
    prompts = _prompts(flags)
    identity = launch.detect(os.environ)
    opened = open_checkpoint(flags, identity.world_size if identity else None)
    with deleted_is_said(opened.folder):
        job = job_of(flags, opened)
    if flags.interactive:
        if identity is not None:
            raise UserError("--interactive: start it without torchrun or srun; it makes its ranks itself (--layout).")
        if opened.world_size > 1:  # rank 0 hears Ctrl-C; here it would end all ranks
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return on_ranks(opened, PROGRAM, partial(converse, job), WAITING_MINUTES)
    _check_lengths(prompts, job, opened)
    return on_ranks(opened, PROGRAM, partial(answer, prompts, job))


def _prompts(flags: Generate) -> list[Prompt]:
    if flags.prompt is not None:
        return [prompt_of(flags.prompt, "--prompt")]
    return read_prompts(flags.file) if flags.file is not None else []


def job_of(flags: Generate, opened: OpenedCheckpoint) -> Job:
    """Raises UserError where the checkpoint's tokenizer is missing, or lacks what is asked of it."""
    if opened.tokenizer is None:
        raise UserError(f"{opened.tokenizer_problem} Without a tokenizer there is no text.")
    return Job(
        new_tokens=flags.max_new_tokens,
        limits=TextLimits(
            new_tokens=flags.max_new_tokens or 0,
            seq_length=opened.config.model.seq_length,
            ends=frozenset(
                eos_ids(_carried(opened, "generation_config.json")) + eos_ids(_carried(opened, "config.json"))
            ),
            stops=flags.stop,
        ),
        sampling=flags.sampling,
        begin=_begin(opened) if flags.bos else None,
        use_cache=not flags.no_cache,
        stream=flags.stream,
        json=(flags.format or ("jsonl" if flags.file else "text")) == "jsonl",
        batch_size=flags.batch_size,
    )


def _carried(opened: OpenedCheckpoint, name: str) -> dict[str, Any]:
    """A file of Hugging Face's that lies in the checkpoint; empty where there is none."""
    return read_beside(opened.folder / name, name)


def _begin(opened: OpenedCheckpoint) -> int:
    ends, _ = own_ends(opened.folder, opened.config, opened.entries)
    begin = _carried(opened, "generation_config.json").get("bos_token_id", ends.bos if ends else None)
    if not isinstance(begin, int):
        raise UserError(f"--bos: the tokenizer of {opened.folder} names no begin-of-text id. Leave it out.")
    return begin


def _check_lengths(prompts: Sequence[Prompt], job: Job, opened: OpenedCheckpoint) -> None:
    """Before ranks start. Raises UserError for the longest prompt, if it is too long."""
    assert opened.tokenizer is not None
    extra = int(job.begin is not None)
    sizes = [len(opened.tokenizer.encode(prompt.text)) + extra for prompt in prompts]
    new_tokens_for(sizes, [prompt.place for prompt in prompts], job.new_tokens, job.limits.seq_length)


if __name__ == "__main__":
    command.prepare_process(PROGRAM)
    sys.exit(command.run(PROGRAM, main))
