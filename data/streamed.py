"""From `data.stream` or `data.stream_blend` to what is read: streams of each source, and the blend of all."""

from pathlib import Path

from data import blend
from data.cache import Console
from data.config import DataConfig
from data.prepared import Prepared, PreparedSource, digest
from data.streaming.opening import open_streams
from data.tokenizers import base


def prepare_streams(config: DataConfig, folder: Path, console: Console) -> Prepared:
    """Inputs found and tried out; nothing but a blend's table is written, into ``folder``. Raises UserError as
    ``open_streams``."""
    tokenizer = base.load(config, folder, console)
    streams = open_streams(config, tokenizer, console)
    digests = [digest([tokenizer.fingerprint, *one.fingerprints.values(), str(one.plan)]) for one in streams]
    plan = {name: value for one in streams for name, value in one.plan.items()}
    # Not in the digests: earlier versions kept neither.
    plan |= {"engine": " ".join(sorted({one.engine.name for one in streams})), "stream_shuffle": config.stream_shuffle}
    if len(streams) == 1:
        found, fingerprint, mixture = streams[0].fingerprints, digests[0], None
        units: tuple[int, ...] = (0,) * len(found)
    else:
        units = blend.rounded([*config.stream_blend.values()])
        found = dict(zip(config.stream_blend, digests, strict=True))
        fingerprint = digest([tokenizer.fingerprint, *digests, *map(str, units)])
        mixture = blend.load(units, folder, console)
        for name, weight in zip(found, units, strict=True):
            console(f"data: {weight / blend.PERIOD:.7f} of the samples from {name}")
    sources = [
        PreparedSource(name=name, shards=(), units=weight, fingerprint=own, tokens=0)
        for (name, own), weight in zip(found.items(), units, strict=True)
    ]
    return Prepared(
        tokenizer=tokenizer,
        shards=(),
        fingerprint=fingerprint,
        sources=tuple(sources),
        plan=plan,
        blend=mixture,
        streams=streams,
    )
