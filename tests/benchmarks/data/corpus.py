"""The corpus and the tokenizers that are measured with: Python sources of this machine, always there."""

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from program.untrusted import read_text

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Llama 3's split (meta-llama/llama3, llama/tokenizer.py)."""
VOCABULARY = 32_000
EOD = "<|endoftext|>"
TRAINED_ON_BYTES = 10_000_000


def lines(folder: Path, size_mb: float) -> Path:
    """A .jsonl of about `size_mb` 10^6 bytes of text; where there is too little, all of it again."""
    path = folder / f"corpus-{size_mb:g}.jsonl"
    if not path.is_file():
        written = 0.0
        with path.open("w") as file:
            while written < size_mb * 1e6:
                for text in texts():
                    file.write(json.dumps({"text": text}) + "\n")
                    written += len(text)
                    if written >= size_mb * 1e6:
                        break
    return path


def texts() -> Iterator[str]:
    """Every source file of the standard library and the installed packages, each text once.

    None that holds a control token's text, of which Megatron's preprocessing makes the id and ours does not.
    """
    seen = set()
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                text = read_text(path)
            except (OSError, UnicodeDecodeError):
                continue
            if text and EOD not in text and hash(text) not in seen:
                seen.add(hash(text))
                yield text


def sample() -> Iterator[str]:
    """What tokenizers are trained on."""
    read = 0
    for text in texts():
        yield text
        read += len(text)
        if read > TRAINED_ON_BYTES:
            return


def byte_level(folder: Path) -> Path:
    """A byte-level BPE tokenizer.json of 32,000 ids."""
    path = folder / "hf" / "tokenizer.json"
    if not path.is_file():
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        path.parent.mkdir(exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
        byte_steps = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_steps])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(sample(), trainer)
        tokenizer.save(str(path))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD}
        (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def sentencepiece(folder: Path) -> Path:
    """A SentencePiece BPE model of 32,000 pieces."""
    path = folder / "t.model"
    if not path.is_file():
        from tools.preprocess.training import read_options, train

        train((str(lines(folder, TRAINED_ON_BYTES / 1e6)),), path, VOCABULARY, read_options(), TRAINED_ON_BYTES)
    return path
