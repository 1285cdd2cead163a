"""``$(( ))``: bash's whole numbers of 64 bits, with C's operators."""

import re
from collections.abc import Callable

from parallel.errors import UserError
from tools.from_megatron.shell.variables import Variables
from tools.from_megatron.unknown import Unknown, has_unknown

_TOKEN = re.compile(
    r"\s*(?:(\d+#[0-9A-Za-z@_]+|0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)|"
    r"(<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^!~<>=?:,()\[\]]))"
)
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
           ("*", "/", "%"))  # fmt: skip
_MOST_NESTED = 60


class UnknownNumber(Exception):
    """An expression needs a value that is not known."""

    def __init__(self, unknown: Unknown | None) -> None:
        super().__init__()
        self.unknown = unknown


def calculate(expression: str, variables: Variables, depth: int = 0) -> int:
    """The value of an expression, whose expansions have been made; assignments in it are made.

    Raises UnknownNumber, and UserError for what bash refuses, too.
    """
    if has_unknown(expression):
        raise UnknownNumber(variables.unknowns.found(expression)[0])
    return _Calculator(expression, variables, depth).whole()


class _Calculator:
    def __init__(self, expression: str, variables: Variables, depth: int) -> None:
        if depth > _MOST_NESTED:
            raise UserError(f"line {variables.line}: variables of an expression that name one another.")
        self.expression, self.variables, self.depth = expression, variables, depth
        self.tokens = self._tokens()
        self.at = 0
        self.runs = True  # whether what is read counts: not the side of ?: or && that is not taken
        self.nested = 0

    def _tokens(self) -> list[str]:
        found, at = list[str](), 0
        text = self.expression.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.wrong()
            found.append(match[1] or match[2] or match[3])
            at = match.end()
        return found

    def wrong(self, why: str = "is not arithmetic of bash's") -> UserError:
        shown = self.variables.unknowns.readable(self.expression.strip())[:60]
        return UserError(f"line {self.variables.line}: (( {shown} )) {why}.")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *signs: str) -> str:
        """The next token if it is one of these."""
        token = self.peek()
        if token and token in signs:
            self.at += 1
            return token
        return ""

    def whole(self) -> int:
        if not self.tokens:
            return 0
        value = self.comma()
        if self.at < len(self.tokens):
            raise self.wrong()
        return value

    def comma(self) -> int:
        self.nested += 1
        if self.nested > _MOST_NESTED:
            raise self.wrong("nests too deep")
        value = self.assignment()
        while self.take(","):
            value = self.assignment()
        self.nested -= 1
        return value

    def assignment(self) -> int:
        start = self.at
        place = self.place()
        sign = self.take(*_ASSIGNS) if place else ""
        if not place or not sign:
            self.at = start
            return self.ternary()
        before = 0 if sign == "=" else self.read(place)  # before the right side changes it
        right = self.assignment()
        value = right if sign == "=" else self.apply(sign[:-1], before, right)
        self.write(place, value)
        return value

    def place(self) -> tuple[str, int | str | None] | None:
        """A variable, with an index."""
        name = self.peek()
        if not re.match(r"[A-Za-z_]", name):
            return None
        self.at += 1
        if not self.take("["):
            return name, None
        if name in self.variables.state.tables:
            key = self.peek()
            self.at += 1
            self.need("]")
            return name, key
        index = self.comma()
        self.need("]")
        return name, index

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise self.wrong()

    def ternary(self) -> int:
        condition = self.binary(0)
        if not self.take("?"):
            return condition
        runs = self.runs
        self.runs = runs and condition != 0
        first = self.comma()
        self.need(":")
        self.runs = runs and condition == 0
        second = self.ternary()
        self.runs = runs
        return first if condition else second

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while sign := self.take(*_LEVELS[level]):
            runs = self.runs
            decided = (sign == "&&" and left == 0) or (sign == "||" and left != 0)
            self.runs = runs and not decided
            right = self.binary(level + 1)
            self.runs = runs
            left = self.apply(sign, left, right)
        return left

    def power(self) -> int:
        base = self.unary()
        return self.apply("**", base, self.power()) if self.take("**") else base

    def unary(self) -> int:
        self.nested += 1
        if self.nested > _MOST_NESTED:
            raise self.wrong("nests too deep")
        value = self._unary()
        self.nested -= 1
        return value

    def _unary(self) -> int:
        sign = self.take("++", "--")
        if sign and re.match(r"[A-Za-z_]", self.peek()):
            place = self.place()
            assert place is not None
            value = self.apply(sign[0], self.read(place), 1)
            self.write(place, value)
            return value
        if sign:  # --5 is 5
            return self.unary()
        if sign := self.take("!", "~", "-", "+"):
            value = self.unary()
            return {"!": int(not value), "~": ~value, "-": _wrapped(-value), "+": value}[sign]
        return self.primary()

    def primary(self) -> int:
        if self.take("("):
            value = self.comma()
            self.need(")")
            return value
        token = self.peek()
        if re.match(r"\d", token):
            self.at += 1
            return self.number(token)
        place = self.place()
        if place is None:
            raise self.wrong()
        value = self.read(place)
        if sign := self.take("++", "--"):
            self.write(place, self.apply(sign[0], value, 1))
        return value

    def number(self, token: str) -> int:
        if len(token) > 30:
            raise self.wrong("has a number beyond 64 bits")
        try:
            if "#" in token:
                return _wrapped(_in_base(*token.split("#")))
            base = 16 if token[:2] in ("0x", "0X") else 8 if token[0] == "0" else 10
            return _wrapped(int(token, base))
        except ValueError:
            raise self.wrong(f"has {token}, which its base does not have") from None

    def read(self, place: tuple[str, int | str | None]) -> int:
        if not self.runs:
            return 0
        name, index = place
        if index is None:
            text = self.variables.text(name)
        else:
            value = self.variables.get(name)
            table: dict[int | str, str] = {0: value} if isinstance(value, str) else value or {}
            text = table.get(index)
        if not text or not text.strip():
            return 0
        return calculate(text, self.variables, self.depth + 1)

    def write(self, place: tuple[str, int | str | None], value: int) -> None:
        if not self.runs:
            return
        name, index = place
        if index is None:
            self.variables.set_text(name, str(value))
        else:
            self.variables.set_element(name, index, str(value))

    def apply(self, sign: str, left: int, right: int) -> int:
        if not self.runs:
            return 0
        if sign in ("/", "%") and right == 0:
            raise self.wrong("divides by 0")
        if sign == "**" and not 0 <= right < 64 * 64:
            raise self.wrong("has a negative or huge exponent")
        return _wrapped(_OPERATIONS[sign](left, right))


def _divided(left: int, right: int) -> int:
    """The shell's, which cuts towards 0."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divided,
    "%": lambda a, b: a - b * _divided(a, b),
    "**": lambda a, b: pow(a, b, 1 << 64),
    "<<": lambda a, b: a << (b & 63),
    ">>": lambda a, b: a >> (b & 63),
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&&": lambda a, b: int(a != 0 and b != 0),
    "||": lambda a, b: int(a != 0 or b != 0),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
}


def _wrapped(value: int) -> int:
    """As 64 bits hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _in_base(base: str, digits: str) -> int:
    number, size = 0, int(base)
    if not 2 <= size <= 64:
        raise ValueError(base)
    for digit in digits:
        order = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
        value = order.index(digit.lower() if size <= 36 else digit)
        if value >= size:
            raise ValueError(digits)
        number = number * size + value
    return number
