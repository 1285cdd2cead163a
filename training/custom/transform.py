"""``data.transform``: the user's function that makes each training sample another one (data/transformed.py)."""

from data.prepared import Transform
from program.users_code import named
from training.config.import_path import load_function

FIELD = "data.transform"


def load_transform(path: str | None) -> Transform | None:
    """The function of an import path; None of None. Raises SharedMistake where it takes other arguments, or is none."""
    if path is None:
        return None
    return named(f"your transformation {path} ({FIELD})", load_function(FIELD, path, ("tokens", "sample", "rng")))
