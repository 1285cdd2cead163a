"""What Meta's code says of its `tokenizer.model`, a file of tiktoken's ranks: how text is split, and control tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class MetaEncoding:
    """What is not in the file."""

    model: str
    pattern: str
    special_tokens: dict[str, int]
    """Text and id; an id may have several texts, of which the model's versions have one each."""
    eod: str = "<|end_of_text|>"


def _numbered(first: int, names: Sequence[str]) -> dict[str, int]:
    return {name: first + number for number, name in enumerate(names)}


def _reserved(kind: str, first: int, count: int) -> list[str]:
    return [f"<|{kind}reserved_special_token_{number}|>" for number in range(first, first + count)]


def _llama3(first: int) -> dict[str, int]:
    """256 ids: as Llama 3 names them, and as 3.1 and later do."""
    begin = ["<|begin_of_text|>", "<|end_of_text|>"]
    turns = ["<|start_header_id|>", "<|end_header_id|>"]
    first_names = [*begin, *_reserved("", 0, 4), *turns, *_reserved("", 4, 1), "<|eot_id|>", *_reserved("", 5, 246)]
    padding = ["<|finetune_right_pad_id|>", "<|step_id|>"]
    later = [*begin, *_reserved("", 0, 2), *padding, *turns, "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"]
    return _numbered(first, first_names) | {
        name: index for name, index in _numbered(first, later).items() if "reserved" not in name
    }


def _llama4(first: int) -> dict[str, int]:
    """2048 ids."""
    text = [
        "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>", *_reserved("text_post_train_", 0, 6),
        "<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>", *_reserved("text_post_train_", 8, 61),
    ]  # fmt: skip
    vision = [
        "<|image_start|>", "<|image_end|>", *_reserved("vision_", 0, 2), "<|tile_x_separator|>",
        "<|tile_y_separator|>", *_reserved("vision_", 2, 4), "<|image|>", *_reserved("vision_", 6, 1), "<|patch|>",
        *_reserved("vision_", 7, 1041),
    ]  # fmt: skip
    reasoning = [*_reserved("reasoning_", 0, 8), "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"]
    begin = ["<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    names = [*begin, *text, *vision, *reasoning]
    return _numbered(first, [*names, *_reserved("", 0, 2048 - len(names))])


def encoding_of(ranks: int) -> MetaEncoding | None:
    """By the number of ranks, which is what tells one of these files from the ones that others name so; None of other
    numbers."""
    if ranks == 128_000:
        return MetaEncoding("Llama 3", LLAMA3_PATTERN, _llama3(ranks))
    if ranks == 200_000:
        return MetaEncoding("Llama 4", LLAMA4_PATTERN, _llama4(ranks))
    return None
