"""URLs of objects. Plain text in, plain text out: `pathlib.Path` would make `s3:/bucket` of `s3://bucket`."""

import re
from pathlib import Path

EXTRAS = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
"""The package that fsspec needs for each scheme."""
_HUB_FILE = re.compile(r"hf://(datasets|buckets|spaces)/|hf://[^/#@:]+/[^/#@:]+/.")


def is_url(name: str) -> bool:
    """Whether a name is an object's, or what objects' names begin with.

    Of the Hugging Face Hub those of files are (hf://datasets/OWNER/NAME/PATH, hf://buckets/OWNER/NAME/PATH); a whole
    dataset is hf://OWNER/NAME, which `datasets` reads (data/raw/hub.py).
    """
    scheme, found, _ = name.partition("://")
    return bool(found) and scheme in EXTRAS and (scheme != "hf" or _HUB_FILE.match(name) is not None)


def of_path(path: Path) -> str | None:
    """The URL that a path was made of, which has lost a slash by that: `s3:/bucket/key`; None for any other path."""
    scheme, found, rest = str(path).partition(":/")
    url = f"{scheme}://{rest.lstrip('/')}"
    return url if found and is_url(url) else None


def problem(url: str) -> str | None:
    """What is wrong with a URL as a user gives it; None where nothing is. Credentials in it are not repeated."""
    scheme, _, rest = url.partition("://")
    bucket, _, _ = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        return (
            f"{scheme}://…: credentials do not belong in a URL, which is kept in configurations and logs. Set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and write s3://BUCKET/KEY."
        )
    if not bucket:
        return f"{url}: expected {scheme}://BUCKET/KEY, found no bucket."
    if "?" in rest and scheme != "hf":
        return f"{scheme}://{rest.partition('?')[0]}?…: expected {scheme}://BUCKET/KEY, found a query behind it."
    return None


def bare(url: str) -> str:
    """`BUCKET/KEY`, as fsspec takes it."""
    return url.partition("://")[2]


def scheme(url: str) -> str:
    """`s3`, `gs` or `hf`."""
    return url.partition("://")[0]


def joined(url: str, *names: str) -> str:
    """An object below a URL that stands for a folder."""
    return "/".join([url.rstrip("/"), *names])


def parent(url: str) -> str:
    """The folder that an object is in, without a slash behind it."""
    return url.rstrip("/").rpartition("/")[0]


def last(url: str) -> str:
    """The name of an object without its folder."""
    return url.rstrip("/").rpartition("/")[2]
