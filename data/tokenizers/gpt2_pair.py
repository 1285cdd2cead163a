"""GPT-2's two files, `vocab.json` and `merges.txt`, as the tokenizer.json that they stand for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.tokenizers.tiktoken_engine import byte_letters
from data.tokenizers.tokenizer_json import JsonTokenizer
from data.tokenizers.vocabulary import model_bytes, said
from program.errors import UserError
from program.untrusted import InputError, json_value, read_foreign

VOCABULARY, MERGES = "vocab.json", "merges.txt"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
END_OF_TEXT = "<|endoftext|>"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What Qwen2Tokenizer of transformers splits by; all others of these split as GPT-2."""
GPT2_CLASSES = ("GPT2", "Roberta", "Bart", "Longformer", "CodeGen", "GPTNeoX", "PreTrained", "Tokenizers")
CONVERT = "Give its tokenizer.json, as AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it."
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class PairTokenizer(JsonTokenizer):
    """Byte-level BPE out of a vocabulary and its merges, as transformers makes it of them.

    Control tokens are those that tokenizer_config.json, special_tokens_map.json and added_tokens.json beside them name,
    and `<|endoftext|>`. Raises UserError for files that are missing or no such pair.
    """

    what = "a pair of vocabulary and merges"

    def __init__(self, vocabulary: Path, merges: Path, eod_token: str | None = None, flags: str = "data.") -> None:
        """flags: as for JsonTokenizer."""
        for path, other in ((vocabulary, merges), (merges, vocabulary)):
            if not path.is_file():
                raise UserError(f"{flags}tokenizer: no file {path}, which belongs to {other}.")
        with said(flags, vocabulary):
            content = _content(vocabulary, merges)
        super().__init__(vocabulary, eod_token, flags, json.dumps(content, ensure_ascii=False).encode())


def pair_of(path: Path) -> tuple[Path, Path]:
    """Vocabulary and merges, either of which is given: `gpt2-vocab.json` goes with `gpt2-merges.txt`, `encoder.json`
    with `vocab.bpe`.
    """
    name = path.name
    if path.suffix == ".json":
        swapped = "vocab.bpe" if name == "encoder.json" else path.stem.replace("vocab", "merges") + ".txt"
        return path, path.with_name(swapped if swapped != f"{path.stem}.txt" else MERGES)
    swapped = "encoder.json" if name == "vocab.bpe" else path.stem.replace("merges", "vocab") + ".json"
    return path.with_name(swapped if swapped != f"{path.stem}.json" else VOCABULARY), path


def _content(vocabulary: Path, merges: Path) -> dict[str, Any]:
    ids = _ids(json_value(model_bytes(vocabulary), vocabulary), vocabulary)
    config, named, added = (read_beside(vocabulary, name) for name in BESIDE)
    tokens = dict(_added(ids, config, named, added, vocabulary))
    splits = _splits(config, vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index, "content": text, "special": special, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False,
            }
            for text, (index, special) in sorted(tokens.items(), key=lambda one: one[1][0])
        ],
        **splits,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": ids, "merges": list(_merges(model_bytes(merges), merges)),
        },
    }  # fmt: skip


def _ids(content: Any, path: Path) -> dict[str, int]:
    if not isinstance(content, dict) or not all(type(index) is int for index in content.values()):
        raise InputError(path, "expected an object of texts and their ids.")
    if len(set(content.values())) < len(content):
        raise InputError(path, "expected another id for each text; some have the same.")
    if missing := [letter for letter in byte_letters() if letter not in content]:
        raise InputError(
            path,
            f"no id for {len(missing)} of the 256 bytes, the first {missing[0]!r}: not byte-level BPE as GPT-2's. "
            f"{CONVERT}",
        )
    return content


def _merges(raw: bytes, path: Path) -> Iterator[list[str]]:
    try:
        lines = raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(path, f"byte {error.start} is not UTF-8 text.") from None
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise InputError(f"{path}:{number}", f"expected two pieces with a blank between, found {line[:40]!r}.")
        yield pair


def _splits(config: dict[str, Any], vocabulary: Path) -> dict[str, Any]:
    """Normalizer and pre-tokenizer."""
    name = str(config.get("tokenizer_class") or "GPT2Tokenizer")
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": config.get("add_prefix_space") is True, "trim_offsets": True,
        "use_regex": True,
    }  # fmt: skip
    if name.startswith("Qwen2"):
        split = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
        steps = [split, {**byte_level, "use_regex": False}]
        return {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    if not name.startswith(GPT2_CLASSES):
        raise InputError(
            vocabulary,
            f"tokenizer_config.json says {name[:60]}; expected GPT-2's or Qwen2's. {CONVERT}",
        )
    return {"normalizer": None, "pre_tokenizer": byte_level}


def _added(
    ids: dict[str, int], config: dict[str, Any], named: dict[str, Any], added: dict[str, Any], path: Path
) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Text, id and whether it is a control token; the later of two entries counts."""
    control = {text for one in (named, config) for text in _named(one)}
    known = ids | {text: index for text, index in added.items() if type(index) is int}
    decoder = config.get("added_tokens_decoder")
    for text in [END_OF_TEXT, *sorted(control), *added]:
        if text in known:
            yield text, (known[text], text in control or text == END_OF_TEXT)
    for index, entry in decoder.items() if isinstance(decoder, dict) else ():
        if not (index.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise InputError(path.with_name(BESIDE[0]), f"added_tokens_decoder: {index[:20]}: expected a token.")
        text = entry["content"]
        yield text, (int(index), entry.get("special") is True or text in control)


def _named(given: dict[str, Any]) -> Iterator[str]:
    """Texts of the control tokens that a file names."""
    more = given.get("additional_special_tokens")
    for value in [*(given.get(name) for name in NAMED), *(more if isinstance(more, list) else ())]:
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield text


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """A JSON file beside another; empty where there is none. Raises UserError where it is not an object."""
    try:
        return dict(read_foreign(path.with_name(name)))
    except FileNotFoundError:
        return {}
