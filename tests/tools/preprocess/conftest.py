"""A small corpus and small tokenizers of each kind."""

import json
import os
from pathlib import Path

import pytest

from data import corpus
from tools.preprocess.__main__ import main

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
EOD = "<|endoftext|>"
ODD = [
    "Grüße, 你好 👋🏽 \u200d  \u00a0 tabs\t\t\tend   ",
    "a\r\nb\r\n\r\n\r\n   c\n\n\n",
    "1234567 12 1,000 x=1\x00y",
    "don't I'LL she'S",
    "'",
    "e\u0301 é ﬁ İ",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Documents: parts of the standard library's sources, and odd ones."""
    found = [path.read_text()[:6000] for path in corpus.files(max_bytes=4_000_000)]
    return [*ODD, *found][:120]


@pytest.fixture(scope="session")
def lines(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as a .jsonl file."""
    path = tmp_path_factory.mktemp("corpus") / "lines.jsonl"
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    return path


@pytest.fixture(scope="session")
def tokenizer_json(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json with Llama 3's regular expression."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[EOD, "<|pad|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = tmp_path_factory.mktemp("hf")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def sentencepiece_model(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 1000 pieces, trained by the tool itself."""
    path = tmp_path_factory.mktemp("spm") / "t.model"
    assert main(["train", str(lines), "--output", str(path), "--vocab_size", "1000"]) == 0
    return path
