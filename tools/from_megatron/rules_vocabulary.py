"""The tokenizer, and how many rows the embedding has: what Megatron-LM makes of the same flags.

Megatron-LM counts the ids of the tokenizer's files, whatever --vocab-size says; only tiktoken's and the null tokenizer
take it from there. --padded-vocab-size is the number of rows as it stands.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from program.errors import UserError
from program.untrusted import json_value, read_text
from tools.from_megatron.draft import DEFAULT, Draft
from tools.from_megatron.missing import how_to_give
from tools.from_megatron.unknown import OpenText, ScriptWord

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_HUGGING_FACE = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")
_WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
_NULL = ("NullTokenizer", "NullMultimodalTokenizer")
_TYPES = (*_SENTENCEPIECE, *_HUGGING_FACE, *_WORD_PIECES, *_NULL, "GPT2BPETokenizer", "TikTokenizer")
"""Of Megatron-LM 0.19.2."""
_PUBLISHED = {"gpt2-vocab.json": 50257, "bert-large-uncased-vocab.txt": 30522, "bert-large-cased-vocab.txt": 28996}
"""Entries of files that are the same everywhere, by name."""
_DEFAULT_FILES = {
    "GPT2BPETokenizer": "gpt2-vocab.json",
    "BertWordPieceLowerCase": "bert-large-uncased-vocab.txt",
    "BertWordPieceCase": "bert-large-cased-vocab.txt",
}
"""What Megatron-LM downloads where --vocab-file is not given."""
_BYTES = "byte"
_TIKTOKEN_IDS = 1 << 17  # Megatron-LM's default for TikTokenizer


def vocabulary(draft: Draft) -> None:
    """data.tokenizer, and the fields of model that make the embedding as long as Megatron-LM's."""
    arguments = draft.arguments
    kind = arguments.text("tokenizer-type")
    if kind is None and arguments.switch("vocab-file"):
        kind = "GPT2BPETokenizer"  # what --vocab-file and --merge-file alone are for in older versions
    path = draft.path("tokenizer-model", "data.tokenizer")
    _tokenizer(draft, kind, path)
    padded, tp = arguments.whole("padded-vocab-size", least=1), arguments.size("tensor-model-parallel-size")
    multiple = arguments.whole("make-vocab-size-divisible-by", 128, least=1) or 128
    unpadded = arguments.switch("no-pad-vocab-size") or arguments.switch("disable-pad-vocab-size")
    if padded is not None:
        draft.put("model.vocab_size", padded, "--padded-vocab-size")
        divisor = math.gcd(padded, multiple * tp)
        draft.put("model.make_vocab_size_divisible_by", divisor, "--padded-vocab-size is a multiple of it")
        return
    if unpadded:  # Megatron-LM pads it all the same, but counts no tokenizer's ids
        draft.put("model.vocab_size", arguments.required("vocab-size"), "--vocab-size, by --no-pad-vocab-size")
    else:
        draft.put("model.vocab_size", *_ids(draft, kind, path))
    source = "--make-vocab-size-divisible-by" if "make-vocab-size-divisible-by" in arguments.given else DEFAULT
    source = f"{multiple} x TP {tp}, as Megatron-LM pads" if tp > 1 else source
    draft.put("model.make_vocab_size_divisible_by", multiple * tp, source)


def refuse_unknown(draft: Draft, typed: Sequence[str]) -> None:
    """Raises UserError where nothing says how long the embedding is: a recipe would have Triplane's own vocabulary.

    typed: the words behind ``python -m tools.from_megatron``.
    """
    if "model.vocab_size" in draft.values or draft.values.get("data.tokenizer", _BYTES) != _BYTES:
        return
    why = [line for line in draft.open if line.startswith(("model.vocab_size", "data.tokenizer"))]
    kind = draft.arguments.text("tokenizer-type")
    uncounted = f"--tokenizer-type {kind}: the ids of its files cannot be counted here, and there is no --vocab-size."
    other = uncounted if kind else "no --tokenizer-type, no --vocab-size and no --padded-vocab-size."
    lines = ["the vocabulary is not known, and with it the rows of the embedding:"]
    lines += [f"  - {line}" for line in why or [other]]
    lines.append(
        "Add --padded-vocab-size N to the command, the rows of the embedding as Megatron-LM's log has them; or "
        "--tokenizer-type with its --tokenizer-model or --vocab-size."
    )
    raise UserError("\n".join(lines + how_to_give(draft.wanted, typed)))


