"""Which layers live on which pipeline stage and chunk.

Chunks are numbered in the order activations pass through them: chunk ``v * PP + p`` is virtual stage ``v`` of
pipeline rank ``p`` (the interleaved order of arXiv:2104.04473, section 2.2).
"""

import re
from collections.abc import Sequence
from itertools import groupby

from parallel.config import ParallelConfig

MOST_LETTERS = 100_000
"""Of a layout string written out: ten times the most layers that a model may have."""
SPELLED = 3
"""Layers that a layout string has a letter for, each; more are a number."""


def layers_per_chunk(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Transformer layers of each chunk, first to last. Call ``stage_problems`` before.

    An explicit layout wins; else the first and last stage get what they ask for, the others equal shares, of which
    the embedding and the loss may each take the place of one layer.
    """
    if parallel.pipeline_model_parallel_layout is not None:
        return [chunk.count("t") for chunk in layout_chunks(parallel.pipeline_model_parallel_layout)]
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if parallel.account_for_embedding_in_pipeline_split or parallel.account_for_loss_in_pipeline_split:
        share = (num_layers + _accounted(parallel)) // (pp * vpp)
        chunks = [share] * (pp * vpp)
        chunks[0] -= parallel.account_for_embedding_in_pipeline_split
        chunks[-1] -= parallel.account_for_loss_in_pipeline_split
        return chunks
    middle = num_layers - (first or 0) - (last or 0)
    share = middle // max(1, pp - (first is not None) - (last is not None))
    stages = [share] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return [stages[p] // vpp for _ in range(vpp) for p in range(pp)]


def _accounted(parallel: ParallelConfig) -> int:
    return parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split


def layout_chunks(layout: str) -> list[str]:
    """Megatron's layout string as letters per chunk: ``"Et*2|(t)*3|L"`` -> ``["Ett", "ttt", "L"]``.

    Only numbers of up to three digits repeat, and only up to MOST_LETTERS in all: what is longer stays as it is, and
    is reported, instead of filling memory.
    """
    text = re.sub(r"[\s,]", "", layout[:MOST_LETTERS])
    while (match := re.search(r"\(([^()]*)\)(?:\*(\d{1,3}))?", text)) is not None:
        repeated = len(match[1]) * int(match[2] or 1)
        if len(text) + repeated > MOST_LETTERS:
            return [text]
        text = text[: match.start()] + match[1] * int(match[2] or 1) + text[match.end() :]
    if len(text) * 1000 > MOST_LETTERS and sum(map(int, re.findall(r"\*(\d{1,3})", text))) > MOST_LETTERS:
        return [text]
    text = re.sub(r"([EtmL|])\*(\d{1,3})", lambda match: match[1] * int(match[2]), text)
    return text.split("|")


def layout_string(chunks: Sequence[int]) -> str:
    """Megatron's layout string of so many layers in each chunk, with equal neighbours written once:
    ``[3, 2, 2, 1]`` -> ``"Ettt|(tt|)*2tL"``. Raises ValueError for fewer than two chunks."""
    first, *middle, last = (_layers(count) for count in chunks)
    between = [(word, len(list(same))) for word, same in groupby(middle)]
    groups = "".join(f"({word}|)*{count}" if count > 1 else f"{word}|" for word, count in between)
    return f"E{first}|{groups}{last}L"


def _layers(count: int) -> str:
    return "t" * count if count <= SPELLED else f"t*{count}"


def stage_problems(parallel: ParallelConfig, num_layers: int, mtp_num_layers: int = 0) -> list[str]:
    """Whether the layers can be split as asked, with the numbers and the sizes that would work.

    MTP depths are not among the layers: they are on the last stage, in front of the loss.
    """
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    if parallel.pipeline_model_parallel_layout is not None:
        return _layout_problems(parallel, num_layers, pp * vpp, mtp_num_layers)
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if _accounted(parallel):
        return _accounted_problems(parallel, num_layers, pp, vpp)
    if first is None and last is None:
        return _equal_problems(num_layers, pp, vpp)
    if pp == 1:
        needs = "need parallel.pipeline_model_parallel_size > 1"
        return [f"parallel.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage {needs}."]
    middle, others = num_layers - (first or 0) - (last or 0), pp - (first is not None) - (last is not None)
    named = f"first stage {first or 'equal'}, last stage {last or 'equal'}"
    if middle < others or (others and middle % others) or (not others and middle):
        return [
            f"parallel: {num_layers} layers with {named} leave {middle} for {others} other stages of "
            f"PP {pp}; each must get the same number, at least 1. Change "
            "parallel.num_layers_in_first_pipeline_stage or parallel.num_layers_in_last_pipeline_stage."
        ]
    uneven = [size for size in (first, last, middle // others if others else None) if size is not None and size % vpp]
    if uneven:
        return [f"parallel: a stage of {uneven[0]} layers ({named}) cannot be cut into VPP {vpp} equal chunks."]
    return []


def _equal_problems(num_layers: int, pp: int, vpp: int) -> list[str]:
    chunks = pp * vpp
    if num_layers % chunks == 0:
        return []
    below, above = num_layers // chunks * chunks, -(-num_layers // chunks) * chunks
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return [
        f"model.num_layers {num_layers} is not a multiple of PP {pp} x VPP {vpp} = {chunks} chunks. "
        f"Use {sizes} layers, change parallel.pipeline_model_parallel_size or "
        ".virtual_pipeline_model_parallel_size, or split unevenly with "
        "parallel.num_layers_in_first_pipeline_stage, .num_layers_in_last_pipeline_stage or "
        ".pipeline_model_parallel_layout."
    ]


def _accounted_problems(parallel: ParallelConfig, num_layers: int, pp: int, vpp: int) -> list[str]:
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    fields = " and ".join(f"parallel.{name}" for name in names if getattr(parallel, name))
    if parallel.num_layers_in_first_pipeline_stage or parallel.num_layers_in_last_pipeline_stage:
        return [
            f"{fields}: parallel.num_layers_in_first_pipeline_stage and .num_layers_in_last_pipeline_stage already say "
            "how many layers the ends have; remove one of the two."
        ]
    chunks, extra = pp * vpp, _accounted(parallel)
    if pp == 1:
        return [f"{fields} needs parallel.pipeline_model_parallel_size > 1."]
    if (num_layers + extra) % chunks == 0:
        return []
    below, above = (num_layers + extra) // chunks * chunks - extra, -(-(num_layers + extra) // chunks) * chunks - extra
    sizes = " or ".join(str(size) for size in (below, above) if size > 0)
    return [
        f"model.num_layers {num_layers} and {extra} more for {fields} are not a multiple of PP {pp} x VPP {vpp} = "
        f"{chunks} chunks. Use {sizes} layers, or change parallel.pipeline_model_parallel_size."
    ]


def _layout_problems(parallel: ParallelConfig, num_layers: int, chunks: int, mtp_num_layers: int) -> list[str]:
    where, layout = "parallel.pipeline_model_parallel_layout", parallel.pipeline_model_parallel_layout or ""
    words = layout_chunks(layout)
    letters = "".join(words)
    found = []
    if parallel.num_layers_in_first_pipeline_stage or parallel.num_layers_in_last_pipeline_stage:
        found.append(f"{where} already says how many layers the first and last stage have; remove one of the two.")
    if _accounted(parallel):
        found.append(f"{where} already says where embedding and loss are; remove parallel.account_for_... .")
    if set(letters) - set("EtmL"):
        found.append(f'{where} may hold E, t, m, L, |, *number and (groups), found "{layout[:200]}".')
    elif not (letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1):
        found.append(f'{where} must begin with its only E and end with its only L, found "{layout[:200]}".')
    elif not words[0].startswith("E") or not words[-1].endswith("L"):
        found.append(f'{where} must have E in the first stage and L in the last, found "{layout[:200]}".')
    if len(words) != chunks:
        found.append(f"{where} has {len(words)} stages, expected PP x VPP = {chunks}.")
    if letters.count("t") != num_layers:
        found.append(f"{where} has {letters.count('t')} layers (t), model.num_layers is {num_layers}.")
    if "m" in letters and letters.lstrip("Et") != "m" * mtp_num_layers + "L":
        found.append(
            f"{where} has {letters.count('m')} MTP depths (m); there must be model.mtp_num_layers {mtp_num_layers}, "
            "right before L: MTP runs on the last stage. They may also be left out."
        )
    elif "m" in "".join(words[:-1]):
        found.append(f"{where} has MTP depths (m) in front of the last stage; put all of them before L.")
    return found
