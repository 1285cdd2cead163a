"""Programs whose output is a function of their words and their input: what ``$( )`` around them makes is known.

Each gives its output, or None where it is not known: an option that is not followed, or another program.
"""

import re
from collections.abc import Callable, Sequence

from tools.from_megatron.shell.option_parser import getopt_program
from tools.from_megatron.unknown import has_unknown

type Program = Callable[[Sequence[str], str | None], str | None]
"""Words behind its name, and its input, None where that is not known."""

MOST_LINES = 20_000
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v", "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:0([0-7]{0,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_FORMAT_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_SPECIFIER = re.compile(r"%(?:%|([-+ 0#]*)(\d*|\*)(?:\.(\d*))?([diouxXsqbcfeEgG]))")


def output_of(words: Sequence[str], given: str | None) -> str | None:
    """What a program prints; None where that is not known."""
    program = PROGRAMS.get(words[0].rpartition("/")[2]) if words else None
    return None if program is None else program(words[1:], given)


def escaped(text: str, escape: re.Pattern[str] = _ESCAPE) -> str:
    """As ``echo -e`` and %b read a text; of printf's format, octal numbers need no 0."""

    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return chr(int(match[1] or "0", 8) & 0xFF)
        return chr(int(match[2], 16)) if match[2] else _ESCAPES.get(match[3], match[0])

    return escape.sub(one, text)


def echo(words: Sequence[str], given: str | None) -> str | None:
    """``echo``."""
    options, rest = "", list(words)
    while rest and re.fullmatch(r"-[neE]+", rest[0]):
        options += rest.pop(0)[1:]
    text = " ".join(rest)
    if "e" in options:
        text = escaped(text)
        if r"\c" in text:
            return text.partition(r"\c")[0]
    return text if "n" in options else f"{text}\n"


def printf(words: Sequence[str], given: str | None) -> str | None:
    """``printf``: the format is used again until no word is left."""
    rest = list(words[1:] if words[:1] == ["--"] else words)
    if not rest or (rest[0].startswith("-") and len(rest[0]) > 1) or has_unknown(rest[0]):
        return None
    form, values = rest[0], rest[1:]
    found: list[str] = []
    while True:
        taken = len(values)
        text = _formatted(escaped(form, _FORMAT_ESCAPE), values)
        if text is None:
            return None
        found.append(text)
        if not values or taken == len(values) or len(found) > MOST_LINES:
            return "".join(found)


def _formatted(form: str, values: list[str]) -> str | None:
    found, at = list[str](), 0
    for match in _SPECIFIER.finditer(form):
        found.append(form[at : match.start()])
        at = match.end()
        if match[0] == "%%":
            found.append("%")
            continue
        width = (values.pop(0) if values else "0") if match[2] == "*" else match[2]
        text = _one(match, width, values.pop(0) if values else None)
        if text is None:
            return None
        found.append(text)
    rest = form[at:]
    return None if "%" in re.sub("%%", "", rest) else "".join(found) + rest


def _one(match: re.Match[str], width: str, value: str | None) -> str | None:
    flags, precision, letter = match[1], match[3], match[4]
    if len(width) > 4 or len(precision or "") > 4:
        return None
    if letter in "sbqc":
        text = value or ""
        if has_unknown(text) and (width or precision is not None or letter != "s"):
            return None
        if letter == "q" and not text.isprintable():
            return None
        change = {"b": escaped, "c": lambda one: one[:1], "q": _shell_quoted}
        text = change[letter](text) if letter in change else text
        text = text if precision is None else text[: int(precision or 0)]
        return text.ljust(int(width)) if "-" in flags and width else text.rjust(int(width or 0))
    if value is None or value == "":
        value = "0"
    number_match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]+|0[0-7]+|\d+)(\.\d*)?\s*", value)
    if has_unknown(value) or number_match is None:
        return None
    sign, digits, fraction = number_match.groups()
    if letter in "diouxX":
        if fraction:
            return None
        base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" and len(digits) > 1 else 10
        number = int(digits, base) * (-1 if sign == "-" else 1)
        if not -(1 << 63) <= number < 1 << 63 or (number < 0 and letter in "ouxX"):
            return None
        return (
            f"%{flags}{width}{'' if precision is None else f'.{precision or 0}'}{'d' if letter in 'diu' else letter}"
            % number
        )
    return f"%{flags}{width}{'' if precision is None else f'.{precision or 0}'}{letter}" % float(value)


