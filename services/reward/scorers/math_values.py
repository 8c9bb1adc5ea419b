"""Finds expressions whose value is too large to write down: a library that evaluates them would not end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from latex2sympy2_extended.logic import And as Chain
from sympy import (
    Abs,
    Add,
    Basic,
    Derivative,
    E,
    Expr,
    FiniteSet,
    Float,
    I,
    Integral,
    Interval,
    Limit,
    MatrixBase,
    Mul,
    Pow,
    Product,
    Rational,
    Sum,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    ceiling,
    exp,
    factorial,
    floor,
)
from sympy.core.function import AppliedUndef
from sympy.core.numbers import Exp1, ImaginaryUnit, NumberSymbol
from sympy.core.relational import Eq, Relational

from services.reward.scorers import math_numbers

# Compares parsed mathematics by value: rational numbers exactly, others with as many digits as their parts need.
# math-verify compares with 15 digits and takes whatever is below 1e-15 for 0. Here the number of digits follows from
# the expression: `(2/3)^100` and `(2/3)^99` differ. Expressions with variables are compared at rational points.

# Values that need more digits are not compared: their evaluation could hold a worker for seconds.
_MOST_DIGITS = 8_000
_MOST_EXACT_DIGITS = 60_000
_USUAL_DIGITS = 15
_SPARE_DIGITS = 40
_MOST_VARIABLES = 8
_CALCULUS = (Sum, Product, Integral, Limit, Derivative)
_POINTS = (
    (Fraction(37, 61), Fraction(101, 53), Fraction(23, 89), Fraction(151, 47)),
    (Fraction(17, 71), Fraction(29, 83), Fraction(31, 43), Fraction(5, 97)),
    (Fraction(193, 31), Fraction(67, 59), Fraction(271, 37), Fraction(109, 73)),
    (Fraction(20011, 13), Fraction(30011, 17), Fraction(10007, 19), Fraction(40009, 23)),
    (Fraction(-41, 67), Fraction(-113, 43), Fraction(-13, 79), Fraction(-139, 53)),
    (Fraction(-211, 29), Fraction(-71, 61), Fraction(-281, 41), Fraction(-127, 83)),
    (Fraction(47, 59), Fraction(-103, 71), Fraction(97, 41), Fraction(-19, 67)),
    (Fraction(-83, 73), Fraction(61, 89), Fraction(-43, 101), Fraction(179, 97)),
)
_ENOUGH_POINTS = 3
_LARGEST_POINT = 5.0  # digits


def with_constants(parsed: Any) -> Any:
    """Reads `i` as the imaginary unit and `e` as Euler's number, and gives each variable one meaning (a real one)."""
    if not isinstance(parsed, Basic | MatrixBase):
        return parsed
    bound = {symbol.name for part in parsed.atoms(*_CALCULUS) for symbol in getattr(part, "bound_symbols", ())}
    meanings = {symbol: _meaning(symbol, symbol.name in bound) for symbol in parsed.atoms(Symbol)}
    changed = {symbol: meaning for symbol, meaning in meanings.items() if symbol != meaning}
    return _replaced(parsed, changed) if changed else parsed


def _replaced(parsed: Any, changed: dict[Symbol, Expr]) -> Any:
    """Replaces symbols, and evaluates no relation: sympy would make True or False of some."""
    if isinstance(parsed, Chain):
        return Chain(*(_replaced(part, changed) for part in parsed._unsorted_args))
    if isinstance(parsed, Relational):
        return parsed.func(*(_replaced(part, changed) for part in parsed.args), evaluate=False)
    if isinstance(parsed, FiniteSet | Tuple):
        return type(parsed)(*(_replaced(part, changed) for part in getattr(parsed, "_unsorted_args", parsed.args)))
    return parsed.xreplace(changed)


def _meaning(symbol: Symbol, is_bound: bool) -> Expr:
    if symbol.name in ("i", "imath") and not is_bound:
        return I
    return E if symbol.name == "e" and not is_bound else Symbol(symbol.name, real=True)


