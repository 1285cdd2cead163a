"""The whole of a preprocessing: plan, claim, tokenise, and what follows when every unit is done."""

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.config import path_of
from data.raw import inputs, units
from data.raw.csv_records import DELIMITERS
from data.raw.units import Unit
from data.shards import bin_path, token_dtype
from data.tokenizers import engines
from data.tokenizers.base import EXPECTED, ByteTokenizer, Tokenizer, exists, open_named
from program.errors import UserError, printable
from tools.preprocess import estimate, shuffle_merge, summary, worker_pool
from tools.preprocess.encoding import Encoding
from tools.preprocess.estimate import Extent, Sample
from tools.preprocess.options import PreprocessOptions
from tools.preprocess.output import ArrayShare, Output, is_complete, read_unit, saying_where_no_space_is
from tools.preprocess.tokenize_unit import TokenizeJob

SMALLEST_UNIT, LARGEST_UNIT, USUAL_UNITS = 4 << 20, 4 << 30, 512


def preprocess(options: PreprocessOptions, stop: worker_pool.StopSign) -> None:
    """Raises UserError."""
    sources = inputs.find(options.input, say=_say, csv_column=options.reading.csv_column)
    unit_bytes = _unit_bytes(options.unit_mb, sum(one.size for one in sources if one.kind != "dataset"))
    divided = units.divide(sources, unit_bytes)
    tokenizer = _tokenizer(options)
    output, own = Output(options.prefix), f"part {options.share.index} of {options.share.count}"
    try:
        with saying_where_no_space_is(options.prefix), output.claimed(options.share) as locks:
            alone = locks is not None and options.share.count == 1
            output.agree(_plan(options, sources, unit_bytes, tokenizer), options.overwrite, options.share, alone)
            _check_engine(options, output)
            if locks is not None:
                output.remove_leftovers(options.share)
            else:  # what looks left over may be another process's, at work
                _say(f"--output {options.prefix}: that file system has no locks; start nothing twice at once there")
            job = _job(options, divided, tokenizer, output)
            if _needs_units(options, job):
                _tokenise(options, job, locks or [], stop)
            left = sum(not is_complete(job.prefix(one.index)) for one in divided) if _needs_units(options, job) else 0
            if left:
                print(f"{own} is done; {left} units of other parts are not")
                return
            if locks is None and options.share.count > 1:  # two parts that end together would both do the rest
                print("all parts are done; without locks none may finish alone: give the command again without --part")
                return
            with output.finishing() as more:
                if more is None:
                    print(f"{own} is done; another one finishes the work")
                    return
                _finish(options, job, [*(locks or []), *more], stop)
    except OSError as error:
        if not error.filename:
            raise
        raise UserError(f"--output {options.prefix}: {error.strerror}: {error.filename}.") from None


def _tokenizer(options: PreprocessOptions) -> Tokenizer:
    if options.tokenizer == "byte":
        return ByteTokenizer()
    if not exists(options.tokenizer):
        builtin = "training makes the built-in one of its own text; " if options.tokenizer == "builtin" else ""
        raise UserError(
            f"--tokenizer: no file {path_of(options.tokenizer).absolute()}; {builtin}expected "
            f"{EXPECTED.removeprefix('"builtin", ')}. `python -m tools.preprocess train` makes a .model of your text."
        )
    return open_named(options.tokenizer, options.eod_token, "--")


