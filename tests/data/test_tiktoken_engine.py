"""A regular expression whose alternatives are grouped cuts every text where it did before."""

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizers.tiktoken_engine import GPT2_PATTERN, alternatives, grouped

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE = r"'(?:[sdmt]|ll)| ?\p{L}++| ?\p{N}+|[^\s|\p{L}\p{N}]+|\s+(?!\S)|\s"
TEXTS = st.lists(st.sampled_from([*" \t\n\r'sStTa1|[]é\u3000\x1c中!", "'ll", "  ", "\r\n", "ab"])).map("".join)


@settings(max_examples=300)
@given(text=TEXTS)
@pytest.mark.parametrize("pattern", [GPT2_PATTERN, LLAMA3, POSSESSIVE])
def test_it_cuts_where_it_did(pattern: str, text: str) -> None:
    assert regex.findall(f"(?:{grouped(pattern)})", text) == regex.findall(f"(?:{pattern})", text)


def test_what_looks_around_stays_alone() -> None:
    assert grouped(r"a|b|\s+(?!\S)|\s+") == r"(?:a|b)|\s+(?!\S)|(?:\s+)"
    assert grouped(r"a++|b|c") == "a++|(?:b|c)"
    assert grouped(r"a{1,3}+|\p{L}+|c") == r"a{1,3}+|(?:\p{L}+|c)"
    assert grouped(GPT2_PATTERN).count("|(") == 1, "all of it but what looks ahead"
    assert alternatives(r"(a|b)|[|]|\||c") == ["(a|b)", "[|]", r"\|", "c"]


@pytest.mark.parametrize("pattern", ["(?i)a|b", "abc", r"[a|b", "(a|b"])
def test_what_is_not_understood_stays_as_it_is(pattern: str) -> None:
    assert grouped(pattern) == pattern
