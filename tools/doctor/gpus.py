"""GPUs: how many, errors of their memory, what holds their clocks down, PCIe. Not run on a GPU yet."""

from collections.abc import Iterator, Sequence

from tools.doctor import nvidia_smi
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, Status, deciding, judged
from tools.doctor.nvidia_smi import number

GROUP = "gpus"
HOT_C = 85.0
"""Slow-down begins at about 87 C on A100 and H100; before a run, cards are idle."""
USED_MIB = 1024.0
"""What a card may hold before a run; a CUDA context alone takes about half of it."""
AGREE: dict[str, Status] = {"count": "wrong", "name": "wrong", "pcie_width": "wrong", "driver": "warning"}
"""Facts that nodes should have in common."""
# Bits of clocks_event_reasons.active: nvmlClocksEventReasons in nvml.h. Idle, a power cap under load and clocks that
# an operator has set are no fault.
HELD_DOWN = {0x08: "hardware slow-down", 0x40: "too hot (hardware)", 0x80: "power brake (power supply)"}
SLOWED = {0x20: "too hot (software)"}


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: count, name, driver, the widest PCIe link. One finding per check and GPU that is not well."""
    if situation.device == "cpu":
        return NodeCheck(findings=[judged(GROUP, "nvidia-smi", "not checked", "no GPU here (or --device cpu)")])
    try:
        cards = nvidia_smi.gpus()
    except TimeoutError as error:
        return NodeCheck(findings=[_wrong("nvidia-smi", str(error), "", "restart the node: driver or card hang")])
    except OSError as error:
        return NodeCheck(findings=[_wrong("nvidia-smi", str(error), f"{situation.gpus} GPUs", "repair the driver")])
    findings = [*_count(cards, situation), *(finding for card in cards for finding in evaluate(card)), *_rows()]
    return NodeCheck(findings=findings, facts=_facts(cards))


def evaluate(card: dict[str, str]) -> Iterator[Finding]:
    """What is wrong with one card, or one "ok" (the same for all healthy ones, so that they share a row)."""
    troubles = [*_memory(card), *_clocks(card), *_pcie(card)]
    yield from troubles
    if not troubles:
        known = "no uncorrected ECC errors" if _ecc(card) is not None else "no ECC counters"
        found = f"{known}, clocks not held down, {{:.0f}} C"
        yield judged(GROUP, "health", "ok", found, numbers=[_or0(card, "temperature.gpu")])


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong: another number of GPUs, other cards or a narrower PCIe link than most nodes have."""
    known = [one for one in seen if one.facts.get(GROUP)]
    found: list[tuple[str, Finding]] = []
    for name, status in AGREE.items() if len(known) > 1 else ():
        right = deciding([one.facts[GROUP][name] for one in known])
        expected, fix = f"{right} as on most nodes", "leave this node out until it is like the others"
        check = f"{name.replace('_', ' ')} between nodes"
        found += [
            (one.node, judged(GROUP, check, status, str(one.facts[GROUP][name]), expected, fix))
            for one in known
            if one.facts[GROUP][name] != right
        ]
    return found


def _facts(cards: Sequence[dict[str, str]]) -> dict[str, object]:
    first = cards[0] if cards else {}
    return {
        "count": len(cards),
        "name": first.get("name", "none"),
        "driver": first.get("driver_version", "none"),
        "pcie_width": min((_or0(card, "pcie.link.width.current") for card in cards), default=0.0),
    }


def _count(cards: Sequence[dict[str, str]], situation: DoctorContext) -> Iterator[Finding]:
    cluster = situation.cluster
    wanted = cluster.node.gpus_per_node if cluster else situation.gpus
    name = cards[0].get("name", "GPU") if cards else "GPU"
    reported = f"{len(cards)} x {name}, driver {cards[0].get('driver_version', 'unknown')}" if cards else "no GPU"
    # nvidia-smi shows all of a node's cards; an allocation may have fewer.
    if len(cards) < wanted:
        yield _wrong("count", reported, f"{wanted} GPUs", "a card has fallen off the bus: restart or repair the node")
    elif cluster and cards and cluster.gpu.name != name:
        yield _warning("card", reported, f"{cluster.gpu.name} ({cluster.name})", "choose the right --cluster")
    else:
        yield judged(GROUP, "count", "ok", reported)


