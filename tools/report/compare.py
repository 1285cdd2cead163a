"""Several runs: in which fields of their configurations they differ."""

from collections.abc import Sequence

from tools.report.markup import table, value_text
from tools.report.run_data import RunData

PLACES = ("data.cache_dir", "run_dir")
"""Where something lies, which changes no number."""


def differences(runs: Sequence[RunData]) -> str:
    """A row for each field that is not the same in all of them."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in PLACES)
    rows = []
    for name in names:
        values = [value_text(run.setting(name)) for run in runs]
        if len(set(values)) > 1:
            rows.append((name, *values))
    return table(("field", *(run.name for run in runs)), rows)
