"""Programs in responses, against the tests of their task: verdicts, hostile programs, sandboxes that do not start."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument, Unavailable
from headrace.hooks.kit import sandbox, sandbox_of
from headrace.hooks.kit.sandbox import leaves_root
from headrace.process.linux import descendants
from headrace.score import ScoreItem
from services.reward.scorers import code
from services.reward.scorers.code_values import same_output

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]\nassert not add(0, 0)"]
SECRET = 918273645
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap here")


def item(program: str, tests: object = None, label: str | None = None, **metadata: Any) -> ScoreItem:
    response = f"<think>```python\nprint(0)\n```</think>Here:\n```python\n{program}\n```\nDone."
    metadata |= {} if tests is None else {"tests": tests}
    return ScoreItem("1", "", response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        (SUM, STDIN, 1.0),
        (SUM + "\nimport sys; print('a warning', file=sys.stderr)", STDIN, 1.0),
        ("print(3)", STDIN, 0.0),
        (SUM + "\n1/0", STDIN, 0.0),
        (SUM.replace("print(", "print(1.0 *"), STDIN, 1.0),  # 3.0 is 3
        (SUM, json.dumps(STDIN), 1.0),
        (ADD, CALLS, 1.0),
        (ADD.replace("+", "-"), CALLS, 0.0),
        ("class Solution:\n    def add(self, a, b):\n        print('noise')\n        return a + b", CALLS, 1.0),
        ("def add(a, b):\n    return (a, b)", {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"}, 1.0),
        (ADD, ASSERTS, 1.0),
        (ADD.replace("+", "-"), ASSERTS, 0.0),
        (
            "from collections import Counter\ndef f(s):\n    return Counter(s)",
            ["assert f('aab') == {'a': 2, 'b': 1}"],
            1.0,
        ),
        (
            "def f():\n    return {1, 2}, 2 ** 70, 0.5, b'x', None",
            [f"assert f() == ({{2, 1}}, {2**70}, 0.5, b'x', None)"],
            1.0,
        ),
        ("def f(x):\n    return x / 3", ["assert abs(f(1) - 0.3333) < 0.001"], 1.0),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional"}], 1.0),
        (SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}], 1.0),
        (
            ADD,
            {
                "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}],
                "language": "python",
            },
            1.0,
        ),
        ("def add(a, b:", CALLS, 0.0),
        ("while True: pass", [*ASSERTS], 0.0),
        ("x = 1", CALLS, 0.0),
        ("#" * (300 << 10), CALLS, 0.0),
    ],
)
async def test_a_program_gets_1_where_it_passes_all_tests(program: str, tests: object, reward: float) -> None:
    assert await code.score(item(program, tests, func_name="add", time_limit=2)) == reward


async def test_tests_may_stand_in_the_label_and_need_a_setup() -> None:
    assert await code.score(item(SUM, label=json.dumps(STDIN))) == 1.0
    made = item("def f(x):\n    return math.floor(x)", test_list=["assert f(1.5) == 1"], test_setup_code="import math")
    assert await code.score(made) == 1.0


async def test_code_reward_share_is_the_part_of_the_tests_that_passes() -> None:
    calls = {"inputs": [[1, 1], [2, 1], [3, 0], [4, 1]], "outputs": [0, 1, 3, 3], "fn_name": "add"}
    assert await code.score(item(ADD, calls, code_reward="share")) == 0.25
    assert await code.score(item("print(3)", STDIN, code_reward="share")) == 0.5


async def test_a_response_without_python_gets_0() -> None:
    for response in ("no code", "```bash\nls\n```", "<think>```python\nprint(3)\n```"):
        assert await code.score(ScoreItem("1", "", response, metadata={"tests": STDIN})) == 0.0
    assert await code.score(ScoreItem("1", "", f"```\n{SUM}", metadata={"tests": STDIN})) == 1.0


@pytest.mark.parametrize(
    ("tests", "metadata", "message"),
    [
        (None, {}, "needs tests in metadata.tests"),
        ("{", {}, "no JSON"),
        (7, {}, "a int of none of the forms"),
        ([], {}, "the list of tests is empty"),
        ({"inputs": [1], "outputs": []}, {}, "1 inputs have 0 outputs"),
        (["assert ("], {}, "cannot be read"),
        (["x = 1"], {}, "it is no assertion"),
        ([{"input": "1"}], {}, "has no input or no output"),
        ([{"input": "1", "output": "1", "type": "odd"}], {}, "of the type 'odd'"),
        ([{"input": "1", "output": "1", "type": "function_call"}], {}, "say it as fn_name"),
        (STDIN, {"code_reward": "most"}, "code_reward is 'most'"),
        (STDIN, {"time_limit": -1}, "time_limit is -1"),
    ],
)
async def test_tests_that_cannot_be_read_are_an_error_and_no_reward(
    tests: object, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await code.score(item(SUM, tests, **metadata))


@pytest.fixture(params=[pytest.param("bubblewrap", marks=needs_bubblewrap), "process"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "bubblewrap" and sandbox_of() != "bubblewrap":
        pytest.skip("this machine lets nobody make namespaces")
    monkeypatch.setattr(sandbox, "sandbox_of", lambda: request.param)
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
    if "fork" in program and os.getuid() == 0 and not (kind == "bubblewrap" and leaves_root()):
        pytest.skip("root may have any number of processes, and nothing here makes another user of it")
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
    ):
        assert await code.score(item(spies, tests, code_reward="share")) == 0.5  # the second test: it has seen nothing


@needs_bubblewrap
async def test_in_bubblewrap_a_program_reads_no_files_and_reaches_nobody(tmp_path: Path) -> None:
    if sandbox_of() != "bubblewrap":
        pytest.skip("this machine lets nobody make namespaces")
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


async def test_a_sandbox_that_does_not_start_is_an_error_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_of", lambda: "bubblewrap")
    monkeypatch.setattr(sandbox, "_bubblewrapped", lambda *_: ("sh", "-c", "echo no namespaces; exit 1", "sh"))
    with pytest.raises(Unavailable, match="the sandbox did not start: no namespaces"):
        await code.score(item(SUM, STDIN))


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2\n3\n\n", " 1 2 \n3", True),
        ("1.50", "1.5", True),
        ("1e3", "1000", True),
        ("1  2", "1 2", True),
        ("YES", "Yes", False),
        ("1\n2", "1 2", False),
        ("nan", "nan", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(written: str, expected: str, same: bool) -> None:
    assert same_output(written, expected) is same
