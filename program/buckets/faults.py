"""What went wrong with an object: one OSError with the object's URL, the server's status and code, and what to do.

Libraries wrap each other (aiohttp in botocore in s3fs), so what a server said is looked for along the chain of causes:
botocore's ClientError has `response`, a table; huggingface_hub's has one with `status_code`; gcsfs' HttpError a `code`.
"""

import errno
from collections.abc import Iterator
from typing import Any, NamedTuple

from program.errors import UserError

PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
PASSING_CODES = frozenset(
    "SlowDown RequestTimeout InternalError ServiceUnavailable Throttling ThrottlingException RequestLimitExceeded "
    "IncompleteBody BadDigest XAmzContentSHA256Mismatch OperationAborted ConditionalRequestConflict".split()
)
"""Of answers whose status alone would say that asking again does not help."""
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
CREDENTIALS = (*EXPIRED, "NoCredentialsError", "SignatureDoesNotMatch", "InvalidAccessKeyId", "RequestTimeTooSkewed")
WAYS = {
    **dict.fromkeys(EXPIRED, "The credentials have expired: renew them (AWS_SESSION_TOKEN, or log in again)"),
    "RequestTimeTooSkewed": "This machine's clock is wrong: set it by NTP",
    "SignatureDoesNotMatch": "The secret is not this key's: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "InvalidAccessKeyId": "The server does not know this key: check AWS_ACCESS_KEY_ID or AWS_PROFILE, and "
    "AWS_ENDPOINT_URL",
    "NoCredentialsError": "No credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "NoSuchBucket": "There is no such bucket: check its name, and AWS_ENDPOINT_URL for a server of your own",
    "EndpointConnectionError": "Nothing answers there: check AWS_ENDPOINT_URL, AWS_REGION and the network",
}
DENIED = "Give the credentials this right on the bucket, or use others (AWS_PROFILE)"


class ShortRead(Exception):
    """A server sent fewer bytes than it was asked for."""


class Fault(NamedTuple):
    """What an error means."""

    error: OSError
    """To raise: FileNotFoundError, PermissionError, FileExistsError, or another with errno EIO or ESTALE."""
    passing: bool
    """Whether it may pass by itself."""


class _Said(NamedTuple):
    status: int
    code: str
    text: str


def fault(error: Exception, url: str, what: str, has_answered: bool = False) -> Fault:
    """What an error of ``what``, as "read", on an object means."""
    if isinstance(error, ImportError | UserError):
        raise error
    said = _said(error)
    kind = _kind(error, said)
    passing = said.status in PASSING_STATUS or said.code in PASSING_CODES or (not said.status and kind == errno.EIO)
    passing = passing and said.code not in WAYS
    passing = passing or (has_answered and said.code == "EndpointConnectionError")
    shown = " ".join(filter(None, [str(said.status or ""), said.code])) or type(error).__name__
    way = WAYS.get(said.code) or (DENIED if kind == errno.EACCES else "")
    detail = said.text.splitlines()[0][:200].rstrip(". ") if said.text.strip() else ""
    text = f"{what}: {shown}" + (f" ({detail})" if detail else "") + (f". {way}" if way else "")
    return Fault(OSError(kind, text, url), passing)


def _kind(error: Exception, said: _Said) -> int:
    names = {type(one).__name__ for one in _chain(error)}
    if "FileExpired" in names:
        return errno.ESTALE
    if said.status in (409, 412) or isinstance(error, FileExistsError):
        return errno.EEXIST if said.code not in PASSING_CODES else errno.EIO
    if said.status == 404 or isinstance(error, FileNotFoundError):
        return errno.ENOENT
    if said.status in (401, 403) or said.code in CREDENTIALS or isinstance(error, PermissionError):
        return errno.EACCES
    return errno.EIO


def _said(error: Exception) -> _Said:
    for one in _chain(error):
        response: Any = getattr(one, "response", None)
        if isinstance(response, dict) and "Error" in response:
            answer = response["Error"]
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(answer.get("Code", ""))
            return _Said(int(status), "" if code == str(status) else code, str(answer.get("Message", "")))
        # aiohttp's parser has a code as well, for what it could not parse
        own = getattr(one, "code", None) if type(one).__name__ == "HttpError" else None
        status = getattr(response, "status_code", own)
        if isinstance(status, int):
            return _Said(status, "", str(one))
    for one in _chain(error):
        if type(one).__name__ in WAYS:
            return _Said(0, type(one).__name__, str(one))
    return _Said(0, "", str(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
