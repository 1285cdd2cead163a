"""How often a training reads its text."""

from collections.abc import Mapping

from data.config import DataConfig, split_weights
from data.prepared import SourceProgress
from data.shards import Shard
from data.sources import inputs_of, named

MOST_NAMED = 3


def planned(config: DataConfig, samples: int, seq_length: int) -> dict[str, SourceProgress]:
    """How far each source will have been read, nearly: by the headers of its shards and the shares of `data.split`.

    Empty where tokens are not counted yet: of raw files, the built-in corpus, and streams. Opens each shard's index
    (0.2 ms each on a local disk). Raises UserError for what is missing or damaged.
    """
    if config.streamed:
        return {}
    sources, trains = named(config), split_weights(config.split)
    total, found = sum(source.weight for source in sources), dict[str, SourceProgress]()
    for source in sources:
        given = inputs_of(source, config)
        if given.raw_files or not given.prefixes:
            return {}
        tokens = sum(Shard(prefix, check_ends=False).token_count for prefix in given.prefixes)
        count = samples * source.weight / total
        found[source.name] = SourceProgress(round(count), count * seq_length / (tokens * trains[0] / sum(trains)))
    return found


def described(read: Mapping[str, SourceProgress]) -> str:
    """Which sources are read more than once, and how often; empty where none is."""
    often = sorted(((one.epochs, name) for name, one in read.items() if one.epochs > 1), reverse=True)
    if not often:
        return ""
    known = "up to 4 times are nearly as good as new text, arXiv:2305.16264"
    if len(read) == 1:
        return f"each token is read about {_times(often[0][0])} times ({known})"
    most = ", ".join(f"{name} about {_times(epochs)} times" for epochs, name in often[:MOST_NAMED])
    more = f" and {len(often) - MOST_NAMED} more sources more than once" if len(often) > MOST_NAMED else ""
    return f"of the sources, {most}{more} ({known})"


def _times(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.1f}"
