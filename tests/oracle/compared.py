"""Triplane's answer to a case beside the oracle's: every number, and how far apart they may be."""

import itertools
import math
import re
import tempfile
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from data.prepared import Prepared
from parallel.launch import Identity
from parallel.local_ranks import fork_ranks
from tests.oracle.case import STEPS, Case, corpus
from tests.oracle.exported import State, assembled, exported
from tests.oracle.muon import Muon
from tests.oracle.oracle import AdamW, Answer, GlobalBatch, answer, biases, clip_scale, global_batches
from tests.oracle.qk_clip import Logits, factors
from tests.oracle.reference import in_double, load
from tests.oracle.sizes import scheduled
from tests.oracle.ties import hangs_on_rounding
from tests.oracle.trained import STARTED, train_case

LOSS, NORM, GRADIENT, UPDATE, SCHEDULE = 1e-6, 2e-6, 1e-5, 1e-5, 1e-9
"""Bounds, relative, for fp32 on both sides."""
SMALL = 1e-7
"""Of a gradient that is nothing but rounding, such as that of a key's bias: what of the whole gradient's norm it may
be off by."""
AGAIN = 3
"""Times that other weights are drawn for a case that hangs on rounding, until it counts as different."""
ROUNDING = 1e-7
"""Of a weight's norm, that an update may be off by: fp32 has 24 bits."""
CLIPPED = 5e-7
"""The same where QK-clip has scaled the weight, by a logit that is a sum in fp32."""

ORTHOGONAL = 5e-5
"""Of Muon's update: fp32's rounding, times the 500 by which five iterations of Newton-Schulz multiply a direction in
which a gradient is nothing, as an expert's is that had few tokens. Of an element: muon_row.py."""


@dataclass
class Verdict:
    """What came of a case."""

    kind: Literal["equal", "refused", "different", "failed"]
    """refused: Triplane says before the start why it does not train this. failed: it began, and ended by an error."""
    words: list[str] = field(default_factory=list)
    furthest: dict[str, float] = field(default_factory=dict)
    """Of each quantity, the largest distance over its bound."""
    hangs: bool = False
    """It is different, and a token's choice of experts hangs on rounding."""
    drawn_again: int = 0
    """How often other weights were drawn for that reason."""


def judge(case: Case) -> Verdict:
    """The verdict on a case, with other weights where it hangs on rounding."""
    verdict, again = _judge(case), 0
    while verdict.hangs and again < AGAIN:
        again += 1
        verdict = _judge(replace(case, weights_seed=case.weights_seed + again))
    return replace(verdict, drawn_again=again)


def _judge(case: Case) -> Verdict:
    """Ranks, and then the oracle in a process of its own: this one never computes."""
    if problems := case.config.problems(case.world_size):
        return Verdict("refused", problems)
    with tempfile.TemporaryDirectory(prefix="triplane-oracle-") as name:
        folder = Path(name)
        prepared = corpus(case, folder)

        def rank(identity: Identity) -> int:
            train_case(identity, case, prepared, folder)
            return 0

        def oracle(_: Identity) -> int:
            torch.save(compared(case, prepared, folder), folder / "verdict.pt")
            return 0

        for world_size, run in ((case.world_size, rank), (1, oracle)):
            code, failure = fork_ranks(world_size, run)
            if failure is not None or code:
                said = failure is not None and "Traceback" not in failure.text and not (folder / STARTED).exists()
                return Verdict("refused" if said else "failed", [failure.text if failure else f"exit code {code}"])
        verdict: Verdict = torch.load(folder / "verdict.pt", weights_only=False)
        return verdict


def compared(case: Case, prepared: Prepared, folder: Path) -> Verdict:
    """All iterations."""
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(case.world_size)]
    steps = [together(case, [rank[number] for rank in ranks]) for number in range(STEPS)]
    verdict, adam, muon = Verdict("equal"), AdamW(case.config.optimizer), Muon(case.config.optimizer, case.shape)
    batches = itertools.islice(global_batches(case, prepared), STEPS)
    parts = zip(steps, batches, scheduled(case.config, STEPS), strict=True)
    for number, (step, batch, rates) in enumerate(parts, 1):
        note = Notes(verdict, f"iteration {number}")
        logits = Logits() if case.config.optimizer.qk_clip else None
        reference = load(case.shape, step["weights"], folder, logits)
        with in_double():
            theirs = answer(reference, batch)
            one_step(note, case, step, batch, theirs)
            if verdict.kind == "different" and not verdict.hangs:
                verdict.hangs = hangs_on_rounding(reference, batch)
        note.close("learning rate", step["learning_rate"], rates.learning_rate, SCHEDULE)
        note.close("weight decay", step["weight_decay"], rates.weight_decay, SCHEDULE)
        scale = clip_scale(theirs.norm, case.config.optimizer.clip_grad)
        updated = adam.updated(step["weights"], step["gradients"], scale, rates, reference.words())
        of_muon: State = {}
        if case.config.optimizer.optimizer == "muon":
            ours, gradients_of_ours = step["under our names"]
            of_muon = exported(muon.updated(ours, gradients_of_ours, scale, rates), case.shape)
            updated |= of_muon
            for name in of_muon:  # Muon makes a whole update of rounding, as of queries where every document is a token
                if norm(step["gradients"][name]).item() <= SMALL * theirs.norm:
                    del updated[name]
        scaled: Set[str] = set()
        if logits is not None:
            times = factors(step["under our names"][0], logits.largest, case.config.optimizer, case.shape)
            of_theirs = exported(times, case.shape)
            updated = {name: weight * of_theirs[name] for name, weight in updated.items()}
            scaled = {name for name, times in of_theirs.items() if (times != 1).any()}
        updates(note, step, updated, of_muon.keys(), scaled)
        expert_biases(note, step, theirs.loads, case.shape.moe_router_bias_update_rate)
    return verdict


