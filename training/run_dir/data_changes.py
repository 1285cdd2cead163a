"""What a checkpoint keeps of the data, and what a resume finds changed."""

from collections.abc import Iterator

from data.prepared import Prepared
from program.errors import cut_short
from training.checkpoint.state import JSON
from training.config.run_config import RunConfig


def data_entry(config: RunConfig, prepared: Prepared) -> dict[str, JSON]:
    """What decides which samples come in which order."""
    sources: dict[str, JSON] = {
        source.name: {
            "weight": source.units,
            "tokens": source.tokens,
            "shards": source.fingerprint,
            "each_shard": " ".join(source.each),
        }
        for source in prepared.sources
    }
    order: dict[str, JSON] = {} if prepared.plan is None else dict(prepared.plan)
    return {
        "fingerprint": prepared.fingerprint,
        "tokenizer": prepared.tokenizer.fingerprint,
        "sources": sources,
        "seed": config.train.seed,
        "split": _split(config, prepared),
        "seq_length": config.model.seq_length,
        "order": config.data.order,
        **config.data.shaping,
        **order,
    }


def _split(config: RunConfig, prepared: Prepared) -> str:
    """Weights, and over what they are rounded, where a source has several shards: checkpoints of versions that cut each
    shard on its own have the weights alone, and their order was another."""
    several = prepared.plan is None and any(len(source.shards) > 1 for source in prepared.sources)
    return config.data.split + " over all shards of a source" * several


def data_changes(before: JSON, now: dict[str, JSON]) -> list[str]:
    """What differs, a line each; nothing that the checkpoint, of an older version, says nothing of."""
    if not isinstance(before, dict):
        return []
    lines = [
        f"{key} is {now[key]} (was: {cut_short(str(before[key]))})"
        for key in now.keys() & before.keys() - {"fingerprint", "sources"}
        if before[key] != now[key]
    ]
    lines += _sources(before.get("sources"), now.get("sources"))
    if not lines and before.get("fingerprint") != now.get("fingerprint"):
        lines.append(f"fingerprint is {now.get('fingerprint')} (was: {cut_short(str(before.get('fingerprint')))})")
    return sorted(lines)


def changed_entries(before: JSON, now: dict[str, JSON]) -> list[str]:
    """Names of the entries that `data_changes` finds changed."""
    if not isinstance(before, dict):
        return []
    own = [key for key in now if key in before and key != "sources" and before[key] != now[key]]
    return own + ["sources"] * any(_sources(before.get("sources"), now.get("sources")))


def _sources(old: JSON, new: JSON) -> Iterator[str]:
    """By their order: what a source is called, or where it lies, changes nothing."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    if len(old) != len(new):
        yield f"sources are {', '.join(new)} (were: {cut_short(', '.join(old))})"
        return
    for name, was, found in zip(new, old.values(), new.values(), strict=True):
        if isinstance(was, dict) and isinstance(found, dict):
            for key in sorted(was.keys() & found.keys() - {"each_shard"}):
                if was[key] != found[key]:
                    which = _which(was, found) if key == "shards" else ""
                    yield f"{key} of source {name}: {found[key]} (was: {cut_short(str(was[key]))}){which}"


def _which(was: dict[str, JSON], found: dict[str, JSON]) -> str:
    """Of the shards of a source, those that are others, where the checkpoint tells."""
    old, new = (str(one.get("each_shard") or "").split() for one in (was, found))
    if not old or not new:
        return ""
    if len(old) != len(new):
        return f"; {len(new)} shards (were: {len(old)})"
    changed = [number for number, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    shown = ", ".join(str(number) for number in changed[:5])
    return f"; changed, of {len(new)} counted from 0: {shown}{', …' if len(changed) > 5 else ''}"
