"""Flags of forks whose meaning is certain, as those of Megatron-LM that say the same."""

from collections.abc import Callable, Mapping, Sequence

from tools.from_megatron.flags_forks import RENAMED
from tools.from_megatron.unknown import OpenText, ScriptWord, joined

type Given = dict[str, list[ScriptWord]]
"""Flags by name with their values."""


def respelled(given: Given) -> tuple[Given, list[str], list[str]]:
    """The flags with Megatron-LM's names; what was read as what; and what cannot be read so, each a sentence."""
    found = {name: words for name, words in given.items() if name not in RENAMED and name not in _SPELLINGS}
    notes, unread = list[str](), list[str]()
    for name, words in sorted(given.items(), key=lambda item: item[0] not in RENAMED):
        if name in RENAMED:
            made: Mapping[str, Sequence[ScriptWord]] | None = {RENAMED[name]: words}
        elif name in _SPELLINGS:
            made = _SPELLINGS[name](words, found)
        else:
            continue
        written = joined([f"--{name}", *words])
        if made is None or any(found.get(flag, words) != words for flag, words in made.items()):
            unread.append(f"{written}: with these flags beside it, what it means is not certain.")
            continue
        found |= {flag: list(values) for flag, values in made.items()}
        notes.append(f"{written}: read as {' '.join(joined([f'--{flag}', *values]) for flag, values in made.items())}.")
    if joined(found.get("tokenizer-type", [])) == "PretrainedFromHF" and "tokenizer-name-or-path" in given:
        found["tokenizer-type"] = ["HuggingFaceTokenizer"]
    return found, notes, unread


type Spelling = Callable[[Sequence[ScriptWord], Given], Mapping[str, Sequence[ScriptWord]] | None]
"""From a flag's values and the other flags to what says the same; None where that is not certain."""


def _computed(make: Callable[..., str | None], *words: ScriptWord) -> ScriptWord | None:
    """Of whole numbers; not known where one of them is not known. None: of others."""
    unknowns = [unknown for word in words if isinstance(word, OpenText) for unknown in word.unknowns]
    if unknowns:
        return OpenText(joined(words), tuple(unknowns))
    texts = list(map(str, words))
    return make(*map(int, texts)) if all(text.isascii() and text.isdigit() for text in texts) else None


def _grouped(words: Sequence[ScriptWord], given: Given) -> Mapping[str, Sequence[ScriptWord]]:
    """Megatron-DeepSpeed has one flag for both."""
    return {"group-query-attention": [], "num-query-groups": words}


def _shared_experts(words: Sequence[ScriptWord], given: Given) -> Mapping[str, Sequence[ScriptWord]] | None:
    """MindSpeed-LLM's are as wide as so many routed ones, unless their width is given."""
    flag = "moe-shared-expert-intermediate-size"
    width = given.get(flag) or given.get("moe-ffn-hidden-size") or given.get("ffn-hidden-size")
    if not width or flag in given:
        return {flag: width} if width else None
    size = _computed(lambda count, each: str(count * each), *words, *width)
    return None if size is None else {flag: [size]}


def _dense_first(words: Sequence[ScriptWord], given: Given) -> Mapping[str, Sequence[ScriptWord]] | None:
    """MindSpeed-LLM's first blocks are dense; of the others those whose number --moe-layer-freq divides are not."""
    freq = given.pop("moe-layer-freq", ["1"])
    pattern = _computed(_blocks, *words, *freq, *given.get("num-layers", [""]))
    if pattern is None:
        given["moe-layer-freq"] = freq
    return None if pattern is None else {"moe-layer-freq": [pattern]}


def _blocks(dense: int, freq: int, layers: int) -> str | None:
    if freq == 1 and dense < layers:
        return f"([0]*{dense}+[1]*{layers - dense})"
    return str([int(at >= dense and at % freq == 0) for at in range(layers)]) if freq and layers < 10_000 else None


_SPELLINGS: dict[str, Spelling] = {
    "num-key-value-heads": _grouped,
    "fp8-hybrid": lambda words, given: {"fp8-format": ["hybrid"]},
    "fp8-e4m3": lambda words, given: {"fp8-format": ["e4m3"]},
    "multi-head-latent-attention": lambda words, given: {"multi-latent-attention": []},
    "n-shared-experts": _shared_experts,
    "first-k-dense-replace": _dense_first,
}