def one_step(note: "Notes", case: Case, step: dict[str, Any], batch: GlobalBatch, theirs: Answer) -> None:
    """What an iteration read, its loss and its gradients."""
    flat = [one for replicas in batch for one in replicas]
    note.close("samples", step["samples"], sum(len(one.tokens) for one in flat), 0.0)
    note.close("tokens", step["tokens"], sum(float(one.loss_mask.sum()) for one in flat), 0.0)
    note.close("loss", step["loss"], theirs.loss, LOSS)
    note.close("gradient norm", step["grad_norm"], theirs.norm, NORM)
    gradients(note, step["gradients"], theirs.gradients, theirs.norm)
    clipped = theirs.norm * clip_scale(theirs.norm, case.config.optimizer.clip_grad)
    note.close("gradient norm after clipping", whole_norm(step["clipped"]), clipped, NORM)


def together(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One iteration of all ranks: numbers as the first has them, tensors whole, under transformers' names."""
    step = dict(ranks[0])
    step["weight_decay"] = max(rank["weight_decay"] for rank in ranks)
    ours = {
        name: assembled([part for rank in ranks for part in rank[name]])
        for name in ("weights", "gradients", "clipped", "updated")
    }
    step |= {name: exported(tensors, case.shape) for name, tensors in ours.items()}
    step["under our names"] = ours["weights"], ours["gradients"]
    return step


@dataclass
class Notes:
    """What of an iteration is off."""

    verdict: Verdict
    where: str

    def close(self, what: str, ours: float, theirs: float, bound: float) -> None:
        self.distance(what, abs(ours - theirs), bound * abs(theirs), f"{ours:.8g}, where the oracle has {theirs:.8g}")

    def distance(self, what: str, found: float, allowed: float, words: str) -> None:
        """what: a quantity, with a name behind " of " where it is of one tensor."""
        share = 0.0 if found == 0 else found / allowed if allowed > 0 else math.inf
        share = share if math.isfinite(share) else math.inf
        kind = what.split(" of ")[0]
        self.verdict.furthest[kind] = max(self.verdict.furthest.get(kind, 0.0), share)
        if share > 1:
            self.verdict.kind = "different"
            self.verdict.words.append(f"{self.where}: {what} is {words}")


def whole_norm(tensors: State) -> float:
    return float(torch.stack([norm(one).square() for one in tensors.values()]).sum().sqrt())


def norm(tensor: Tensor) -> Tensor:
    return tensor.double().norm()


def gradients(note: Notes, ours: State, theirs: State, whole: float) -> None:
    """Each by its own norm."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        note.distance("gradient of " + name, math.inf, 0.0, "one side's alone")
    for name in ours.keys() & theirs.keys():
        off, size = norm(ours[name] - theirs[name]).item(), norm(theirs[name]).item()
        allowed = max(GRADIENT * size, SMALL * whole)
        note.distance("gradient of " + name, off, allowed, f"off by {off:.2e}, its norm is {size:.2e}")


def updates(note: Notes, step: dict[str, Any], theirs: State, of_muon: Set[str], scaled: Set[str]) -> None:
    """Of weights: what a step added. scaled: those of QK-clip."""
    for name, updated in theirs.items():
        before, ours = step["weights"][name], step["updated"][name]
        off, size = norm(ours - updated).item(), norm(updated - before).item()
        of_update, of_weight = ORTHOGONAL if name in of_muon else UPDATE, CLIPPED if name in scaled else ROUNDING
        allowed = of_update * size + of_weight * norm(before).item()
        note.distance("update of " + name, off, allowed, f"off by {off:.2e}, its norm is {size:.2e}")


def expert_biases(note: Notes, step: dict[str, Any], loads: list[Tensor], rate: float) -> None:
    """Of routers, which no gradient moves."""
    names = [name for name in step["weights"] if name.endswith("e_score_correction_bias")]
    names.sort(key=lambda name: int(re.search(r"layers\.(\d+)\.", name)[1]))  # type: ignore[index]
    if names:
        for name, updated in zip(names, biases([step["weights"][name] for name in names], loads, rate), strict=True):
            off = norm(step["updated"][name] - updated).item()
            note.distance("bias of " + name, off, 1e-3 * rate, f"off by {off:.2e}, a step is {rate:.2e}")
