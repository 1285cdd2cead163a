"""lm-evaluation-harness over the model on its ranks. Imported on rank 0 alone: the harness takes a second."""

import os
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from training.evaluation.generating import TextRequests
from training.evaluation.harness_tokens import HarnessTokenizer
from training.evaluation.shared_model import Ids, SharedModel
from training.evaluation.tasks import PreparedTasks, limits_of, quiet, seeded

BOOTSTRAP_ITERS = 1000
"""Resamplings for the standard error of metrics that have no formula for it; the harness' default is 100,000."""


class ShardedLM(TemplateLM):
    """The harness' face of a model. Texts become ids once, and every evaluation of the same tasks asks with these."""

    def __init__(self, model: SharedModel, tokenizer: HarnessTokenizer, seq_length: int) -> None:
        super().__init__()
        self.model, self.ids, self.max_length = model, tokenizer, seq_length
        self.encoded: dict[tuple[str, bool | None], list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        return self.ids.eot

    @property
    def prefix_token_id(self) -> int:
        return self.ids.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        key = string, add_special_tokens
        if key not in self.encoded:
            self.encoded[key] = self.ids.encode(string, add_special_tokens)
        return self.encoded[key]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Of each (context, continuation); and whether greedy decoding would give the continuation."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Ids, Ids]], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self.model.score([(context, continuation) for _, context, continuation in requests])
        return [(logprob, misses == 0) for logprob, misses in scores.tolist()]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Of whole texts, window by window, as HFLM."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            pairs = [make_disjoint_window(one) for one in found]
            windows += pairs
            owners += [number] * len(pairs)
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self.model.score(windows).tolist(), strict=True):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy texts, as HFLM: up to a stop text, an end of text or max_gen_toks; contexts are cut from the left."""
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(limits_of(request), []).append(number)
        texts = [""] * len(requests)
        for (stops, new_tokens), numbers in alike.items():
            room = self.max_length - new_tokens
            encoded = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            prompts = tuple(tuple(ids or [self.prefix_token_id]) for ids in encoded)
            stops = tuple(filter(None, dict.fromkeys((*stops, self.ids.eot_text))))
            found = self.model.generate(TextRequests(prompts=prompts, stops=stops, new_tokens=new_tokens))
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts


def run_tasks(lm: ShardedLM, tasks: PreparedTasks) -> dict[str, Any]:
    """The harness' results: "results", "groups", "configs", "versions", "n-shot", "n-samples" and others."""
    for task in tasks.loaded["tasks"].values():
        for instance in task.instances:  # as they were before an earlier evaluation answered them
            instance.resps, instance.filtered_resps = [], {}
    os.environ["DISABLE_MULTIPROC"] = "1"  # resampling would fork this process, which has threads and a GPU
    with quiet(), seeded():
        found = evaluate(
            lm=lm, task_dict=tasks.loaded, limit=tasks.limit, bootstrap_iters=BOOTSTRAP_ITERS, log_samples=False
        )
    assert found is not None
    return dict(found)
