"""calc(expression): whole-number and decimal arithmetic, and nothing else that Python's syntax could say."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
MAX_NODES = 120
MAX_VALUE = 10**12

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
}


def calculate(expression: str) -> int | float:
    """The value of an expression of numbers, + - * / // and parentheses: an int where it is whole, else a float.

    Raises ValueError in words for anything else, for more than 200 characters, for a division by zero, and for a value
    beyond 10^12 on the way.
    """
    if not isinstance(expression, str) or not expression.strip():
        raise ValueError("calc(expression): the expression is empty")
    if len(expression) > MAX_CHARS:
        raise ValueError(f"calc(expression): {len(expression)} characters, at most {MAX_CHARS} are allowed")
    if not expression.isascii():
        raise ValueError("calc(expression): only digits, + - * / // . and parentheses are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"calc(expression): {expression.strip()!r} is not an expression") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError("calc(expression): too many operations")
    value = _value(tree.body)
    return int(value) if value.denominator == 1 else float(value)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)) if abs(number) <= MAX_VALUE else Fraction(MAX_VALUE + 1))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            a, b = _value(left), _value(right)
            if b == 0 and isinstance(op, ast.Div | ast.FloorDiv):
                raise ValueError("calc(expression): division by zero")
            return _bounded(_OPERATIONS[type(op)](a, b))
    raise ValueError("calc(expression): only numbers, + - * / // and parentheses are allowed")


def _bounded(value: Fraction) -> Fraction:
    if abs(value) > MAX_VALUE or value.denominator > MAX_VALUE:
        raise ValueError("calc(expression): the numbers are too large")
    return value
