"""Programs, run against the tests of their task in a sandbox of their own.

The program is the last block of Python in the response, behind `</think>`. The reward is 1 when it passes all tests,
else 0; with `metadata.code_reward = "share"` it is the share of tests that it passes. `metadata.time_limit` is a test's
processor time in seconds. Expected results are never where the program is: it is given what its functions are called
with, and answers plain data, which is compared here or in a second sandbox. A sandbox that does not start is an error
and no reward.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from fractions import Fraction
from typing import Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.hooks.kit.sandbox import Limits, Program, ProgramEnded, SandboxResult, open_python, run_python
from headrace.score import ScoreItem
from services.reward.scorers.code_tests import (
    TESTED,
    CallTest,
    CodeTests,
    StdinTest,
    Test,
    TruthTest,
    ValueTest,
    imports_for,
    program_of,
    tests_of,
)

# Values of a tested program as JSON, with a name for each type that JSON lacks; and how results are compared.
# Results are data of a program that may be hostile: no number of it becomes a key of a set or a dict here, because
# numbers whose hashes collide cost quadratic time.
#
# Floating-point numbers are compared as APPS and TACO do: they may differ by 1e-8 + 1e-5 × the expected one. Whole
# numbers are compared exactly.

ENCODER = """
def _plain(value):
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": repr(complex(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_plain(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if (type(value).__module__, type(value).__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {type(value).__name__: str(value)}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(each) for each in value]

