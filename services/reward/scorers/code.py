"""Programs, run against the tests of their task in a sandbox of their own.

The program is the last block of Python in the response, behind `</think>`. The reward is 1 when it passes all tests,
else 0; with `metadata.code_reward = "share"` it is the share of tests that it passes. `metadata.time_limit` is a test's
processor time in seconds. Expected results stay here: the program sees what a test gives it, and an assertion that
compares with no literal. A sandbox that does not start is an error and no reward.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
from collections.abc import Sequence

from headrace.errors import InvalidArgument, Unavailable
from headrace.hooks.kit.sandbox import Ran, run_python
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking
from services.reward.scorers.code_tests import CallTest, CodeTests, ExpressionTest, StdinTest, Test, tests_of
from services.reward.scorers.code_values import ENCODER, decoded, encoded, same_json, same_output

_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
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
_RUNNER = (
    ENCODER
    + """
import json, os, sys
_order = json.loads(sys.stdin.readline())
_out = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def _given(plain):
    if isinstance(plain, list):
        return [_given(each) for each in plain]
    if isinstance(plain, dict):
        ((kind, held),) = plain.items()
        if kind == "dict":
            return {_given(key): _given(each) for key, each in held}
        return int(held) if kind == "int" else float(held)
    return plain
_names = {"__name__": "__tested__"}
def _function(name):
    found = _names.get(name)
    return getattr(_names["Solution"](), name) if found is None and "Solution" in _names else found
def _answer(each):
    if each["kind"] == "call":
        return _function(each["function"])(*[_given(value) for value in each["arguments"]])
    value = eval(each["expression"], _names)
    return bool(value) if each["kind"] == "truth" else value
exec(compile(_order["program"], "program.py", "exec"), _names)
for _each in _order["tests"]:
    try:
        _said = json.dumps(_plain(_answer(_each)))
    except Exception:
        _said = ""
    _out.write(_order["mark"] + _said + "\\n")
    _out.flush()
"""
)


async def score(item: ScoreItem) -> float:
    """Raises InvalidArgument for tests that cannot be read, Unavailable when no sandbox starts."""
    tests = tests_of(item)
    share, seconds = _shares(item), _seconds(item)
    program = program_of(item.response)
    if program is None or len(program.encode(errors="replace")) > _MOST_PROGRAM_BYTES:
        return 0.0
    program = f"{tests.setup}\n{program}" if tests.setup.strip() else program
    passed = await _passed(program, tests, seconds, all_or_nothing=not share)
    return passed / len(tests.tests) if share else float(passed == len(tests.tests))


def program_of(response: str) -> str | None:
    """Returns the last block of Python behind the reasoning; None without one."""
    blocks = [code for language, code in _BLOCK.findall(after_thinking(response)) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


async def _passed(program: str, tests: CodeTests, seconds: float, *, all_or_nothing: bool) -> int:
    """Counts tests that pass; stops where the rest cannot change the reward, or the program does not end."""
    of_stdin = [test for test in tests.tests if isinstance(test, StdinTest)]
    others = [test for test in tests.tests if not isinstance(test, StdinTest)]
    passed = await _called(program, others, seconds) if others else 0
    if all_or_nothing and passed < len(others):
        return 0
    timeouts = 0
    for test in of_stdin:
        ran = await _run(program, test.given, seconds)
        right = ran.exit_code == 0 and same_output(ran.output, test.expected)
        timeouts += ran.exit_code in _OUT_OF_TIME
        passed += right
        if (all_or_nothing and not right) or timeouts > _MOST_TIMEOUTS:
            break
    return passed


async def _called(program: str, tests: Sequence[Test], seconds: float) -> int:
    """Runs all tests of functions in one process."""
    mark = f"{secrets.token_hex(8)} "
    order = {"program": program, "mark": mark, "tests": [_order(test) for test in tests]}
    ran = await _run(_RUNNER, json.dumps(order) + "\n", seconds)
    said = [line[len(mark) :] for line in ran.output.splitlines() if line.startswith(mark)]
    return sum(_is_right(test, answer) for test, answer in zip(tests, said, strict=False))


def _order(test: Test) -> dict[str, object]:
    match test:
        case CallTest(function, arguments):
            return {"kind": "call", "function": function, "arguments": [encoded(each) for each in arguments]}
        case ExpressionTest(expression, _, is_truth):
            return {"kind": "truth" if is_truth else "value", "expression": expression}
    raise InvalidArgument("scorer code: a test of standard input calls no function")


def _is_right(test: Test, answer: str) -> bool:
    try:
        result = decoded(answer)
        if isinstance(test, CallTest):
            return same_json(result, test.expected)
        return isinstance(test, ExpressionTest) and bool(result == test.expected)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False  # it raised, or answered no value


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
