"""The training data of one rank, from where a start begins."""

from data.loader import Packing
from data.order_begin import RUN_BEGIN, OrderBegin, stream_keys, turns
from data.prepared import Prepared, Samples
from data.source import build_source
from data.split import SplitName
from training.batches import BatchStream
from training.checkpoint import stream_position
from training.config.run_config import RunConfig
from training.parts.run import TrainingRun
from training.run_dir import run_files
from training.run_dir.data_changes import data_changes, data_entry


def open_source(prepared: Prepared, config: RunConfig, split: SplitName, begin: OrderBegin = RUN_BEGIN) -> Samples:
    """Samples of a split, in the order that train.seed gives. begin: where that of the train split begins."""
    return build_source(prepared, config.data, config.model.seq_length, config.train.seed, split, begin)


def build_stream(run: TrainingRun, begun: run_files.Begun) -> BatchStream:
    """This rank's batches of the train split, from where this start begins."""
    config, prepared, ranks, progress = run.config, run.prepared, run.ranks, begun.progress
    micro_batch_size, cursors = config.train.micro_batch_size, list[dict[int, str]]()
    if prepared.streams:
        order = prepared, config.data, config.model.seq_length, config.train.seed, begun.order
        now, later = data_entry(config, prepared), config.data.shaping  # which moves no stream
        same = not data_changes(begun.entries.get("data"), {key: now[key] for key in now.keys() - later.keys()})
        count, ends = prepared.streams[0].count, turns(*order).ends(begun.gaps.behind(progress.consumed_samples))
        cursors = stream_position.found(begun.entries, same, stream_keys(*order), count)
        stream_position.say_missing(cursors, ends, ranks)
        stream_position.say_repeated_reading(count, micro_batch_size, ranks)
    return BatchStream(
        lambda: stream_position.resumed(open_source(prepared, config, "train", begun.order), cursors),
        ranks,
        config.batches,
        micro_batch_size,
        progress.consumed_samples,
        Packing.from_config(config.data, prepared.tokenizer.eod),
        begun.gaps,
    )
