"""Layer frequencies, as Megatron writes them: "N", or a list with a 0 or 1 for each layer."""

import ast
from collections.abc import Callable
from typing import Any

from program.errors import UserError


def per_block(freq: str, num_layers: int, every_nth: Callable[[int, int], bool]) -> tuple[bool, ...]:
    """A frequency for each block. every_nth: what a plain number N means for block ``number``, counted from 0.

    Raises UserError for what is neither a whole number nor a list of num_layers zeros and ones.
    """
    value = parse_freq(freq)
    if isinstance(value, int):
        return tuple(every_nth(number, value) for number in range(num_layers))
    if len(value) != num_layers:
        raise UserError(f'"{freq}" has {len(value)} entries for model.num_layers {num_layers}.')
    return tuple(bool(entry) for entry in value)


def parse_freq(freq: str) -> int | list[int]:
    """``"2"`` -> 2; ``"[0]*3+[1]*58"`` -> a list: lists of 0 and 1, with + and * and brackets, as Megatron has it.

    Raises UserError for anything else; nothing is evaluated.
    """
    try:
        value = _freq_value(ast.parse(freq.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        value = None
    if value is None or (isinstance(value, list) and (not set(value) <= {0, 1})) or (value == []):
        raise UserError(
            f'"{freq}" is no layer frequency. Use a whole number such as "2", or zeros and ones: "[0]*3+[1]*5".'
        )
    return value


def _freq_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 10_000:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_freq_value(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _freq_value(node.left), _freq_value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            return left * right
    raise ValueError
