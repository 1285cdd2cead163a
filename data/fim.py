"""Fill-in-the-middle: documents of a sample become prefix, suffix and middle (Bavarian et al., arXiv:2207.14255).

The rules are Megatron-LM's (megatron/training/datasets/fim_dataset.py, GPTFIMDataset, of 0.19.2), with its draws in its
order: a document, or the piece of one that a sample holds, becomes text, is cut at two places between characters, and
its three parts are tokenised again. What then is too long for the sample is cut off at its end. What is too short is
filled up with the pad token; there is no loss on it. Megatron draws from one generator after another sample; here each
sample has its own.
"""

from collections.abc import Callable, Mapping

import numpy as np

from data.config import DataConfig
from data.prepared import NO_TOKEN
from data.tokenizers.base import Tokenizer
from program.errors import UserError, printable

NAMES = ("fim_prefix_token", "fim_suffix_token", "fim_middle_token", "fim_pad_token", "fim_split_sample")


class Fim:
    """What data.fim_rate and its fields ask for. Costs the decoding and encoding of each document that is permuted, in
    the thread that reads ahead."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        """Raises UserError where the tokenizer has no such token."""
        self.config, self.tokenizer = config, tokenizer
        self.prefix, self.suffix, self.middle, self.pad, self.split = (_id(config, name, tokenizer) for name in NAMES)

    def __call__(self, tokens: np.ndarray, sample: int, bits: np.random.PCG64) -> tuple[np.ndarray, Mapping[str, int]]:
        """Tokens [n] int32 of a sample -> as many, and how many documents were permuted. NO_TOKEN at the end is room:
        it is no document. A document that is permuted is predicted whole, also where ~id stood in it."""
        text = tokens[: len(tokens) - int(np.argmax(tokens[::-1] != NO_TOKEN))]
        ended = len(text) < len(tokens) and text[-1] == self.tokenizer.eod  # behind it is not even an empty document
        permuting = _Permuting(self, np.random.RandomState(bits))
        found = _each(text[: len(text) - ended], self.tokenizer.eod, permuting.document)
        found = np.append(found, text[len(text) - ended :])[: len(tokens)]
        filled = np.full(len(tokens), ~self.pad, np.int32)
        filled[: len(found)] = found
        return filled, {"fim_documents": permuting.count, "fim_samples": int(permuting.count > 0)}


class _Permuting:
    """The documents of one sample."""

    def __init__(self, fim: Fim, draw: np.random.RandomState) -> None:
        self.fim, self.config, self.draw, self.count = fim, fim.config, draw, 0

    def document(self, tokens: np.ndarray) -> np.ndarray:
        """One, or its fragments where fim_split_sample is in it."""
        if self.config.fim_split_sample is None or not (tokens == self.fim.split).any():
            return self._permuted(tokens, self.config.fim_rate)
        if not self.draw.binomial(1, self.config.fim_rate):
            return tokens
        rate = self.config.fim_fragment_rate or 0.0
        return _each(tokens, self.fim.split, lambda fragment: self._permuted(fragment, rate))

    def _permuted(self, tokens: np.ndarray, rate: float) -> np.ndarray:
        if not self.draw.binomial(1, rate):
            return tokens
        text = self.fim.tokenizer.decode(np.where(tokens < 0, ~tokens, tokens))
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return tokens
        begin, end = sorted(self.draw.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = map(self.fim.tokenizer.encode, (text[:begin], text[begin:end], text[end:]))
        self.count += 1
        if self.draw.binomial(1, self.config.fim_spm_rate):  # variant 2 of the paper
            return np.concatenate([[self.fim.prefix, self.fim.suffix], suffix, [self.fim.middle], prefix, middle])
        return np.concatenate([[self.fim.prefix], prefix, [self.fim.suffix], suffix, [self.fim.middle], middle])


def _each(tokens: np.ndarray, mark: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What lies between marks, changed; a mark with nothing before it is left out, as Megatron does."""
    found, begin = [], 0
    for at in np.flatnonzero(tokens == mark).tolist():
        if at > begin:
            found += [change(tokens[begin:at]), tokens[at : at + 1]]
        begin = at + 1
    return np.concatenate([*found, change(tokens[begin:])])


def _id(config: DataConfig, field: str, tokenizer: Tokenizer) -> int:
    text = getattr(config, field)
    found = NO_TOKEN if text is None else tokenizer.token_id(text)
    if found is None:
        known = printable(", ".join(tokenizer.special_texts[:20])[:500]) or "none"
        raise UserError(
            f'data.{field} = "{text}": data.tokenizer has no such token, which data.fim_rate = {config.fim_rate:g} '
            f"needs. Name one that it has, or add it to the tokenizer; its control tokens: {known}."
        )
    return found
