"""What an exported folder says of texts' begin and end, without which generation never stops."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.tokenizers.base import SentencePieceTokenizer, TiktokenTokenizer, Tokenizer
from program.untrusted import read_foreign
from tools.shared.carried_tokenizer import TOKENIZER, Ends, eos_ids, is_llama3

GENERATION = "generation_config.json"


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
