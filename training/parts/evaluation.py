"""What a model is judged by while it trains: validation losses, samples, tasks."""

from data.loader import Packing
from parallel.ddp import Chunks
from training.evaluation.batching import row_shape
from training.evaluation.task_callback import TaskCallback
from training.evaluation.validation import Validation
from training.evaluation.validation_sets import validation_sets
from training.generation.samples import SampleCallback
from training.generation.texts import TextModel
from training.metrics.recorder import Recorder
from training.parts.run import TrainingRun


def text_model(run: TrainingRun, chunks: Chunks) -> TextModel:
    """The model that trains, with the run's tokenizer."""
    return TextModel(chunks=chunks, ranks=run.ranks, tokenizer=run.prepared.tokenizer)


def build_validation(run: TrainingRun, chunks: Chunks, recorder: Recorder) -> Validation:
    """Validation losses, logged by ``recorder``; ended early by a stop signal."""
    config, prepared = run.config, run.prepared
    return Validation(
        config.train,
        chunks,
        run.ranks,
        validation_sets(prepared, config),
        recorder.evaluation,
        Packing.from_config(config.data, prepared.tokenizer.eod),
        run.heartbeat,
        lambda: run.asked_to_stop,
    )


def build_samples(run: TrainingRun, chunks: Chunks) -> SampleCallback:
    """What the model makes of fixed prompts; ended early by a stop signal."""
    return SampleCallback(
        run.config.train,
        text_model(run, chunks),
        run.config.model.seq_length,
        run.run_dir,
        run.heartbeat,
        lambda: run.asked_to_stop,
    )


def build_tasks(run: TrainingRun, chunks: Chunks, recorder: Recorder) -> list[TaskCallback]:
    """The evaluation on ``eval.tasks``; none where there are none."""
    config = run.config
    if not config.eval.tasks:
        return []
    shape = row_shape(config, config.train.micro_batch_size, run.ranks.layout)
    tasks = TaskCallback(
        config, run.tasks, text_model(run, chunks), shape, recorder.evaluation, run.run_dir, run.heartbeat,
        lambda: run.asked_to_stop,
    )  # fmt: skip
    return [tasks]