def precision(parsed: Sequence[Any]) -> int | None:
    """Returns the digits that a comparison of the expressions needs; None where they are too many.

    Decimals are rounded, so that more than the usual digits would tell them from the fractions that they stand for.
    """
    expressions = [part for part in parsed if isinstance(part, Basic | MatrixBase)]
    needed = sum(_size(expression) for expression in expressions)
    if needed > _MOST_DIGITS:
        return None
    return _USUAL_DIGITS if any(part.has(Float) for part in expressions) else _SPARE_DIGITS + math.ceil(needed)


def _size(expression: Any) -> float:
    """Returns a bound of the digits that an exact value of the expression needs; inf where there is none."""
    try:
        return _digits(expression)
    except (OverflowError, ValueError, TypeError, RecursionError):
        return math.inf


def _digits(expression: Any) -> float:
    if isinstance(expression, MatrixBase):
        return sum((_digits(part) for part in expression.flat()), 1.0)
    if isinstance(expression, Float):
        return 20 + abs(math.log10(abs(float(expression)) or 1))
    if isinstance(expression, Rational):
        return math.log10(max(abs(int(expression.p)), 1)) + math.log10(int(expression.q))
    if isinstance(expression, Symbol):
        return _LARGEST_POINT
    if isinstance(expression, Pow | exp):
        base, exponent = expression.as_base_exp()
        return max(1.0, _magnitude(exponent) * max(_digits(base), 0.3)) + _digits(exponent)
    if isinstance(expression, factorial):
        size = _magnitude(expression.args[0])
        return size * math.log10(size + 2) + _digits(expression.args[0])
    return sum((_digits(part) for part in expression.args), 1.0)


def _magnitude(expression: Basic) -> float:
    """Returns about the absolute value of an exponent; a variable counts as a value of the first points."""
    if isinstance(expression, Rational | Float):
        return abs(float(expression))
    if isinstance(expression, Symbol):
        return 4.0
    if isinstance(expression, NumberSymbol | ImaginaryUnit | Exp1):
        return 4.0
    sizes = [_magnitude(part) for part in expression.args]
    if isinstance(expression, Add):
        return sum(sizes)
    if isinstance(expression, Pow):
        return math.inf if sizes[0] > 1 and sizes[1] * math.log10(sizes[0]) > 15 else max(sizes[0] ** sizes[1], 1.0)
    if isinstance(expression, factorial):
        return math.inf if sizes[0] > 20 else math.gamma(sizes[0] + 1)
    return math.prod(max(size, 1.0) for size in sizes)


def is_same(one: Any, other: Any) -> bool | None:
    """Returns None where the values do not tell: math-verify then compares, or nobody."""
    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        return one.shape == other.shape and _all_same(list(one.flat()), list(other.flat()))
    if isinstance(one, Tuple) and isinstance(other, Tuple):
        return len(one) == len(other) and _all_same(list(one), list(other))
    if isinstance(one, FiniteSet) and isinstance(other, FiniteSet):
        return _same_members(list(one.args), list(other.args))
    if isinstance(one, Interval) and isinstance(other, Interval):
        if (one.left_open, one.right_open) != (other.left_open, other.right_open):
            return False
        return _all_same([one.start, one.end], [other.start, other.end])
    if isinstance(one, Eq) and isinstance(other, Eq):
        return _same_equation(one, other)
    if isinstance(one, Eq) and isinstance(one.lhs, Symbol) and not isinstance(other, Relational):
        return is_same(one.rhs, other)
    if isinstance(other, Eq) and isinstance(other.lhs, Symbol | AppliedUndef) and not isinstance(one, Relational):
        return is_same(one, other.rhs)
    if isinstance(one, Expr) and isinstance(other, Expr) and _is_plain(one) and _is_plain(other):
        return True if one == other and one.is_finite is not None else _same_value(one, other)
    return None


def _same_equation(one: Eq, other: Eq) -> bool | None:
    """True when both sides are the same, in any order; None for all else: the solutions may be the same."""
    parts = (one.lhs, one.rhs, other.lhs, other.rhs)
    if not all(isinstance(part, Expr) and _is_plain(part) for part in parts):
        return None
    for left, right in ((other.lhs, other.rhs), (other.rhs, other.lhs)):
        if is_same(one.lhs, left) is True and is_same(one.rhs, right) is True:
            return True
    return None


