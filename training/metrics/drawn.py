"""How far the curves of a chart have come, for services that cannot take points back.

A run that resumes from an earlier checkpoint repeats iterations. Those that a chart has already are left out, so that
no curve runs back or doubles; metrics.jsonl has both.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from parallel.durable import replace_file
from parallel.untrusted import InputError, read_json
from training.metrics.values import Number


class DrawnCurves:
    """The last iteration of each curve of one chart, kept in a file of the run's folder."""

    def __init__(self, path: Path, chart: str) -> None:
        """``chart``: the id of what is drawn. Of another one, or of a file that cannot be read, nothing is drawn."""
        self._path, self._chart = path, chart
        self._last: dict[str, int] = {}
        with contextlib.suppress(OSError, InputError):
            by_chart = read_json(path, dict[str, dict[str, int]])
            self._last = by_chart.get(chart, {})

    def fresh(self, iteration: int, curves: Iterable[tuple[str, Number]]) -> dict[str, Number]:
        """The points that go on beyond their curve's last one. They count as drawn from here on, also if this process
        is killed before they are: a point that lacks is better than one that stands twice."""
        points = {name: value for name, value in curves if iteration > self._last.get(name, -1)}
        if points:
            self._last |= dict.fromkeys(points, iteration)
            with contextlib.suppress(OSError):
                text = json.dumps({self._chart: self._last})
                replace_file(self._path, text.encode(), durable=False)
        return points