def _given(plain):
    if isinstance(plain, list):
        return [_given(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "tuple":
        return tuple(_given(each) for each in held)
    if kind == "set":
        return {_hashable(_given(each)) for each in held}
    if kind == "dict":
        return {_hashable(_given(key)): _given(each) for key, each in held}
    if kind == "int":
        return int(held, 16)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind in ("Decimal", "Fraction"):
        import decimal, fractions
        return getattr(decimal if kind == "Decimal" else fractions, kind)(held)
    return {"float": float, "complex": complex}[kind](held)

def _hashable(value):
    if isinstance(value, tuple):
        return tuple(_hashable(each) for each in value)
    return frozenset(value) if isinstance(value, set) else value
"""
"""Runs in sandboxes, and so without headrace."""

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_BESIDE_WHOLE = Fraction(1, 10**6)
"""What a floating-point number may differ by from a whole one."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")
_QUOTIENT = re.compile(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?")
_BRACKETS = "[](){},;"
_MOST_EXPONENT = 400


@dataclass(frozen=True, slots=True)
class Bag:
    """A set's values, some perhaps twice."""

    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict's items, some keys perhaps twice."""

    items: Sequence[tuple[Any, Any]]


def decoded(text: str) -> Any:
    """Reads what `_plain` has written. Raises ValueError, RecursionError or TypeError for anything else."""
    return value_of(json.loads(text))


def value_of(plain: Any) -> Any:
    """The same for JSON that has been read. A set is a Bag, a dict is Pairs."""
    match plain:
        case None | bool() | str():
            return plain
        case list():
            return [value_of(each) for each in plain]
        case {"tuple": list(items)}:
            return tuple(value_of(each) for each in items)
        case {"set": list(items)}:
            return Bag([value_of(each) for each in items])
        case {"dict": list(items)}:
            return Pairs([(value_of(key), value_of(each)) for key, each in items])
        case dict() if len(plain) == 1:
            ((kind, text),) = plain.items()
            if isinstance(text, str):
                return _scalar(kind, text)
    raise ValueError(f"{plain!r:.80} is no value")


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "int":
            return int(text, 16)
        case "float":
            return float(text)
        case "complex":
            return complex(text)
        case "bytes":
            return bytes.fromhex(text)
        case "Decimal":
            number = Decimal(text)
            if number.is_finite() and abs(number.adjusted()) > _MOST_EXPONENT:
                raise ValueError(f"{text:.40} is too large or too small a number")
            return int(number) if number.is_finite() and number == number.to_integral_value() else float(number)
        case "Fraction" if _QUOTIENT.fullmatch(text):
            quotient = Fraction(text)
            return int(quotient) if quotient.denominator == 1 else float(quotient)
    raise ValueError(f"{kind[:40]} is no type of a value")


def encoded(value: Any) -> Any:
    """The same for arguments, which are values of JSON or of Python's literals."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return {"int": hex(value)}
        case float():
            return {"float": repr(value)}
        case list():
            return [encoded(each) for each in value]
        case dict():
            return {"dict": [[encoded(key), encoded(each)] for key, each in value.items()]}
    raise InvalidArgument(f"scorer code: an argument is a {type(value).__name__}")


def same_json(result: Any, expected: Any, *, is_wrapped: bool) -> bool:
    """Compares as data sets in JSON do: tuples are lists, keys are text, and one result may stand alone in a list."""
    found = _listed(result)
    if same_value(found, expected):
        return True
    return is_wrapped and isinstance(expected, list) and len(expected) == 1 and same_value(found, expected[0])


def _listed(value: Any) -> Any:
    match value:
        case list() | tuple():
            return [_listed(each) for each in value]
        case Pairs(items):
            return Pairs([(str(key) if isinstance(key, int | float) else key, _listed(each)) for key, each in items])
        case Bag(values):
            return Bag([_listed(each) for each in values])
    return value


def same_value(found: Any, expected: Any) -> bool:
    """Compares a decoded value with a value of Python, as `==` does but for floating-point numbers."""
    match expected:
        case bool() | int() | float() | complex():
            return isinstance(found, int | float | complex) and same_number(found, expected)
        case list() | tuple():
            return (
                isinstance(found, list if isinstance(expected, list) else tuple)
                and len(found) == len(expected)
                and all(map(same_value, found, expected))
            )
        case set() | frozenset():
            return isinstance(found, Bag) and _same_set(found.values, list(expected))
        case dict():
            if not isinstance(found, Pairs):
                return False
            ours, theirs = (
                {_key(key): value for key, value in items} for items in (found.items, list(expected.items()))
            )
            return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key]) for key in ours)
    return type(found) is type(expected) and bool(found == expected)


def _same_set(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    if {_key(value) for value in found} == {_key(value) for value in expected}:
        return True
    if not all(isinstance(value, int | float) for value in (*found, *expected)) or len(found) != len(expected):
        return False
    return all(map(same_number, sorted(found), sorted(expected)))


def _key(value: Any) -> str:
    """A text that two values share when they are equal: the hashes of texts cannot be chosen."""
    match value:
        case bool() | int():
            return hex(value)
        case float():
            return hex(int(value)) if value.is_integer() else repr(value)
        case list() | tuple():
            return f"{type(value).__name__}({','.join(map(_key, value))})"
        case Bag(values):
            return f"set({','.join(sorted({_key(each) for each in values}))})"
        case set() | frozenset():
            return _key(Bag(list(value)))
        case Pairs(items):
            return f"dict({','.join(sorted(f'{_key(key)}:{_key(each)}' for key, each in items))})"
    return f"{type(value).__name__} {value!r}"


def same_number(found: complex, expected: complex) -> bool:
    """Compares two whole numbers exactly, others with a tolerance. A number that is none equals another such."""
    if found == expected:
        return True
    if isinstance(found, complex) or isinstance(expected, complex):
        found, expected = complex(found), complex(expected)
        return same_number(found.real, expected.real) and same_number(found.imag, expected.imag)
    if isinstance(found, int) and isinstance(expected, int):
        return False
    if not (_is_finite(found) and _is_finite(expected)):
        return found != found and expected != expected
    if isinstance(found, int) or isinstance(expected, int):
        # A whole number that no float has is compared with the float that is nearest to it.
        if isinstance(expected, float) and abs(expected) >= 1 << 53:
            return abs(found) < 1 << 1023 and float(found) == expected
        return abs(Fraction(found) - Fraction(expected)) <= _BESIDE_WHOLE
    return abs(found - expected) <= _ABSOLUTE + _RELATIVE * abs(expected)


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)


def same_output(written: str, expected: str) -> bool:
    """Compares line by line without surrounding blanks; words that are numbers are compared as numbers."""
    found, wanted = _rows(written), _rows(expected)
    return len(found) == len(wanted) and all(map(_same_row, found, wanted))


def _rows(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_row(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    left, right = found.split(), wanted.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    ours, theirs = found.strip(_BRACKETS), wanted.strip(_BRACKETS)
    if not ours or not theirs or found.split(ours, 1) != wanted.split(theirs, 1):
        return False
    if not (_REAL.fullmatch(ours) and _REAL.fullmatch(theirs)):
        return False
    try:
        if Decimal(ours) == Decimal(theirs):
            return True
        whole = [_INTEGER.fullmatch(word) is not None for word in (ours, theirs)]
        if not any(whole):
            return same_number(float(ours), float(theirs))
        return not all(whole) and abs(Decimal(ours) - Decimal(theirs)) <= Decimal("1e-6")
    except DecimalException:
        return False


_SECONDS = 4.0
_MOST_SECONDS = 10.0
_WALL_PER_CPU = 2.0
"""On a busy machine a test still gets its processor time."""
_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 1 << 20
_MOST_PROGRAM_BYTES = 256 << 10
_MOST_TIMEOUTS = 1
_OUT_OF_TIME = (None, -signal.SIGKILL, 128 + signal.SIGKILL)
"""The second and third by its processor time, without bubblewrap and with it."""
_SERVER = (
    ENCODER
    + """
import json, os, sys
_in = os.fdopen(os.dup(0))
_out = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(0, 1)
_order = json.loads(_in.readline())
def _tell(message):
    _out.write(json.dumps(message) + "\\n")
    _out.flush()
def _run(source, names):
    exec(compile(source, "program.py", "exec", dont_inherit=True), names)
def _set_up(names):
    try:
        _run(_order["setup"], names)
    except Exception:
        return False
    return True
"""
)
"""Answers a line of JSON with another one. What the program prints goes nowhere, and it has nothing to read."""
_RUNNER = (
    _SERVER
    + """
import types
_module = types.ModuleType("program")
sys.modules["program"] = _module
_names = vars(_module)
_run(_order["imports"], _names)
_is_set_up = _set_up(_names)
try:
    _run(_order["program"], _names)
except SystemExit:
    pass
if not _is_set_up:
    _set_up(_names)
def _value(request):
    if "expression" in request:
        value = eval(request["expression"], {**_names, **_given(request["variables"])})
    else:
        value = _names.get(request["function"])
        if value is None:
            value = getattr(_names["Solution"](), request["function"])
    if "arguments" in request:
        value = value(*_given(request["arguments"]), **_given(request.get("keywords", {"dict": []})))
    elif callable(value):
        return {"function": True}
    return {"value": _plain(value)}
for _line in _in:
    try:
        _answer = _value(json.loads(_line))
    except Exception:
        _answer = {}
    _tell(_answer)
"""
)
_CHECKER = (
    _SERVER
    + f"""
def {TESTED}(part, variables, **more):
    _tell({{"part": part, "variables": _plain(variables), **more}})
    answer = json.loads(_in.readline())
    if "function" in answer:
        return lambda *arguments, **keywords: {TESTED}(
            part, variables, arguments=_plain(list(arguments)), keywords=_plain(keywords)
        )
    return _given(answer["value"])
_names = {{"__name__": "checker"}}
_run(_order["imports"], _names)
_set_up(_names)
_names["{TESTED}"] = {TESTED}
for _line in _in:
    try:
        _is_true = bool(eval(json.loads(_line), _names))
    except Exception:
        _is_true = False
    _tell({{"is_true": _is_true}})
"""
)
"""Computes assertions where nothing of the program is: it asks for the values of the program's parts."""


async def score(item: ScoreItem) -> float:
    """Raises InvalidArgument for tests that cannot be read, Unavailable when no sandbox starts."""
    tests = tests_of(item)
    share, seconds = _shares(item), _seconds(item)
    program = program_of(item.response)
    if program is None or len(program.encode(errors="replace")) > _MOST_PROGRAM_BYTES:
        return 0.0
    passed = await _passed(program, tests, seconds, all_or_nothing=not share)
    return passed / len(tests.tests) if share else float(passed == len(tests.tests))


async def _passed(program: str, tests: CodeTests, seconds: float, *, all_or_nothing: bool) -> int:
    """Counts tests that pass; stops where the rest cannot change the reward, or the program does not end."""
    of_stdin = [test for test in tests.tests if isinstance(test, StdinTest)]
    others = [test for test in tests.tests if not isinstance(test, StdinTest)]
    passed = await _called(program, tests.setup, others, seconds, all_or_nothing) if others else 0
    if all_or_nothing and passed < len(others):
        return 0
    timeouts, script = 0, _script(program, tests.setup) if of_stdin else ""
    for test in of_stdin:
        ran = await _run(script, test.given, seconds)
        right = ran.exit_code == 0 and same_output(ran.output, test.expected)
        timeouts += ran.exit_code in _OUT_OF_TIME
        passed += right
        if (all_or_nothing and not right) or timeouts > _MOST_TIMEOUTS:
            break
    return passed


def _script(program: str, setup: str) -> str:
    """The program with what stands in front of it; it may begin with imports from `__future__`."""
    parts = (setup, program) if setup.strip() else (program,)
    in_hex = [part.encode(errors="replace").hex() for part in parts]
    runs = [f"exec(compile(bytes.fromhex('{each}'), 'program.py', 'exec', dont_inherit=True))" for each in in_hex]
    ends = [f"try:\n    {runs[-1]}\nexcept SystemExit:\n    pass"]  # as data sets' checkers do, whatever its status is
    return "\n".join([imports_for("\n".join(parts)), *runs[:-1], *ends])


async def _called(program: str, setup: str, tests: Sequence[Test], seconds: float, all_or_nothing: bool) -> int:
    """Runs all tests of functions in one process, and computes their assertions in another one."""
    limits = Limits(_WALL_PER_CPU * seconds, seconds, _MEMORY_BYTES, _MOST_CHARACTERS)
    passed = 0
    async with AsyncExitStack() as stack:
        tested = await stack.enter_async_context(open_python(_RUNNER, limits))
        order = {"program": program, "setup": setup, "imports": imports_for(f"{setup}\n{program}")}
        program_of_tests = _Tested(tested, order)
        checker = None
        for test in tests:
            if isinstance(test, TruthTest) and checker is None:
                sources = "\n".join([setup, *(each.expression for each in tests if isinstance(each, TruthTest))])
                of_checker = await stack.enter_async_context(open_python(_CHECKER, limits))
                checker = _Tested(of_checker, {"setup": setup, "imports": imports_for(sources)})
            right = await _is_right(test, program_of_tests, checker)
            passed += right
            if all_or_nothing and not right:
                break
    return passed


class _Tested:
    """A program that answers lines of JSON; the first of them is preceded by its order."""

    def __init__(self, program: Program, order: Mapping[str, Any]) -> None:
        self._program = program
        self._first = json.dumps(order) + "\n"

    async def ask(self, message: object) -> Any:
        """Returns what it answers. Raises ProgramEnded, and ValueError or RecursionError for what is no JSON."""
        first, self._first = self._first, ""
        return json.loads(await self._program.ask(first + json.dumps(message)))


async def _is_right(test: Test, tested: _Tested, checker: _Tested | None) -> bool:
    try:
        match test:
            case CallTest(function, arguments, expected, is_wrapped):
                request = {"function": function, "arguments": [encoded(each) for each in arguments]}
                return same_json(value_of((await tested.ask(request))["value"]), expected, is_wrapped=is_wrapped)
            case ValueTest(expression, expected):
                answer = await tested.ask({"expression": expression, "variables": {"dict": []}})
                return same_value(value_of(answer["value"]), expected)
            case TruthTest(expression, parts):
                assert checker is not None
                said = await checker.ask(expression)
                while "part" in said:
                    said["expression"] = parts[said.pop("part")]
                    said = await checker.ask(await tested.ask(said))
                return said["is_true"] is True
    except (ProgramEnded, ValueError, TypeError, KeyError, ArithmeticError, RecursionError, MemoryError):
        return False  # it ended, raised, or answered no value
    raise InvalidArgument("scorer code: a test of standard input calls no function")


async def _run(program: str, stdin: str, seconds: float) -> SandboxResult:
    ran = await run_python(
        program,
        stdin=stdin,
        seconds=_WALL_PER_CPU * seconds,
        cpu_seconds=seconds,
        with_errors=False,
        memory_bytes=_MEMORY_BYTES,
        max_characters=_MOST_CHARACTERS,
    )
    if not ran.started:
        raise Unavailable(f"scorer code: the sandbox did not start: {ran.output[:200] or 'it said nothing'}")
    return ran


def _shares(item: ScoreItem) -> bool:
    asked = item.metadata.get("code_reward", "all")
    if asked not in ("all", "share"):
        raise InvalidArgument(f'scorer code: metadata.code_reward is {asked!r:.40}: "all" or "share"')
    return bool(asked == "share")


def _seconds(item: ScoreItem) -> float:
    asked = item.metadata.get("time_limit", _SECONDS)
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        raise InvalidArgument(f"scorer code: metadata.time_limit is {asked!r:.40}: seconds, more than 0")
    return min(float(asked), _MOST_SECONDS)
