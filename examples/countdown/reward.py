"""The reward of an expression: 1 if it uses each number once and makes the target, 0 for all else."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node, used):
    """The value of an expression of whole numbers, which are noted in `used`. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left, used), value(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")


async def reward(args, sample, **kwargs):
    used = []
    try:
        made = value(ast.parse(sample.response.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError):
        return 0.0
    return float(made == int(sample.label) and sorted(used) == sorted(sample.metadata["numbers"]))