def _label(card: dict[str, str]) -> str:
    return f"GPU {card.get('index', '?')}"


def _or0(card: dict[str, str], field: str) -> float:
    return number(card.get(field)) or 0.0


def _ecc(card: dict[str, str]) -> float | None:
    return number(card.get("ecc.errors.uncorrected.volatile.total"))


def _memory(card: dict[str, str]) -> Iterator[Finding]:
    label = _label(card)
    if uncorrected := _ecc(card):
        yield _wrong(
            "ECC", f"{label}: {uncorrected:.0f} uncorrected errors", "0", "reset the GPU; replace it if it recurs"
        )
    if corrected := number(card.get("ecc.errors.corrected.volatile.total")):
        yield _warning("ECC corrected", f"{label}: {corrected:.0f} corrected errors", "few", "watch this card")
    if card.get("ecc.mode.current") == "Disabled":
        yield _warning("ECC mode", f"{label}: disabled", "enabled", "nvidia-smi -e 1, then restart the node")
    if card.get("retired_pages.pending", "").lower() == "yes":
        yield _wrong("retired pages", f"{label}: pending", "none", "reset the GPU, so that they take effect")
    if card.get("mig.mode.current") == "Enabled":
        yield _warning("MIG", f"{label}: enabled", "disabled", "nvidia-smi -mig 0: a slice is not a whole card")
    used = number(card.get("memory.used"))
    if used is not None and used > USED_MIB:
        yield _warning("memory in use", f"{label}: {used:,.0f} MiB", "an idle card", "see nvidia-smi: who uses it?")


def _clocks(card: dict[str, str]) -> Iterator[Finding]:
    label, active = _label(card), int(_or0(card, "clocks_event_reasons.active"))
    for bit, reason in HELD_DOWN.items():
        if active & bit:
            yield _wrong("clocks held down", f"{label}: {reason}", "none", "check cooling and power of this node")
    for bit, reason in SLOWED.items():
        if active & bit:
            yield _warning("clocks held down", f"{label}: {reason}", "none", "check the cooling of this node")
    if (heat := _or0(card, "temperature.gpu")) >= HOT_C:
        yield _warning("temperature", f"{label}: {heat:.0f} C", f"below {HOT_C:.0f} C when idle", "check the cooling")


def _pcie(card: dict[str, str]) -> Iterator[Finding]:
    width, most = number(card.get("pcie.link.width.current")), number(card.get("pcie.link.width.max"))
    if width and most and width < most:
        found = f"{_label(card)}: x{width:.0f}"
        yield _warning("PCIe width", found, f"x{most:.0f}", "reseat or replace the card or its riser")


def _rows() -> Iterator[Finding]:
    try:
        rows = nvidia_smi.remapped_rows()
    except OSError:
        return  # cards before the A100 retire pages instead
    for index, row in enumerate(rows):
        if row["remapped_rows.failure"].lower() in ("1", "yes"):
            yield _wrong("remapped rows", f"GPU {index}: remapping failed", "no failure", "replace the card")
        if row["remapped_rows.pending"].lower() in ("1", "yes"):
            yield _wrong("remapped rows", f"GPU {index}: pending", "none pending", "reset the GPU")


def _wrong(check: str, found: str, expected: str, fix: str) -> Finding:
    return judged(GROUP, check, "wrong", found, expected, fix)


def _warning(check: str, found: str, expected: str, fix: str) -> Finding:
    return judged(GROUP, check, "warning", found, expected, fix)
