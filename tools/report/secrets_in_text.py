"""Secrets in texts that leave the machine: found by the environment's values, by a name before them, by shape."""

import re
from collections.abc import Mapping

from training.metrics.redaction import REDACTED, without_secrets

NAMED = re.compile(
    r"""(?P<before>\b(?:[\w.-]*(?:KEY|TOKEN|SECRET|PASSWORD|Key|Token|Secret|Password)"""
    r"""|(?:[\w.-]*[_.-])?(?:key|token|secret|password|passwd))["']?\s*[=:]\s*["']?)(?P<value>[^\s"',;}\]]{6,})"""
)
"""NAME=value, "name": "value", name: value."""
NUMBER = re.compile(r"[-+\d.,e]+")
SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|A[KS]IA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|xox[abp]-[\w-]{10,}"
    r"|ey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
    r"|(?<=X-Amz-)(?:Signature|Credential|Security-Token)=[^\s&\"']+|ya29\.[\w-]{10,}"
    r"|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
"""Tokens of Hugging Face, OpenAI, AWS, GitHub, Slack, Google; what signs a URL of S3; JSON web tokens; private keys."""


def scrubbed(text: str, environ: Mapping[str, str]) -> str:
    """``text`` with every secret replaced."""
    longest_first = dict(sorted(environ.items(), key=lambda one: -len(one[1])))  # a value may be a part of another one
    text = SHAPES.sub(REDACTED, without_secrets(text, longest_first))
    return NAMED.sub(_without_value, text)


def _without_value(found: re.Match[str]) -> str:
    """Numbers stay: ids of tokens, counts."""
    return found[0] if NUMBER.fullmatch(found["value"]) else f"{found['before']}{REDACTED}"
