"""Secrets are kept out of what leaves a run: by the name that a value stands under, and within URLs."""

import re
from collections.abc import Mapping

REDACTED = "[redacted]"

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|(?i:secret|password|(?:keys?|token)$)")
"""Upper-case names, as environments have them, are taken broadly. Lower-case ones must end in ``key`` or
``token``: else ``tokenizer`` and ``moe_token_dispatcher_type`` would be hidden."""

ASSIGNMENT = re.compile(r"\s*([\w.-]+)\s*=")
USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
"""User and password of a URL."""
SHORTEST_SECRET = 6
"""Shorter values of the environment are no secrets, and would tear words apart."""


def redacted(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of ``config`` in which the value under every name that looks like a secret's is ``[redacted]``.

    Sections and lists are searched too, ``name=value`` strings (those of ``model.megatron``), and URLs with a user.
    """
    return {name: REDACTED if SECRET_NAME.search(name) else _cleaned(value) for name, value in config.items()}


def _cleaned(value: object) -> object:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    if not isinstance(value, str):
        return value
    if (match := ASSIGNMENT.match(value)) and SECRET_NAME.search(match[1]):
        return f"{match[1]}={REDACTED}"
    return USERINFO.sub(f"{REDACTED}@", value)


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """A library's message without the values of the environment's secrets, and without users of URLs."""
    for name, value in environ.items():
        if SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, REDACTED)
    return USERINFO.sub(f"{REDACTED}@", text)
