"""Programs, run against the tests of their task in a sandbox of their own.

The program is the last block of Python in the response, behind `</think>`. The reward is 1 when it passes all tests,
else 0; with `metadata.code_reward = "share"` it is the share of tests that it passes. `metadata.time_limit` is a test's
processor time in seconds. Expected results are never where the program is: it is given what its functions are called
with, and answers plain data, which is compared here or in a second sandbox. A sandbox that does not start is an error
and no reward.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.hooks.kit.sandbox import Limits, Program, ProgramEnded, Ran, open_python, run_python
from headrace.score import ScoreItem
from services.reward.scorers.code_program import imports_for, program_of
from services.reward.scorers.code_tests import (
    TESTED,
    CallTest,
    CodeTests,
    StdinTest,
    Test,
    TruthTest,
    ValueTest,
    tests_of,
)
from services.reward.scorers.code_values import ENCODER, encoded, same_json, same_output, same_value, value_of

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
    return "\n".join([imports_for("\n".join(parts)), *runs])


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
            case CallTest(function, arguments, expected):
                request = {"function": function, "arguments": [encoded(each) for each in arguments]}
                return same_json(value_of((await tested.ask(request))["value"]), expected)
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


async def _run(program: str, stdin: str, seconds: float) -> Ran:
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