def _shell_quoted(text: str) -> str:
    """As %q: a word that the shell reads as this text."""
    return re.sub(r"[ '\"\\|&;()<>!{}*\[\]?^$`,]|^[#~]|(?<=[=:])~", r"\\\g<0>", text) or "''"


def basename(words: Sequence[str], given: str | None) -> str | None:
    """``basename PATH [SUFFIX]``: known where the last part of the path is."""
    rest = [word for word in words if word != "--"]
    if not 1 <= len(rest) <= 2 or rest[0].startswith("-"):
        return None
    last = rest[0].rstrip("/").rpartition("/")[2] or ("/" if rest[0].startswith("/") else "")
    if has_unknown(last):
        return None
    suffix = rest[1] if len(rest) == 2 else ""
    return f"{last.removesuffix(suffix) if last != suffix else last}\n"


def dirname(words: Sequence[str], given: str | None) -> str | None:
    """``dirname PATH``."""
    rest = [word for word in words if word != "--"]
    if len(rest) != 1 or rest[0].startswith("-"):
        return None
    path = rest[0].rstrip("/") or rest[0][:1]
    head, slash, last = path.rpartition("/")
    if has_unknown(last) and not slash:
        return None
    return f"{head.rstrip('/') or '/' if slash else '.'}\n"


def seq(words: Sequence[str], given: str | None) -> str | None:
    """``seq [FIRST [STEP]] LAST``, and -s."""
    rest, separator = list(words), "\n"
    if rest[:1] == ["-s"] and len(rest) > 1:
        separator, rest = rest[1], rest[2:]
    elif rest and rest[0].startswith("-s"):
        separator = rest.pop(0)[2:]
    if not 1 <= len(rest) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", word) for word in rest):
        return None
    numbers = [int(word) for word in rest]
    first, step, last = {1: (1, 1, numbers[-1]), 2: (numbers[0], 1, numbers[-1])}.get(len(rest)) or numbers
    if not step or (last - first) // step > MOST_LINES:
        return None
    found = [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]
    return separator.join(found) + "\n" if found else ""


def expr(words: Sequence[str], given: str | None) -> str | None:
    """``expr A + B``: one operation on whole numbers."""
    if len(words) != 3 or not all(re.fullmatch(r"-?\d{1,18}", word) for word in (words[0], words[2])):
        return None
    left, right = int(words[0]), int(words[2])
    if words[1] in ("/", "%") and not right:
        return None
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1) if right else 0
    values = {"+": left + right, "-": left - right, "*": left * right, "/": quotient, "%": left - right * quotient}
    return f"{values[words[1]]}\n" if words[1] in values else None


def cat(words: Sequence[str], given: str | None) -> str | None:
    """``cat`` of its input."""
    return given if not words or list(words) == ["-"] else None


def tr(words: Sequence[str], given: str | None) -> str | None:
    """``tr SET SET``, -d and -s, of plain characters, ranges and some classes."""
    if given is None or has_unknown(given):
        return None
    rest, option = list(words), ""
    if rest and re.fullmatch(r"-[ds]", rest[0]):
        option = rest.pop(0)
    if len(rest) != (1 if option else 2):
        return None
    sets = [_characters(word) for word in rest]
    if any(one is None for one in sets):
        return None
    first = sets[0] or ""
    if option == "-d":
        return "".join(one for one in given if one not in first)
    if option == "-s":
        return re.sub(r"(.)\1+", lambda match: match[1] if match[1] in first else match[0], given, flags=re.DOTALL)
    second = sets[1] or ""
    if not second:
        return None
    padded = second.ljust(len(first), second[-1])
    table = dict(zip(reversed(first), reversed(padded[: len(first)]), strict=True))
    return "".join(table.get(one, one) for one in given)