def _tokenizer(draft: Draft, kind: str | None, path: str | None) -> None:
    model = next(map(str, draft.arguments.raw("tokenizer-model")), None)
    source = "--tokenizer-model" if path is not None else "--tokenizer-model, left open"
    if kind is None and model is not None:
        draft.put("data.tokenizer", model, source)
        draft.notes.append("no --tokenizer-type: Triplane tells a tokenizer's type by its files.")
    elif kind is None:
        draft.notes.append(
            "no --tokenizer-type: token files are read without one; for text, the recipe has Triplane's built-in one."
        )
    elif kind in (*_SENTENCEPIECE, "HuggingFaceTokenizer") and not draft.arguments.switch("tokenizer-model"):
        draft.open.append(f"data.tokenizer: --tokenizer-type {kind} takes --tokenizer-model, which is not given.")
    elif kind in (*_SENTENCEPIECE, "HuggingFaceTokenizer"):
        draft.put("data.tokenizer", model, source)
        if kind == "HuggingFaceTokenizer" and path is not None and not Path(path).exists():
            draft.notes.append(
                f"--tokenizer-model {path}: a folder on this machine with a tokenizer.json, nothing of a hub."
            )
    elif kind in _NULL:
        draft.put("data.tokenizer", _BYTES, f"--tokenizer-type {kind}: no text is read")
    elif kind == "GPT2BPETokenizer" and draft.arguments.switch("vocab-file"):
        _byte_pairs(draft)
    else:
        other = "" if kind in _TYPES else "Megatron-LM 0.19.2 has no such type, and "
        draft.unsupported.append(
            f"--tokenizer-type {kind}: {other}Triplane reads a SentencePiece or Llama tokenizer.model, tokenizer.json, "
            "a vocab.json with its merges.txt, and .tiktoken files. Give data.tokenizer one; or train on token files "
            "(.bin/.idx) that Megatron-LM made: model.vocab_size is right for them."
        )


def _byte_pairs(draft: Draft) -> None:
    """GPT-2's two files; where --merge-file is not given, Triplane looks for it beside the vocabulary."""
    given = [flag for flag in ("vocab-file", "merge-file") if draft.arguments.switch(flag)]
    paths = [draft.path(flag, "data.tokenizer") for flag in given]
    words = [str(word) for flag in given for word in draft.arguments.raw(flag)]
    source = " and ".join(f"--{flag}" for flag in given)
    draft.put("data.tokenizer", ",".join(words), f"{source}, left open" if None in paths else source)


def _ids(draft: Draft, kind: str | None, path: str | None) -> tuple[int | None, str]:
    """The number of ids that Megatron-LM counts, and where it is from; None: the tokenizer says it, in a run.

    path: of --tokenizer-model, where it is known.
    """
    size, flag = draft.arguments.whole("vocab-size", least=1), "--vocab-size"
    if kind is None:
        return size, flag
    if size is None and (kind in _NULL or kind not in _TYPES):
        whose = "takes it from" if kind in _NULL else "is no type of Megatron-LM's, which may take it from"
        draft.open.append(f"model.vocab_size: --tokenizer-type {kind} {whose} --vocab-size, and it is not given.")
        return None, ""
    if kind == "NullMultimodalTokenizer" and size is not None:
        return size + 1, f"{flag}, and one that ends a document"
    if kind in _NULL:
        return size, flag
    if kind == "TikTokenizer":
        return (size, flag) if size else (_TIKTOKEN_IDS, DEFAULT)
    by_model = kind in _SENTENCEPIECE or kind in _HUGGING_FACE
    word = next(iter(draft.arguments.raw("vocab-file")), None)
    name = path if by_model else _published(word) or draft.path("vocab-file", "model.vocab_size")
    if name is None and kind in _DEFAULT_FILES and not draft.arguments.switch("vocab-file"):
        name = _DEFAULT_FILES[kind]
    counted = None if name is None else _model_ids(name) if by_model else _file_ids(name)
    special = draft.arguments.raw("tokenizer-special-tokens")
    if special and counted is not None:
        draft.notes.append(f"--tokenizer-special-tokens: those that {name} lacks would be ids beyond its {counted}.")
    if counted is not None:
        if size is not None and size != counted:
            draft.notes.append(
                f"--vocab-size {size}: Megatron-LM counts the {counted} ids of {name}, and so does the recipe."
            )
        return counted, f"ids of {name}"
    if size is not None:
        shown = name or next(map(str, draft.arguments.raw("tokenizer-model" if by_model else "vocab-file")), "its file")
        draft.notes.append(
            f"--vocab-size {size}: Megatron-LM counts the ids of {shown}, which is not on this machine. Check that "
            "they are as many."
        )
        return size, flag
    if not by_model:
        words = draft.arguments.raw("vocab-file")
        if all(isinstance(word, str) for word in words):
            draft.open.append(
                f"model.vocab_size: the entries of --vocab-file {name}, which is not on this machine. Write their "
                "number into the recipe, or run this where the file is."
            )
    return None, ""


def _published(word: ScriptWord | None) -> str | None:
    """The name of a published file whose folder is not known."""
    last = str(word or "").rpartition("/")[2]
    return last if isinstance(word, OpenText) and last in _PUBLISHED else None


def _file_ids(name: str) -> int | None:
    """Entries of a vocab.json, or lines of a vocab.txt; by name those of published ones."""
    path = Path(name)
    try:
        text = read_text(path)
    except OSError:
        return _PUBLISHED.get(path.name)
    if path.suffix == ".txt":
        return len(text.splitlines())
    entries = json_value(text, path)
    if not isinstance(entries, dict):
        raise UserError(f"--vocab-file {path}: expected an object of tokens and their ids.")
    return len(entries)


def _model_ids(name: str) -> int | None:
    """Ids of a tokenizer that is on this machine."""
    path = Path(name)
    if not path.exists():
        return None
    from data.tokenizers.base import open_tokenizer  # takes numpy's time

    try:
        return open_tokenizer(path.absolute(), None, "--tokenizer-model: ").vocab_size
    except UserError:
        return None  # such as one that does not say what ends a document: a run asks for it