def _unit_bytes(asked_mb: float | None, total: int) -> int:
    """As asked, or of the inputs' size alone: about 512 units, of 4 MB to 4 GB."""
    return int(asked_mb * 1e6) if asked_mb else min(max(total // USUAL_UNITS, SMALLEST_UNIT), LARGEST_UNIT)


def _plan(
    options: PreprocessOptions, sources: list[inputs.InputSource], unit_bytes: int, tokenizer: Tokenizer
) -> dict[str, object]:
    """Everything that the shards follow from but the engine, which is chosen later; workers change no byte of them."""
    return {
        "inputs": [
            f"{printable(one.path)} ({one.kind}{one.compression}, {one.size}, "
            + (f"revision {one.revision})" if one.revision else f"changed {one.changed_ns}, ends {one.ends})")
            for one in sources
        ],
        "unit_bytes": unit_bytes,
        "tokenizer": tokenizer.fingerprint,
        "jsonl_key": options.reading.jsonl_key,
        **({"csv_column": options.reading.column} if any(one.kind in DELIMITERS for one in sources) else {}),
        "on_bad_document": options.reading.on_bad_document,
        "max_document_bytes": options.reading.max_document_bytes,
        "special_text": options.special_tokens,
        "append_eod": options.append_eod,
        "shuffle_docs": options.shuffle_docs,
        "merge": options.merge,
    }


def _needs_units(options: PreprocessOptions, job: TokenizeJob) -> bool:
    """False when what is made of the shards of units is there: they are removed then. What was lost is made again."""
    output = job.output
    if job.is_last_stage or not output.totals.is_file():
        return True
    if options.merge and is_complete(_joined(options)):
        return False
    shuffled = _shuffled(options, output, summary.Totals.load(output.totals, len(job.units)).shards)
    return not shuffled or not all(map(is_complete, shuffled))


def _joined(options: PreprocessOptions) -> Path:
    """The shard that --merge makes."""
    return options.prefix.with_name(f"{options.prefix.name}_{options.reading.jsonl_key}_document")


def _shuffled(options: PreprocessOptions, output: Output, count: int) -> list[Path]:
    """The shards that --shuffle_docs makes; none without it."""
    if options.shuffle_docs is None:
        return []
    return [output.kept("mixed", n, count) if options.merge else output.shard(n, count) for n in range(count)]


def _check_engine(options: PreprocessOptions, output: Output) -> None:
    """One that is asked for by name is refused at once, before anything is read."""
    begun = output.engine()
    if options.engine != "auto" and begun is not None and begun.split()[0] != options.engine:
        output.agree_engine(options.engine, options.share)


def _job(options: PreprocessOptions, divided: list[Unit], tokenizer: Tokenizer, output: Output) -> TokenizeJob:
    return TokenizeJob(
        units=divided,
        reading=options.reading,
        encoding=Encoding(
            engine=engines.reference(tokenizer),
            eod=tokenizer.eod if options.append_eod else None,
            special_texts=tokenizer.special_texts,
            special_text=options.special_tokens,
        ),
        tokenizer=tokenizer,
        tokenizer_name=Path(options.tokenizer).name,
        output=output,
        is_last_stage=not options.merge and options.shuffle_docs is None,
    )


def _tokenise(options: PreprocessOptions, job: TokenizeJob, locks: list[int], stop: worker_pool.StopSign) -> None:
    """This part's units that are not complete."""
    own = [unit for unit in job.units if unit.index % options.share.count == options.share.index]
    left = [unit for unit in own if not is_complete(job.prefix(unit.index))]
    if not left:
        return
    whole = estimate.sample(job.units, options.reading)  # "auto" is the same in every part, and when continued
    engine = _engine(options, job, whole)
    sample = whole if left == job.units else estimate.sample(left, options.reading)
    extent = estimate.extent(left)
    if options.check_space:
        _check_space(options, job, engine, extent, sample)
    job.output.agree_engine(engine.name, options.share)
    clear = partial(job.output.clear_unfinished, prefix=job.prefix)
    running = replace(job, encoding=replace(job.encoding, engine=engine))
    done = sum(_read_bytes(job, unit) for unit in own if is_complete(job.prefix(unit.index)))
    to_read = extent.to_read(sample)
    if done:
        _say(f"continuing: {len(own) - len(left)} of {len(own)} units are there")
    with worker_pool.progress(None if to_read is None else done + to_read, "tokenising") as bar:
        bar.update(done)
        worker_pool.work([unit.index for unit in left], running.run_task, clear, options.workers, bar, locks, stop)
    job.output.agree_engine(engine.name, options.share)  # without locks another part may have begun at the same moment


def _read_bytes(job: TokenizeJob, unit: Unit) -> int:
    """What reading a complete unit counted: bytes of its files, or of a dataset's text."""
    files = [part.size for part in unit.parts if part.source.kind != "dataset"]
    return sum(files) + (read_unit(job.prefix(unit.index)).counts["text_bytes"] if len(files) < len(unit.parts) else 0)


def _engine(options: PreprocessOptions, job: TokenizeJob, sample: Sample) -> engines.Engine:
    """The one that the output was begun with, or the one that is asked for."""
    begun = job.output.engine()
    if begun is None and any(is_complete(job.prefix(unit.index)) for unit in job.units):
        _say("what engine made the shards that are there is not known: an earlier version did not write it down")
    special_ids = options.special_tokens == "special"
    try:
        return engines.choose(job.tokenizer, options.engine, special_ids, sample.texts, _say, begun)
    except UserError as error:
        raise job.output.unusable_engine(error, options.share) if begun else error from None


def _check_space(
    options: PreprocessOptions, job: TokenizeJob, engine: engines.Engine, extent: Extent, sample: Sample
) -> None:
    """Refuse what cannot fit, before anything is written."""
    if extent.unknown:
        _say(
            f"{', '.join(extent.unknown)}: how many rows that holds is not known before it is read; the estimate of "
            "disk space is without it"
        )
    ids, _ = engine.encode_batch(sample.texts)
    sampled = sum(len(text.encode()) for text in sample.texts)
    text_bytes = extent.text_bytes(sample)
    found = text_bytes / max(1.0, sample.mean_document)
    tokens = text_bytes * len(ids) / max(1, sampled) + found
    needed = tokens * token_dtype(job.tokenizer.vocab_size).itemsize + 28 * found
    copies = 1 if job.is_last_stage else 2  # a stage's result is complete before what it is made of is removed
    free = shutil.disk_usage(options.prefix.parent).free
    if needed * copies > free:
        raise UserError(
            f"--output {options.prefix}: about {needed * copies / 1e9:.2f} GB would be written ({tokens / 1e9:.2f} G "
            f"tokens), and {free / 1e9:.2f} GB are free there. Make room, name another "
            "disk, or leave this estimate out with --no_check_space."
        )


def _finish(options: PreprocessOptions, job: TokenizeJob, locks: list[int], stop: worker_pool.StopSign) -> None:
    """Count, shuffle, join, and say what was made."""
    output = job.output
    output.remove_leftovers(ArrayShare())
    if not output.totals.is_file():
        summary.add_up(job).save(output.totals)
    totals = summary.Totals.load(output.totals, len(job.units))
    if not totals.documents:
        raise UserError(f"INPUT: no document with text in {', '.join(options.input)} ({totals.rejected} rejected).")
    last = [job.prefix(unit.index) for unit in job.units]
    if options.shuffle_docs is not None:
        last = _shuffle(options, job, totals, locks, stop)
    else:
        last = [prefix for prefix in last if not job.is_last_stage or bin_path(prefix).is_file()]
    if options.merge:
        target = _joined(options)
        present = [prefix for prefix in last if bin_path(prefix).is_file()]
        total = sum(bin_path(prefix).stat().st_size for prefix in present)
        with worker_pool.progress(total, "joining") as bar:

            def report(size: int) -> None:
                stop.check()
                bar.update(size)

            shuffle_merge.join(job, present, target, report)
        last = [target]
    for path in output.folder.glob("hashes-*.bin"):
        path.unlink(missing_ok=True)
    print(summary.card(totals, last, options.merge, options.append_eod, output.engine()))


def _shuffle(
    options: PreprocessOptions, job: TokenizeJob, totals: summary.Totals, locks: list[int], stop: worker_pool.StopSign
) -> list[Path]:
    assert options.shuffle_docs is not None
    made = _shuffled(options, job.output, totals.shards)
    left = [index for index, prefix in enumerate(made) if not is_complete(prefix)]
    if left and not (options.merge and is_complete(_joined(options))):
        clear = partial(job.output.clear_unfinished, prefix=made.__getitem__)
        shuffle = shuffle_merge.Shuffle(job, options.shuffle_docs, made)
        with worker_pool.progress(totals.tokens * token_dtype(job.tokenizer.vocab_size).itemsize, "shuffling") as bar:
            worker_pool.work(left, shuffle.run_task, clear, options.workers, bar, locks, stop)
    for unit in job.units:
        shuffle_merge.remove(job.prefix(unit.index))
    return made


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