def _all_same(one: Sequence[Any], other: Sequence[Any]) -> bool | None:
    results = [is_same(left, right) for left, right in zip(one, other, strict=True)]
    if any(result is False for result in results):
        return False
    return None if None in results else True


def _same_members(one: list[Any], other: list[Any]) -> bool | None:
    if len(one) != len(other):
        return None
    left = list(other)
    for member in one:
        results = [is_same(member, candidate) for candidate in left]
        if None in results:
            return None
        if True not in results:
            return False
        del left[results.index(True)]
    return True


def _is_plain(expression: Expr) -> bool:
    """True for an expression without percent signs, calculus and functions that have no value."""
    return not expression.has(UnevaluatedExpr, AppliedUndef, *_CALCULUS)


def _same_value(one: Expr, other: Expr) -> bool | None:
    if any(isinstance(part, Symbol) and len(part.name) > 1 for part in (one, other)):
        return None
    needed = _size(one) + _size(other)
    if needed > _MOST_EXACT_DIGITS:
        return False
    left, right = fraction(one), fraction(other)
    if left is not None and right is not None:
        return math_numbers.is_same(_number(one, left), _number(other, right))
    if needed > _MOST_DIGITS:
        return False
    digits = _SPARE_DIGITS + math.ceil(needed)
    for decimal, exact, value in ((one, other, left), (other, one, right)):
        if isinstance(decimal, Float) and value is not None and not exact.free_symbols and not exact.has(Float):
            constant = approximated(exact)
            return constant is not None and math_numbers.is_same(_number(decimal, value), math_numbers.Number(constant))
    one, other = (_with_exact_decimals(part) for part in (one, other))
    variables = sorted(one.free_symbols | other.free_symbols, key=str)
    if not variables:
        return _same_constants(one, other, digits)
    if len(variables) > _MOST_VARIABLES:
        return None
    return _same_at_points(one, other, variables, digits, is_complex=one.has(I) or other.has(I))


def approximated(expression: Any) -> Fraction | None:
    """Returns the value of a real constant to forty digits; None for all else."""
    if not isinstance(expression, Expr) or expression.free_symbols or not _is_plain(expression):
        return None
    if _size(expression) > _MOST_DIGITS:
        return None
    if (exact := fraction(expression)) is not None:
        return exact
    value = _value(expression, {}, _SPARE_DIGITS)
    return Fraction(str(value)) if value is not None and value.is_real else None


def _number(expression: Expr, value: Fraction) -> math_numbers.Number:
    """A decimal of six digits or more may be cut off or rounded; all else is exact."""
    if not isinstance(expression, Float) or (parsed := math_numbers.number(str(expression).rstrip("0"))) is None:
        return math_numbers.Number(value)
    return math_numbers.Number(value, parsed.last_digit)


def _with_exact_decimals(expression: Expr) -> Expr:
    decimals = {part: Rational(str(part)) for part in expression.atoms(Float)}
    return expression.xreplace(decimals) if decimals else expression


def _same_constants(one: Expr, other: Expr, precision: int) -> bool | None:
    left, right = _value(one, {}, precision), _value(other, {}, precision)
    return None if left is None or right is None else _is_near(left, right, precision)


def _same_at_points(
    one: Expr, other: Expr, variables: Sequence[Symbol], precision: int, *, is_complex: bool
) -> bool | None:
    """Compares real functions where one of them at least is real, and complex ones everywhere."""
    real = other_points = 0
    for point in _points(variables):
        left, right = _value(one, point, precision), _value(other, point, precision)
        if left is None or right is None:
            continue
        near = _is_near(left, right, precision)
        if left.is_real or right.is_real or is_complex:
            if not near:
                return False
            real += 1
        elif near:
            other_points += 1
        else:
            other_points -= len(_POINTS)
    return True if real >= _ENOUGH_POINTS or other_points >= _ENOUGH_POINTS else None


