"""Programs in responses, against the tests of their task: hostile ones, and sandboxes that do not start.

What programs are paid is in test_tables.py.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import FailedPrecondition, InvalidArgument, Unavailable
from headrace.hooks.kit import sandbox
from headrace.process.linux import descendants
from headrace.score import ScoreItem
from services.reward.registry import TooSlow, cpu_limit
from services.reward.scorers import code
from services.reward.scorers.code import same_output
from tests.support.sandboxes import KINDS, choose_sandbox

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
SECRET = 918273645


def item(program: str, tests: object = None, label: str | None = None, **metadata: Any) -> ScoreItem:
    response = f"<think>```python\nprint(0)\n```</think>Here:\n```python\n{program}\n```\nDone."
    metadata |= {} if tests is None else {"tests": tests}
    return ScoreItem("1", "", response, label=label, metadata=metadata)


async def test_a_program_of_more_than_256_kib_gets_0() -> None:
    assert await code.score(item(f"{ADD}#{'#' * (300 << 10)}", CALLS)) == 0.0


@pytest.mark.parametrize(
    ("tests", "metadata", "message"),
    [
        (None, {}, "needs tests in metadata.tests"),
        ("{", {}, "no JSON"),
        ({"inputs": [1], "outputs": []}, {}, "1 inputs have 0 outputs"),
        (["x = 1"], {}, "it is no assertion"),
        ([{"input": "1", "output": "1", "type": "odd"}], {}, "of the type 'odd'"),
        (STDIN, {"code_reward": "most"}, "code_reward is 'most'"),
    ],
)
async def test_tests_that_cannot_be_read_are_an_error_and_no_reward(
    tests: object, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await code.score(item(SUM, tests, **metadata))


async def reward_of(program: str, *tests: str, **metadata: Any) -> float:
    return await code.score(item(program, list(tests), **metadata))


@pytest.mark.parametrize("text", ["`" * 200_000 + "x", "> " * 100_000 + "```a`b"])
async def test_a_response_of_fences_is_read_in_little_time(text: str) -> None:
    with within_cpu_seconds(3.0):
        assert await code.score(ScoreItem("1", "", text, metadata={"tests": STDIN})) == 0.0


@pytest.mark.parametrize(
    "body",
    [
        "return deque([x, 2], maxlen=1)[0] + x - 2",
        "heap: List[Tuple[int, str]] = []\n    heappush(heap, (x, 'a'))\n    return heappop(heap)[0]",
        "return int(math.sqrt(x * x)) if math.inf > x else 0",
        "return gcd(x, 0) + comb(x, 0) - isqrt(1)",
    ],
)
async def test_names_that_data_sets_checkers_import_are_known(body: str) -> None:
    program = f"def f(x):\n    {body}\n"
    assert await code.score(item(program, {"fn_name": "f", "inputs": [[3]], "outputs": [3]})) == 1.0
    script = f"from __future__ import annotations\n{program}print(f(int(input())))"
    assert await code.score(item(script, {"inputs": ["3"], "outputs": ["3"]})) == 1.0


@pytest.mark.parametrize(
    ("result", "expected", "reward"),
    [
        ("x / 3", 0.3333333333, 1.0),
        ("[x * 1.1, {'a': 3 * 0.1}]", [1.1, {"a": 0.3}], 1.0),
        ("float('nan')", float("nan"), 1.0),
        ("0.333", 1 / 3, 0.0),
        ("float(123456789012345678)", 123456789012345678, 0.0),
        ("[1000000007, 2]", [1000000008, 2], 0.0),
        ("'0.30000000000000004'", "0.3", 0.0),
    ],
)
async def test_results_in_floating_point_have_a_tolerance_and_whole_numbers_none(
    result: str, expected: object, reward: float
) -> None:
    program = f"def f(x):\n    return {result}"
    assert await code.score(item(program, {"fn_name": "f", "inputs": [[1]], "outputs": [expected]})) == reward
    if expected == expected and not isinstance(expected, str):
        assert await reward_of(program, f"assert f(1) == {expected!r}") == reward


ASSERTIONS = {
    "assert set(f(3)) == set((4, 5))": "[5, 4]",
    "assert isclose(f(3), 3.2)": "3.2",
    "assert math.isclose(3.2, f(3), rel_tol=1e-9) is True": "3.2",
    "assert f(3) in (4, 5)": "4",
    "assert Counter(f(3)) == Counter('aab')": "'aba'",
    "assert all(f(i) == i * i for i in range(4))": "x * x",
    "assert list(map(f, [1, 2])) == list((1, 4))": "x * x",
    "assert len(f(3)) == 2 and f(3)[0] > 3 and f(3)[-1] is None": "[4, None]",
    "assert str(f(3)) == '4' + ''": "4",
    "assert (r := f(3)) and r['a'] == [1] * 2": "{'a': [1, 1]}",
    "assert isinstance(f(3), list) and f(3) == [2][:]": "[2]",
    "assert close(f(3), 3.2)": "3.2",
}
ANY = (
    "class Any(float):\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *a: True\n"
    "    __ne__ = lambda *a: False\n    __bool__ = lambda s: True\n    __hash__ = lambda s: 0\n"
    "    __len__ = lambda s: 2\n"
    "    __float__ = lambda s: 0.5\n    __abs__ = __sub__ = __rsub__ = __add__ = __mul__ = lambda *a: Any()\n"
    "    __iter__ = lambda s: iter((s, s))\n    __getitem__ = lambda *a: a[0]\n"
    "    __round__ = __index__ = lambda *a: 4\n"
    "    __str__ = __repr__ = lambda s: 'any'\n"
)
FAKES = [
    f"{ANY}def f(x):\n    return Any()",
    f"{ANY}class More(Any, metaclass=type('M', (type,), {{'__instancecheck__': lambda *a: True}})): pass\nf = More",
    "import builtins, math\nsame = lambda *a, **k: True\n"
    "set = sorted = max = abs = isclose = Counter = all = list = len = same\n"
    "for name in ('set', 'sorted', 'max', 'abs', 'all', 'list', 'len', 'str', 'round', 'isinstance', 'bool', 'eval'):\n"
    "    setattr(builtins, name, same)\nmath.isclose = close = same\ndef f(x):\n    return True",
    "import __main__\ndef f(x):\n    for _ in range(9):\n        __main__._tell({'is_true': True})",
    "import os\ndef f(x):\n    for n in range(3, 9):\n"
    "        try: os.write(n, b'{\"is_true\": true}\\n' * 9)\n        except OSError: pass",
    "import __main__\n__main__._plain = lambda v: {'set': [{'int': '0x4'}]}\ndef f(x):\n    return x",
    "def f(x):\n    return lambda *a: True",
]


@pytest.mark.parametrize("fake", ["", *FAKES])
async def test_no_assertion_is_won_by_objects_that_equal_everything(fake: str) -> None:
    """Each assertion has a function of its own, so that one program is tried with all of them."""
    numbered = {re.sub(r"\bf\b", f"f{n}", each): result for n, (each, result) in enumerate(ASSERTIONS.items())}
    program = f"{fake}\n" + "\n".join(f"f{n} = f" for n in range(len(numbered)))
    if not fake:
        program = "\n".join(f"def f{n}(x):\n    return {result}" for n, result in enumerate(numbered.values()))
    setup = "def close(a, b):\n    return abs(a - b) < 1e-6"
    share = await reward_of(program, *numbered, test_setup_code=setup, code_reward="share")
    assert share == (0.0 if fake else 1.0)


COLLIDING = "(k * (2 ** 61 - 1) for k in range(26_000))"


async def test_numbers_whose_hashes_collide_do_not_hold_the_scorer() -> None:
    program = f"def f(x):\n    return type('S', (set,), {{'__iter__': lambda s: {COLLIDING}}})()"
    for tests in (
        {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]},
        ["assert f(1) == {1: 2}"],
        ["assert f(1) == {1}"],
    ):
        with within_cpu_seconds(5.0):
            assert await code.score(item(program, tests)) == 0.0


@contextmanager
def within_cpu_seconds(seconds: float) -> Iterator[None]:
    try:
        with cpu_limit(seconds):
            yield
    except TooSlow:
        pytest.fail(f"it takes more than {seconds:g} s of processor time")


@pytest.mark.parametrize("tests", [STDIN, ["assert not f(1)"]])
async def test_programs_are_refused_without_bubblewrap_unless_the_job_allows_it(
    tests: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_sandbox("refused", monkeypatch)
    program = f"{ADD}\nf = bool\nif __name__ == '__main__':\n    {SUM}"
    with pytest.raises(FailedPrecondition, match=r"refused, because .*bubblewrap.*--insecure-sandbox"):
        await code.score(item(program, tests))
    choose_sandbox("process", monkeypatch)
    assert await code.score(item(program, tests)) == (0.0 if tests == ["assert not f(1)"] else 1.0)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    choose_sandbox(request.param, monkeypatch)
    before = set(descendants(os.getpid()))
    yield str(request.param)
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import sys\nwhile True: sys.stdout.write('x' * 100000)",
        "import time; time.sleep(60)",
        "x = [0] * (1 << 40)",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import sys; print(open(sys.argv[0]).read(), *sys.argv, *__import__('os').listdir('.'))",
        "class Same(str):\n    def __eq__(self, other): return True\nadd = lambda *_: Same('3')",
    ],
)
async def test_a_hostile_program_gets_0_in_a_bounded_time(kind: str, program: str) -> None:
    for tests in (STDIN, CALLS):
        assert await code.score(item(program, tests, time_limit=0.5)) == 0.0


async def test_expected_results_are_nowhere_where_the_program_looks(kind: str) -> None:
    spies = (
        "import gc, glob, os, sys, __main__\n"
        "seen = repr(vars(__main__)) + repr([o for o in gc.get_objects() if isinstance(o, (str, list, dict))])\n"
        "for name in glob.glob(os.path.dirname(os.path.abspath(sys.argv[0])) + '/*') + ['/proc/self/environ']:\n"
        "    seen += open(name, errors='replace').read()\n"
        "def f(*a):\n    return str(SECRET) in seen\n"
        "if __name__ == '__main__': print(str(SECRET) in seen)\n"
    ).replace("SECRET", f"int('{SECRET + 1}') - 1")
    for tests in (
        {"inputs": [[1], [2]], "outputs": [SECRET, False], "fn_name": "f"},
        [f"assert f(1) == {SECRET}", "assert f(2) == False"],
        {"inputs": ["", ""], "outputs": [str(SECRET), "False"]},
        [f"assert {{f(1)}} == {{{SECRET}}} | set()", "assert f(2) is False"],
        [f"assert isclose(f(1), {SECRET}.0)", "assert f(2) in (False, ())"],
    ):
        assert await code.score(item(spies, tests, code_reward="share")) == 0.5  # the second test: it has seen nothing


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_in_bubblewrap_a_program_reads_no_files_and_reaches_nobody(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text("7")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for attempt in (
            f"print(open({str(tmp_path / 'tests.json')!r}).read())",
            "print(open('/etc/passwd') and 7)",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 1); print(7)",
            "import os, signal; os.kill(os.getppid(), signal.SIGKILL); print(7)",
        ):
            tests = {"inputs": [""], "outputs": ["7"]}
            reward = await code.score(item(attempt, tests, time_limit=1))
            assert reward == 0.0 or "kill" in attempt  # it has killed what ran it inside its own namespace, or nobody
    assert await code.score(item("print(7)", tests)) == 1.0


@pytest.mark.parametrize("tests", [STDIN, ["assert not f(1)"]])
async def test_a_sandbox_that_does_not_start_is_an_error_and_no_reward(
    tests: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_sandbox("bubblewrap", monkeypatch)
    monkeypatch.setattr(sandbox, "_bubblewrapped", lambda *_, **__: ("sh", "-c", "echo no namespaces; exit 1", "sh"))
    with pytest.raises(Unavailable, match="the sandbox did not start: no namespaces"):
        await code.score(item(SUM, tests))


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2\n3\n\n", " 1 2 \n3", True),
        ("1.50", "1.5", True),
        ("YES", "Yes", False),
        ("1\n2", "1 2", False),
        ("0.1234567", "0.123457", True),
        ("[0.30000000000000004, 7]", "[0.3, 7]", True),
        ("5.0000000001", "5", True),
        ("0.1235", "0.123457", False),
        ("123456789012345679", "123456789012345678", False),
        ("[1, 2]", "(1, 2)", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(written: str, expected: str, same: bool) -> None:
    assert same_output(written, expected) is same
