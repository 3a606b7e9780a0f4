"""An environment with a tool: the model may write `calc: 12*7` and reads the value before it answers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from nereus import Observation, Task

CALL = "calc:"
LONGEST = 100
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """Answers every `calc:` line; anything else is the final answer, worth 1 when right.

    `cost` is taken off for every use of the tool.
    """

    def __init__(self, cost: float = 0.0) -> None:
        self._cost = cost

    def reset(self, task: Task) -> None:
        self._answer = task.answer.strip()

    def step(self, response: str) -> Observation:
        _, call, expression = response.rpartition(CALL)
        if not call:
            return Observation(reward=float(response.strip().removesuffix(".") == self._answer), done=True)
        return Observation(calculated(expression.strip()), reward=-self._cost)


def calculated(expression: str) -> str:
    """The value of an expression of numbers and + - * / // %, or what is wrong with it."""
    if len(expression) > LONGEST:
        return f"error: more than {LONGEST} characters"
    try:
        return f"{value(ast.parse(expression, mode='eval').body):.12g}"
    except (ValueError, SyntaxError, ArithmeticError) as wrong:
        return f"error: {wrong}"


def value(node: ast.expr) -> float:
    """Of a parsed expression; no names, no calls, no powers, so it is small work whatever the model writes."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError("only numbers and + - * / // %")