def _points(variables: Sequence[Symbol]) -> Iterator[dict[Symbol, Rational]]:
    for row in _POINTS:
        spread = (row[number % len(row)] + Fraction(number // len(row), 7) for number in range(len(variables)))
        yield {
            variable: Rational(value.numerator, value.denominator)
            for variable, value in zip(variables, spread, strict=True)
        }


def _value(expression: Expr, point: dict[Symbol, Rational], precision: int) -> Expr | None:
    """Returns a finite number, real where its imaginary part is rounding; None where there is none."""
    try:
        value = expression.evalf(precision, subs=point, maxn=2 * precision)
        real, imaginary = value.as_real_imag()
    except Exception:  # noqa: BLE001 - sympy raises what it likes
        return None
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    return real if abs(imaginary) <= _noise(abs(real), precision) else value


def _is_near(one: Expr, other: Expr, precision: int) -> bool:
    return bool(abs(one - other) <= _noise(abs(one) + abs(other), precision))


def _noise(size: Expr, precision: int) -> Expr:
    return Float(10, precision) ** (10 - precision) * (1 + size)


def fraction(expression: Basic) -> Fraction | None:
    """Returns the exact value of a rational number that is not evaluated yet; decimals are taken as written."""
    if isinstance(expression, Float):
        return Fraction(str(expression)) if expression.is_finite else None
    if isinstance(expression, Rational):
        return Fraction(int(expression.p), int(expression.q))
    if isinstance(expression, Add | Mul | Pow | factorial | Abs | floor | ceiling):
        parts = [fraction(part) for part in expression.args]
        exact = [part for part in parts if part is not None]
        return _combined(expression, exact) if len(exact) == len(parts) else None
    return None


def _combined(expression: Basic, parts: Sequence[Fraction]) -> Fraction | None:
    match expression:
        case Add():
            return sum(parts, Fraction(0))
        case Mul():
            return math.prod(parts, start=Fraction(1))
        case Pow():
            base, exponent = parts
            if exponent.denominator != 1 or (base == 0 and exponent <= 0):
                return None
            return base ** int(exponent)
        case factorial():
            return Fraction(math.factorial(int(parts[0]))) if parts[0].denominator == 1 and parts[0] >= 0 else None
        case Abs():
            return abs(parts[0])
        case floor():
            return Fraction(math.floor(parts[0]))
        case _:
            return Fraction(math.ceil(parts[0]))


_MOST_CHARACTERS = 2000
_MOST_DEPTH = 30
_MOST_EXPONENT = 10_000
_OPEN = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_POWER = r"\s*(?:\^|\*\*)\s*"
_TOWER = re.compile(rf"\d[)}}\s]*{_POWER}[{{(]*\s*(\d+)[)}}\s]*{_POWER}[{{(]*\s*(\d+)")
_EXPONENT = re.compile(rf"{_POWER}[{{(]*\s*[-+]?\s*(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*!|[({]([^()a-zA-Z]*[\^!*\d][^()a-zA-Z]*)[)}]+\s*!")


def is_too_large(text: str) -> bool:
    """True for a normalized text that is long, deep, or has a power or factorial with too many digits."""
    if len(text) > _MOST_CHARACTERS or _depth(text) > _MOST_DEPTH:
        return True
    if any(_integer(match[1]) > _MOST_EXPONENT for match in _EXPONENT.finditer(text)):
        return True
    if any(_is_large_factorial(match) for match in _FACTORIAL.finditer(text)):
        return True
    return any(_integer(match[1]) ** min(_integer(match[2]), 64) > _MOST_EXPONENT for match in _TOWER.finditer(text))


def _is_large_factorial(match: re.Match[str]) -> bool:
    operand = match[1] or match[2]
    return _integer(operand) > _MOST_EXPONENT if operand.isdecimal() else bool(re.search(r"\d{5}|[\^!*]", operand))


def _depth(text: str) -> int:
    depth = most = 0
    for character in text:
        depth += _OPEN.get(character, 0)
        most = max(most, depth)
    return most


def _integer(digits: str) -> int:
    return int(digits[:9])