def _characters(text: str) -> str | None:
    classes = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:digit:]": "0-9", "[:space:]": " \t\n\r\f\v"}
    for name, characters in classes.items():
        text = text.replace(name, characters)
    if "[" in text or has_unknown(text):
        return None
    text = escaped(text)
    found, at = "", 0
    while at < len(text):
        if text[at + 1 : at + 2] == "-" and at + 2 < len(text):
            found += "".join(map(chr, range(ord(text[at]), ord(text[at + 2]) + 1)))
            at += 3
        else:
            found += text[at]
            at += 1
    return found


def cut(words: Sequence[str], given: str | None) -> str | None:
    """``cut -dX -fN``: one field of each line."""
    options = re.fullmatch(r"(?:-d ?(.) )?-f ?(\d+)(?: -d ?(.))?", " ".join(words), re.DOTALL)
    if options is None or given is None or has_unknown(given):
        return None
    delimiter, number = options[1] or options[3] or "\t", int(options[2])
    found = []
    for line in given.splitlines():
        fields = line.split(delimiter)
        found.append(line if delimiter not in line else fields[number - 1] if 0 < number <= len(fields) else "")
    return "".join(f"{line}\n" for line in found)


def head(words: Sequence[str], given: str | None) -> str | None:
    """``head -n N``."""
    return _lines(words, given, lambda lines, count: lines[:count])


def tail(words: Sequence[str], given: str | None) -> str | None:
    """``tail -n N``."""
    return _lines(words, given, lambda lines, count: lines[-count:] if count else [])


def _lines(words: Sequence[str], given: str | None, part: Callable[[list[str], int], list[str]]) -> str | None:
    options = re.fullmatch(r"-n ?(\d{1,6})|-(\d{1,6})", " ".join(words))
    if options is None or given is None or has_unknown(given):
        return None
    return "".join(part(given.splitlines(keepends=True), int(options[1] or options[2])))


def wc(words: Sequence[str], given: str | None) -> str | None:
    """``wc -l``, -w and -c."""
    if given is None or has_unknown(given) or list(words) not in (["-l"], ["-w"], ["-c"]):
        return None
    counts = {"-l": given.count("\n"), "-w": len(given.split()), "-c": len(given.encode())}
    return f"{counts[words[0]]}\n"


def bc(words: Sequence[str], given: str | None) -> str | None:
    """``bc`` of one operation on whole numbers."""
    if words or given is None or has_unknown(given):
        return None
    match = re.fullmatch(r"\s*(\d{1,18})\s*([-+*/%])\s*(\d{1,18})\s*\n?", given)
    return expr([match[1], match[2], match[3]], None) if match else None


def nothing(words: Sequence[str], given: str | None) -> str | None:
    """What prints nothing."""
    return ""


def unknown(words: Sequence[str], given: str | None) -> str | None:
    """What prints something that depends on files or on the machine."""
    return None


PROGRAMS: dict[str, Program] = {
    "echo": echo, "printf": printf, "basename": basename, "dirname": dirname, "seq": seq, "expr": expr, "cat": cat,
    "tr": tr, "cut": cut, "head": head, "tail": tail, "wc": wc, "bc": bc, "getopt": getopt_program,
    **dict.fromkeys(
        "mkdir touch rm cp mv ln chmod chown sleep ulimit umask trap kill disown alias unalias complete bind stty"
        " clear tput logger sync truncate".split(),
        nothing,
    ),
    **dict.fromkeys("ls sed grep egrep awk date hostname nproc scontrol git find which".split(), unknown),
}  # fmt: skip
