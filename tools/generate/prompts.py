"""What is to be continued: one prompt, or a file of them; and whether they fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from program.errors import UserError, printable
from program.schema import JSON
from program.untrusted import InputError, parse_json, read_text

FILE_BYTES = 1 << 30
USUAL_NEW_TOKENS = 128


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    place: str
    """Where it comes from, for messages."""
    record: Mapping[str, JSON]
    """What its line of a file holds, which the output repeats."""


def prompt_of(text: str, place: str, record: Mapping[str, JSON] | None = None) -> Prompt:
    """record: what its line holds; None: the prompt alone. Raises UserError for what no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: expected text, found half a surrogate pair, or a byte that is no UTF-8, at character "
            f"{error.start + 1}."
        ) from None
    return Prompt(text=text, place=place, record={"prompt": text} if record is None else record)


def read_prompts(path: Path) -> list[Prompt]:
    """A prompt for each line of a file; of NAME.jsonl the "prompt" of each line's object. Empty lines are skipped.

    Raises UserError for a file that cannot be read, or that holds none.
    """
    try:
        lines = read_text(path, FILE_BYTES).split("\n")
    except OSError as error:
        raise UserError(f"--file {path}: cannot be read: {error.strerror}.") from None
    found = []
    for number, line in enumerate((line.removesuffix("\r") for line in lines), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            found.append(_of_json(line, place) if path.suffix == ".jsonl" else prompt_of(line, place))
    if not found:
        raise UserError(f"--file {path}: holds no prompt; expected one on each line.")
    return found


def _of_json(line: str, place: str) -> Prompt:
    wanted = f'{place}: expected an object with a text "prompt", such as {{"prompt": "Once upon"}}'
    try:
        record = parse_json(line.encode(), dict[str, JSON])
    except InputError:
        raise UserError(f"{wanted}; found {printable(line[:60])!r}.") from None
    text = record.get("prompt")
    if not isinstance(text, str):
        raise UserError(f"{wanted}; found {printable(line[:60])!r}.")
    return prompt_of(text, place, record)


def new_tokens_for(prompt_tokens: Sequence[int], places: Sequence[str], asked: int | None, seq_length: int) -> int:
    """Tokens to generate at most, behind prompts of so many tokens.

    asked: as many, which must fit; None: the usual number, or what seq_length leaves of it. Raises UserError, for the
    longest prompt.
    """
    longest = max(range(len(prompt_tokens)), key=lambda number: prompt_tokens[number])
    size, place = prompt_tokens[longest], places[longest]
    tokens = f"{size:,} token{'' if size == 1 else 's'}"
    if size >= seq_length:
        raise UserError(
            f"{place}: {tokens}; expected fewer than model.seq_length, {seq_length:,}, which the text must "
            "fit into too. Shorten it."
        )
    if asked is not None and size + asked > seq_length:
        raise UserError(
            f"{place}: {tokens} and --max_new_tokens {asked:,} are more than model.seq_length, {seq_length:,}. "
            f"Shorten it, or give --max_new_tokens {seq_length - size:,}."
        )
    return asked or USUAL_NEW_TOKENS
