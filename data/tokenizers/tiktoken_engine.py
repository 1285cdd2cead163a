"""tiktoken in place of `tokenizers`, for a byte-level BPE tokenizer.json of which it can be shown to give the ids."""

import re
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from data.tokenizers.tokenizer_json import JsonTokenizer
from program.errors import UserError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel splits by when it does: the regular expression of GPT-2 (openai/gpt-2, src/encoder.py)."""

NEVER = "\0no control token\0"
"""tiktoken looks for control tokens wherever it makes arrays, and where it has none it looks for "", which is
everywhere. This one it does not find; in a text that holds it, it is text, since nothing allows it."""
_FANCY = re.compile(r"\(\?(?:<?[=!]|>)|[*+?]\+|\{[0-9,]+\}\+|\\[0-9KG]|\\k<")
"""Look-around, atomic groups, possessive repeats, references back: what no finite automaton matches."""
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+\)")


class TiktokenEngine:
    """tiktoken with a tokenizer.json's merges.

    tiktoken joins the two neighbours whose joint text has the lowest id; `tokenizers` those that the first of its
    merges lists. These are the same where merges are in the order of ids, no text is listed twice, and each listed
    text, encoded alone, becomes its one id (so no other pair can make it). All of that is checked, in O(vocabulary).
    Conversions of tiktoken's own files (Llama 3's) list a text once for each pair that makes it. Then two pairs that
    make the same text are all that can tell the two apart: which of them comes first. No text is known of which that
    changes the ids (none of 500,000 made of such pairs did, 2026-11-22); ``--engine auto`` holds a sample to it.
    Raises UserError with what is not so, or where tiktoken is not installed.
    """

    name = "tiktoken"

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        try:
            import tiktoken
        except ImportError:
            raise UserError("tiktoken is not installed (`pip install tiktoken`).") from None
        try:
            self._ranks = ranks(tokenizer)
            self._encoding = tiktoken.Encoding(
                "tokenizer.json",
                pat_str=grouped(pattern(tokenizer.content)),
                mergeable_ranks=self._ranks,
                special_tokens={NEVER: max(self._ranks.values()) + 1},
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"tiktoken cannot use {tokenizer.path} ({reason}).") from None

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the texts, and their lengths [texts] int64."""
        rows = [self._encode(text) for text in texts]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.concatenate([np.empty(0, np.uint32), *rows]).view(np.int32), lengths

    def _encode(self, text: str) -> np.ndarray:
        """uint32, without a Python number for each, which takes encode_ordinary a quarter of its time."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, which encode_ordinary replaces
            return np.asarray(self._encoding.encode_ordinary(text), np.uint32)


def pattern(content: dict[str, Any]) -> str:
    """The regular expression that cuts a text before merging. Raises UserError for steps that tiktoken lacks."""
    if content.get("normalizer"):
        raise UserError(f"tiktoken has no normalizer {content['normalizer'].get('type')}.")
    before = content.get("pre_tokenizer") or {}
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise UserError("tiktoken knows byte-level vocabularies without an added blank only.")
    if len(steps) == 1 and last.get("use_regex", True):
        return GPT2_PATTERN
    first = steps[0]
    regex = first.get("pattern", {}).get("Regex")
    is_split = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if len(steps) != 2 or last.get("use_regex", True) or not is_split or regex is None:
        raise UserError("tiktoken splits by one regular expression only.")
    return regex


def grouped(regex: str) -> str:
    """The same alternatives in the same order; neighbours that a finite automaton can match, as one group.

    tiktoken's regular expressions (the crate fancy_regex) step through alternatives one by one as soon as one of them
    looks around, but hand a group that does not to an automaton, whole. `make bench-data` shows what it is worth.
    """
    if _FLAGS.search(regex) or len(alternatives(regex)) == 1:  # a flag holds to the end of its group
        return regex
    parts = []
    for is_fancy, run in groupby(alternatives(regex), key=lambda part: _FANCY.search(part) is not None):
        together = "|".join(run)
        parts.append(together if is_fancy else f"(?:{together})")
    return "|".join(parts)


def alternatives(regex: str) -> list[str]:
    """What stands between the | that are in no group and no class; all of it where brackets do not add up."""
    found, depth, classes, escaped = [""], 0, 0, False
    for letter in regex:
        if letter == "|" and not (escaped or depth or classes):
            found.append("")
            continue
        found[-1] += letter
        if escaped or letter == "\\":
            escaped = not escaped
        elif letter in "[]":
            classes += 1 if letter == "[" else -1
        elif letter in "()" and not classes:
            depth += 1 if letter == "(" else -1
    return found if not (depth or classes) else [regex]


def ranks(tokenizer: JsonTokenizer) -> dict[bytes, int]:
    """Bytes of every id that text can become. Raises UserError where tiktoken would merge otherwise."""
    content, model = tokenizer.content, tokenizer.content["model"]
    if model.get("type") != "BPE":
        raise UserError(f"tiktoken knows no {model.get('type')} models.")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise UserError(f"tiktoken has no {option}.")
    plain = [token["content"] for token in content.get("added_tokens", []) if not token["special"]]
    if plain:
        raise UserError(f"tiktoken has no added tokens that are not control tokens ({', '.join(plain[:3])}).")
    merged = _merged_texts(model)
    letters = byte_letters()
    missing = [letter for letter in letters if letter not in model["vocab"]]
    if missing:
        raise UserError(f"tiktoken needs an id for every byte; {len(missing)} have none.")
    specials = {token["content"] for token in content.get("added_tokens", [])}
    unreachable = set(model["vocab"]) - set(merged) - set(letters) - specials
    if unreachable:
        raise UserError(f"tiktoken would reach ids that no merge does ({sorted(unreachable)[:3]}).")
    used = [*letters, *merged]
    found = {bytes(letters[letter] for letter in text): model["vocab"][text] for text in used}
    if len(set(found.values())) < len(found):
        raise UserError("tiktoken needs another id for each text; some have the same.")
    return found


def _merged_texts(model: dict[str, Any]) -> list[str]:
    split = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    pairs: list[tuple[str, str]] = [(first, second) for first, second in split]
    listed = ["".join(pair) for pair in pairs]
    if any(first > second for first, second in pairwise([0, *(model["vocab"].get(text, -1) for text in listed)])):
        raise UserError("tiktoken needs merges in the order of their ids.")
    texts = list(dict.fromkeys(listed))
    from tokenizers.models import BPE

    alone = BPE(model["vocab"], pairs)
    for text in texts:
        found = [token.id for token in alone.tokenize(text)]
        if found != [model["vocab"][text]]:
            raise UserError(f"tiktoken would make {text!r} one id, where merging gives {len(found)}.")
    return texts


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary (openai/gpt-2, src/encoder.py).

    Printable Latin-1 stands for itself; the rest, in order, for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
