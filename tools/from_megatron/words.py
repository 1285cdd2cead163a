"""A command's text as its words: variables are put in here, and the standard library's shlex does the rest."""

import ast
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from parallel.errors import UserError
from tools.from_megatron.gaps import gap, gaps

Value = str | list[str]

_NOTHING = "\ue002"  # "${EMPTY[@]}" is no word at all, where "$EMPTY" is an empty one
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!0-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?$!])(?:\[([^]]*)\])?(?:(:?)([-=+])(.*))?", re.DOTALL)
_REDIRECTION = re.compile(r"(\d*|&)(>>|>\||>&|<&|<|>)(.*)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Div: lambda a, b: int(a / b),  # the shell's, which cuts towards 0
}


@dataclass(slots=True)
class Variables:
    """What a script has set so far, and where it is."""

    values: dict[str, Value] = field(default_factory=dict)
    """By name; "1", "2", ... are the script's arguments."""
    line: int = 1

    def get(self, name: str) -> Value | None:
        """None where it is not set."""
        arguments = [self.values[key] for key in map(str, range(1, 100)) if key in self.values]
        if name in ("@", "*"):
            return [str(value) for value in arguments]
        return str(len(arguments)) if name == "#" else self.values.get(name)


def words(text: str, variables: Variables) -> list[str]:
    """The words of a simple command, as a program would receive them; redirections are left out.

    Raises UserError for a quote that is never closed.
    """
    try:
        found = shlex.split(expand(text, variables))
    except ValueError:
        raise UserError(f"line {variables.line}: a quote is never closed.") from None
    kept, skip = [], False
    for word in found:
        redirection = _REDIRECTION.fullmatch(word)
        if not skip and redirection is None and word != _NOTHING:
            kept.append(word)
        skip = redirection is not None and not redirection[3]
    return kept


def one(text: str, variables: Variables) -> str:
    """A text as one word: the right-hand side of an assignment, where blanks outside quotes do not split."""
    try:
        return " ".join(shlex.split(expand(text, variables))).replace(_NOTHING, "")
    except ValueError:
        raise UserError(f"line {variables.line}: a quote is never closed.") from None


def expand(text: str, variables: Variables) -> str:
    """The text with variables put in and quoted again, so that shlex splits where a shell would."""
    parts, at, quoted = [], 0, False
    while at < len(text):
        character = text[at]
        if character == "'" and not quoted:
            end = text.find("'", at + 1) + 1 or len(text)
        elif text.startswith("\\\n", at):  # a joined line, between double quotes too
            at += 2
            continue
        elif character == "\\":
            end = at + 2
        elif character in "$`":
            value, end = _value(text, at, variables)
            parts.append(_requote(value, quoted))
            at = end
            continue
        else:
            quoted ^= character == '"'
            end = at + 1
        parts.append(text[at:end])
        at = end
    return "".join(parts)


def _requote(value: Value, quoted: bool) -> str:
    values = [value] if isinstance(value, str) else value
    if quoted:
        kept = '" "'.join(text.replace("\\", "\\\\").replace('"', '\\"') for text in values)
        return kept if values else _NOTHING
    split = (" ".join(shlex.quote(word) for word in text.split()) for text in values)
    edges = [text[:1].isspace() or text[-1:].isspace() for text in values]
    return f" {' '.join(split)} " if any(edges) else " ".join(split)


def _value(text: str, at: int, variables: Variables) -> tuple[Value, int]:
    """What stands for the $ or ` at this place, and where it ends."""
    if text[at] == "`":
        end = text.find("`", at + 1) + 1 or len(text)
        return gap(f"$({text[at + 1 : end - 1]})", variables.line), end
    if text.startswith("$((", at):
        end = closing(text, at + 1)
        return arithmetic(text[at + 3 : end - 2], variables), end
    if text.startswith("$(", at):
        end = closing(text, at + 1)
        return gap(text[at:end], variables.line), end
    if text.startswith("${", at):
        end = closing(text, at + 1)
        return _braced(text[at + 2 : end - 1], variables), end
    if match := _NAME.match(text, at + 1):
        value = variables.get(match[0])
        if isinstance(value, list) and match[0] not in "@*":
            value = value[0] if value else ""
        return gap(f"${match[0]}", variables.line) if value is None else value, match.end()
    return "$", at + 1


def closing(text: str, at: int) -> int:
    """Behind the bracket that closes the one at this place; brackets in quotes do not count."""
    opening, close, depth, quote = text[at], {"(": ")", "{": "}"}[text[at]], 0, ""
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character == opening) - (character == close)
        at += 1
        if not depth and not quote:
            break
    return at


def _braced(text: str, variables: Variables) -> Value:
    """``${NAME}`` with an index, a length or a default; cutting and replacing are not followed."""
    match = _BRACED.fullmatch(text)
    if match is None:
        return gap(f"${{{text}}}", variables.line)
    length, name, index, colon, sign, other = match.groups()
    value = _element(variables.get(name), index)
    if length:
        return str(len(value or ""))
    absent = value is None or (isinstance(value, str) and bool(gaps(value))) or (bool(colon) and not value)
    if sign == "+":
        return "" if absent else one(other, variables)
    if sign and absent:
        value = one(other, variables)
        if sign == "=":
            variables.values[name] = value
    return gap(f"${name}", variables.line) if value is None else value


def _element(value: Value | None, index: str | None) -> Value | None:
    if value is None or index in ("@", "*"):
        return [value] if isinstance(value, str) else value
    if index is None:
        return value if isinstance(value, str) else "".join(value[:1])
    values = [value] if isinstance(value, str) else value
    return values[int(index)] if index.isdigit() and int(index) < len(values) else None


def arithmetic(expression: str, variables: Variables) -> str:
    """The whole number that an expression of + - * / % makes; a gap where it holds one, or more than these."""
    text = one(f'"{expression}"', variables)
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        missing = gaps(text) or [(variables.line, f"$(({expression}))")]
        return gap(missing[0][1], missing[0][0])


def _number(node: ast.expr, variables: Variables) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(one(f"${node.id}", variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left, variables), _number(node.right, variables))
    raise ValueError(ast.dump(node))
