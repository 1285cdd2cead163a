"""What every rank does with the loaded model: score what rank 0 asks. And what rank 0 makes of the results."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from program.printing import columns
from tools.shared.loaded_model import LoadedModel
from tools.shared.written import marked, write_file
from training.evaluation.scores import Results, is_stderr, metrics_of, stderr_of
from training.evaluation.tasks import PreparedTasks

WORD_S = 60.0
"""Between two lines of progress, where stderr is no terminal."""


PLACE = "--output", marked('"triplane_code": "'), ("scores*.json",)
"""Where the results may go, for ``tools.shared.written``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoringJob:
    """What is scored, and how."""

    tasks: PreparedTasks | None
    """On rank 0."""
    micro_batch_size: int
    output: Path | None


@dataclass(slots=True)
class RoundProgress:
    """How far the forward passes are, said on rank 0."""

    model: LoadedModel
    began_s: float = field(default_factory=time.monotonic)
    said_s: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, count: int) -> None:
        from training.metrics.console import duration

        if done == 0:
            self.began_s = time.monotonic()
            return
        now_s = time.monotonic()
        left = duration((now_s - self.began_s) / done * (count - done))
        text = f"{done} of {count} rounds of forward passes, ETA {left}"
        self.model.ranks.show_progress(text)
        if now_s - self.said_s > WORD_S and not os.isatty(self.model.ranks.console_fd or 2):
            self.said_s = now_s
            self.model.ranks.say(text)


def evaluate(job: ScoringJob, model: LoadedModel) -> None:
    """The table on stdout, from rank 0, and the JSON file."""
    from training.evaluation.batching import row_shape
    from training.evaluation.generating import TextGenerator
    from training.evaluation.harness_tokens import HarnessTokenizer
    from training.evaluation.scoring import Scorer
    from training.evaluation.shared_model import SharedModel

    assert model.tokenizer is not None, "looked at before ranks started"
    tokenizer = HarnessTokenizer(model.tokenizer)
    shape = row_shape(model.config, job.micro_batch_size, model.ranks.layout)
    progress = RoundProgress(model)
    scorer = Scorer(chunks=model.chunks, ranks=model.ranks, shape=shape, before_round=progress)
    generator = TextGenerator(
        chunks=model.chunks, ranks=model.ranks, tokenizer=tokenizer, seq_length=shape.seq_length,
        at_once=job.micro_batch_size, before_round=progress,
    )  # fmt: skip
    shared = SharedModel(scorer, generator, model.ranks)
    model.ranks.say(
        f"{model.folder} ({model.config.model.title}), {model.ranks.layout} on {model.ranks.device.type}, "
        f"{model.numbers}, at most {shape.seq_length} tokens of a request"
    )
    began_s = time.time()

    def run() -> dict[str, Any]:
        from training.evaluation.harness import ShardedLM, run_tasks

        assert job.tasks is not None
        return run_tasks(ShardedLM(shared, tokenizer, shape.seq_length), job.tasks)

    results = shared.run(run)
    if results is None or job.tasks is None:
        return
    model.ranks.say(f"{job.tasks.requests:,} requests in {time.time() - began_s:.1f} s")
    model.write("".join(f"{line}\n" for line in table(results)))
    if job.output is not None:
        write(job.output, described(results, job, model, began_s))
        model.ranks.say(f"wrote {job.output}")


def table(results: Results) -> list[str]:
    """A line for each metric of each task, groups above their tasks."""
    children = results["group_subtasks"]
    inner = {name for names in children.values() for name in names}
    rows = [("task", "examples", "documents", "metric", "", "value", "± stderr")]

    def add(name: str, depth: int) -> None:
        metrics = metrics_of(results, name)
        better = results["higher_is_better"].get(name, {})
        shown = (f"{'  ' * depth}{name}", str(results["n-shot"].get(name, "")), _documents(results, name))
        for metric in [one for one in metrics if not is_stderr(one)] or [""]:
            error = metrics.get(stderr_of(metric))
            arrow = {True: "↑", False: "↓"}.get(better.get(metric.partition("/")[0]), "")
            value = _number(metrics[metric]) if metric else ""
            rows.append((*shown, metric, arrow, value, "" if error is None else _number(error)))
            shown = ("", "", "")
        for child in children.get(name, []):
            add(child, depth + 1)

    for name in results["results"]:
        if name not in inner:
            add(name, 0)
    return columns(rows, left=(0, 3, 4), indent="")


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _documents(results: Results, name: str) -> str:
    found = results["n-samples"].get(name, {}).get("effective")
    return "" if found is None else f"{found:,}"


def described(results: dict[str, Any], job: ScoringJob, model: LoadedModel, began_s: float) -> dict[str, Any]:
    """The results with what the harness writes beside them: model, settings and versions."""
    import importlib.metadata

    from training.evaluation.harness import BOOTSTRAP_ITERS
    from training.run_dir import fingerprint

    assert job.tasks is not None
    return {
        **results,
        "config": {
            "model": "triplane",
            "model_args": {
                "checkpoint": str(model.folder),
                "layout": str(model.ranks.layout),
                "dtype": model.config.precision.dtype,
                "weights": model.weights,
            },
            "batch_size": job.micro_batch_size,
            "device": model.ranks.device.type,
            "limit": job.tasks.limit,
            "bootstrap_iters": BOOTSTRAP_ITERS,
        },
        "model_source": "triplane",
        "model_name": str(model.folder),
        "max_length": model.config.model.seq_length,
        "date": began_s,
        "total_evaluation_time_seconds": str(time.time() - began_s),
        "lm_eval_version": importlib.metadata.version("lm_eval"),
        "triplane_code": fingerprint.code_digest(),
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Whole, or not at all. Raises UserError where it cannot be written."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_file(path, f"{text}\n".encode(), *PLACE)
