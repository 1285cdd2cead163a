"""A summary as text, for a console."""

from collections.abc import Iterator, Sequence

from training.profile.summary import RankSummary, Row

MOST_RANKS, MOST_LINES, WIDTH = 4, 5, 60


def page(ranks: Sequence[RankSummary], where: object) -> str:
    """Of the first ranks; all are in the file ``where``."""
    shown = [line for one in ranks[:MOST_RANKS] for line in _rank(one)]
    rest = f", and {len(ranks) - MOST_RANKS} more ranks" if len(ranks) > MOST_RANKS else ""
    return "\n".join([*shown, f"  all of it{rest}: {where}"])


def _rank(one: RankSummary) -> Iterator[str]:
    iterations = one.last_iteration - one.first_iteration + 1
    span = f"{one.first_iteration} to {one.last_iteration}" if iterations > 1 else f"{one.last_iteration}"
    yield (
        f"profile of rank {one.rank} ({one.device}), iteration{'s' if iterations > 1 else ''} {span}: "
        f"{one.window_s / iterations:.3g} s an iteration"
    )
    if one.device == "cuda" and not one.kernels:
        yield "  the trace has no kernels: CUPTI could record none (another profiler may be attached, or it may not be"
        yield "  permitted: https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        return
    parts = (
        ("compute", one.compute_s),
        ("exposed communication", one.exposed_communication_s),
        ("exposed messages", one.exposed_messages_s),
        ("idle", one.idle_s),
    )
    yield "  " + ", ".join(f"{name} {_share(spent, one)}" for name, spent in parts)
    yield (
        f"  collectives {_share(one.communication_s, one)}, messages between stages {_share(one.messages_s, one)}, "
        f"host waits {_share(one.host_wait_s, one)}"
    )
    tables = (("kernels" if one.device == "cuda" else "operators", one.kernels), ("host waits", one.host_waits))
    for title, rows in tables:
        if rows:
            yield f"  {title}:"
            yield from (_row(row, one) for row in rows[:MOST_LINES])


def _row(row: Row, one: RankSummary) -> str:
    name = row.name if len(row.name) <= WIDTH else f"{row.name[: WIDTH - 3]}..."
    return f"    {_share(row.total_s, one):>6}  {row.calls:>6} x {name}" + (f" in {row.where}" if row.where else "")


def _share(spent: float, one: RankSummary) -> str:
    return f"{spent / one.window_s:.1%}" if one.window_s else "-"
