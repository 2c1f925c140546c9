"""Whole-number arithmetic in name maps: `heads * head`, `layers + 1`. Python's parser reads it; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping

_LONGEST = 200
_LARGEST = 2**48  # more elements than any dim has


def evaluate(text: str | int, constants: Mapping[str, int]) -> int:
    """Evaluate an expression of numbers, constants, `+`, `-`, `*`, `//` and brackets.

    Raises:
        ValueError: anything else, a constant that is not defined, or a value out of range.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ValueError(f"{str(text)[:_LONGEST]!r}: expected a number or an expression")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no expression of numbers") from None
    return _value(tree.body, constants, text)


def _value(node: ast.expr, constants: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            result = number
        case ast.Name(id=name):
            if name not in constants:
                known = ", ".join(constants) or "none"
                raise ValueError(f"{text!r}: {name!r} is not among the constants ({known})")
            result = constants[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand, constants, text)
        case ast.BinOp(left=left, op=operator, right=right):
            result = _apply(operator, _value(left, constants, text), _value(right, constants, text), text)
        case _:
            raise ValueError(f"{text!r}: only numbers, constants, +, -, *, // and brackets are understood")
    if abs(result) > _LARGEST:
        raise ValueError(f"{text!r} is out of range")
    return result


def _apply(operator: ast.operator, left: int, right: int, text: str) -> int:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv() if right > 0 and left % right == 0:
            return left // right
        case ast.FloorDiv():
            raise ValueError(f"{text!r}: {left} is not divisible by {right}")
        case _:
            raise ValueError(f"{text!r}: only numbers, constants, +, -, *, // and brackets are understood")
