"""Keeps secrets out of what a run publishes about its configuration."""

import re
from collections.abc import Mapping

REDACTED = "[redacted]"

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|(?i:secret|password|(?:keys?|token)$)")
"""Upper-case names, as environments have them, are taken broadly. Lower-case ones must end in ``key`` or
``token``: else ``tokenizer`` and ``moe_token_dispatcher_type`` would be hidden."""

ASSIGNMENT = re.compile(r"\s*([\w.-]+)\s*=")


def redacted(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of ``config`` in which the value under every name that looks like a secret's is ``[redacted]``.

    Sections and lists are searched too, and so are ``name=value`` strings (those of ``model.megatron``).
    """
    return {name: REDACTED if SECRET_NAME.search(name) else _cleaned(value) for name, value in config.items()}


def _cleaned(value: object) -> object:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    if isinstance(value, str) and (match := ASSIGNMENT.match(value)) and SECRET_NAME.search(match[1]):
        return f"{match[1]}={REDACTED}"
    return value
