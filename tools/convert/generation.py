"""What an exported folder says of texts' begin and end, without which generation never stops."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from data.tokenizers import base
from data.tokenizers.base import SentencePieceTokenizer, TiktokenTokenizer, Tokenizer
from data.tokenizers.tokenizer_json import JsonTokenizer
from parallel.errors import UserError
from parallel.untrusted import read_foreign
from tools.convert.tokenizer import eos_ids, read_beside
from training.checkpoint.imported import IMPORTED, STAND_INS
from training.config.run_config import RunConfig

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"


@dataclass(slots=True, frozen=True)
class Ends:
    """The ids that begin and end a text, where they are known, and what they look like."""

    eos: int
    bos: int | None
    texts: Mapping[str, str]
    """``eos_token``, ``bos_token``."""
    tokenizer: Tokenizer


def own_ends(checkpoint: Path, config: RunConfig, entries: Mapping[str, Any]) -> tuple[Ends | None, list[str]]:
    """Those of the tokenizer that a checkpoint's run trained with, and notes. None where it is only a stand-in for a
    model's own, lies in a cache, or does not open."""
    if config.data.tokenizer == "builtin" or (config.data.tokenizer in STAND_INS and IMPORTED in entries):
        return None, []
    try:
        found = base.load(config.data, checkpoint, lambda _: None)
    except UserError as error:
        return None, [f"which id ends a text is not known from the tokenizer: {error}"]
    bos, texts = None, {}
    if isinstance(found, JsonTokenizer) and found.path is not None:
        texts = {"eos_token": found.eod_text}
        begin = read_beside(found.path, TOKENIZER).get("bos_token")
        begin = begin.get("content") if isinstance(begin, dict) else begin
        bos = found.with_specials.token_to_id(begin) if isinstance(begin, str) else None
    elif isinstance(found, SentencePieceTokenizer):
        pieces = found.processor
        bos = pieces.bos_id() if pieces.bos_id() >= 0 else None
        ids = {"eos_token": found.eod, "bos_token": bos, "unk_token": pieces.unk_id()}
        texts = {name: pieces.id_to_piece(index) for name, index in ids.items() if index is not None and index >= 0}
    elif is_llama3(found):
        bos = found.special_tokens["<|begin_of_text|>"]
        texts = {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"}
    return Ends(found.eod, bos, texts, found), []


def with_ends(config: dict[str, Any], carried: Mapping[str, Path], ends: Ends | None) -> dict[str, Any]:
    """config.json with the ids that begin and end a text: its own, generation_config.json's, and the tokenizer's.

    An id that ended documents in training ends a text, whatever else does.
    """
    generation = read_foreign(carried[GENERATION]) if GENERATION in carried else {}
    found = dict(config)
    if not eos_ids(found) and (ids := eos_ids(generation)):
        found["eos_token_id"] = _with_end(ids, ids[0])
    if found.get("bos_token_id") is None and isinstance(generation.get("bos_token_id"), int):
        found["bos_token_id"] = generation["bos_token_id"]
    if ends is not None:
        found["eos_token_id"] = _with_end(eos_ids(found), ends.eos)
        if found.get("bos_token_id") is None and ends.bos is not None:
            found["bos_token_id"] = ends.bos
    return found


def more_files(config: Mapping[str, Any], carried: Mapping[str, Path], ends: Ends | None) -> dict[str, bytes]:
    """What the folder needs beside what is carried, or in its place, for generation to begin and end a text.

    config: what ``with_ends`` made.
    """
    files: dict[str, bytes] = {}
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    if GENERATION in carried:
        own = read_foreign(carried[GENERATION])
        if not eos_ids(own) and "eos_token_id" in ids:
            files[GENERATION] = _encoded(own | {"eos_token_id": ids["eos_token_id"]})
        elif ends is not None and ends.eos not in eos_ids(own):
            files[GENERATION] = _encoded(own | {"eos_token_id": _with_end(eos_ids(own), ends.eos)})
    elif "eos_token_id" in ids:
        files[GENERATION] = _encoded(ids)
    if ends is not None and TOKENIZER not in carried and ends.texts:
        if "tokenizer.json" in carried:
            files[TOKENIZER] = _encoded({"tokenizer_class": "PreTrainedTokenizerFast", **ends.texts})
        elif "tokenizer.model" in carried and is_llama3(ends.tokenizer):
            files[TOKENIZER] = _encoded({**_llama3_config(ends.tokenizer), **ends.texts})
        elif "tokenizer.model" in carried:
            plain = {"add_bos_token": False, "add_eos_token": False, "add_prefix_space": _adds_space(ends.tokenizer)}
            files[TOKENIZER] = _encoded({"tokenizer_class": "LlamaTokenizer", **plain, **ends.texts})
    return files


def is_llama3(tokenizer: Tokenizer) -> TypeGuard[TiktokenTokenizer]:
    """Whether it is Meta's tokenizer.model of Llama 3, whose ranks transformers reads as such; of Llama 4's it does not
    know how text is split."""
    return isinstance(tokenizer, TiktokenTokenizer) and tokenizer.about is None and tokenizer.vocab_size == 128_256


def _llama3_config(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """The control tokens, which are not in the file; of an id with two texts the later versions' counts."""
    by_id = {index: text for text, index in tokenizer.special_tokens.items()}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(index): {"content": text, **flags} for index, text in sorted(by_id.items())}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether a SentencePiece model puts a blank before each text."""
    return isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.processor.encode("a", out_type=str)[0] != "a"


def _with_end(ids: list[int], end: int) -> int | list[int]:
    found = ids if end in ids else [*ids, end]
    return found[0] if len(found) == 1 else found


def _encoded(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
