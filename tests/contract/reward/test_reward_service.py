"""The reward service over gRPC, with real workers: every failure is an error of its own item, and never a reward."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.client.reward import RewardClient
from headrace.errors import ConfigError, DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted
from headrace.rpc import interceptor
from headrace.rpc.client import call
from headrace.rpc.net import free_port
from headrace.score import Score, ScoreError, ScoreItem
from services.reward import registry, scoring
from tests.support.processes.reward_server import served_reward
from tests.support.refusals import refused

HOOKS = '''
import os, time

async def reward(args, sample, **kw):
    """A bare integer is worth 0.3, the right one 0.7 more."""
    match sample.response:
        case "loop":
            while True: pass
        case "wait":
            while not os.path.exists(__file__ + ".go"): time.sleep(0.01)
        case "crash": os.kill(os.getpid(), 11)
        case "raise": raise ValueError("bad tokens")
        case "none": return None
        case "nan": return float("nan")
        case "text": return "1.0"
        case "exit": raise SystemExit(1)
        case "slow once":
            if not os.path.exists(__file__ + ".slow"):
                open(__file__ + ".slow", "w").close()
                time.sleep(600)
    answer = sample.response.strip()
    return (0.3 if answer.lstrip("-").isdigit() else 0.0) + (0.7 if answer == sample.label else 0.0)

def parts(args, sample): return {"correct": 1.0, "length": float(len(sample.response))}

def verdict(args, sample):
    """As verl's own: a score, and what was extracted."""
    return {
        "score": 1.0, "acc": True, "pred": "7", "span": [0, 1], "extracted": None, "why": {"rule": "boxed"},
        **({"correct": "yes"} if sample.response == "8" else {}),
    }

def words_only(args, sample): return {"pred": sample.response, "format": "ok"}

def trl_length(completions, **kwargs): return [len(text) / 10 for text in completions]

async def trl_answer(prompts, completions, answer, difficulty=None, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["source"]) == len(difficulty)
    told = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert [isinstance(p, list) for p in prompts] == [not isinstance(c, str) for c in completions]
    return [None if t == "?" else float(t == a) + d for t, a, d in zip(told, answer, difficulty)]

def trl_lacks(completions, *, answer, verifier): return [0.0] * len(completions)

async def group(args, samples): return [float(len(samples))] * len(samples)

class Model:
    def __init__(self, model_path): self.model_path = model_path
    def compute_reward(self, prompts, responses): return [float(len(r)) for r in responses]
'''


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    file = tmp_path / "hooks.py"
    file.write_text(HOOKS)
    return str(file)


def items(*responses: str, label: str | None = "7", **metadata: object) -> list[ScoreItem]:
    return [ScoreItem(str(i), "3 + 4 =", r, label=label, metadata=metadata) for i, r in enumerate(responses)]


def values(judgements: list[Score | ScoreError]) -> list[float | str]:
    return [j.value if isinstance(j, Score) else j.reason for j in judgements]


async def test_mathematics_is_judged_and_says_by_whom() -> None:
    async with served_reward(rm_type="math") as client:
        right, wrong = await client.score(items(r"\boxed{7}", "8"), deadline_seconds=120)
        assert right == Score(1.0, "math", f"math-verify 0.9.0 {registry.code_digest('math')}")
        assert wrong.value == 0.0
        names = {s.name: s.is_default for s in await client.list_scorers()}
        assert names["math"]
        assert {"exact_match", "regex", "reasoning_gym", "deepscaler"} < names.keys()


async def test_each_item_may_choose_its_scorer() -> None:
    asked = items("yes", label="yes", rm_type="exact_match") + items("17", label=None, rm_type="nonsense")
    asked = [ScoreItem(str(i), a.prompt, a.response, a.label, a.metadata) for i, a in enumerate(asked + items("a7b"))]
    async with served_reward(rm_type="regex") as client:
        exact, unknown, default = await client.score(asked, deadline_seconds=120)
    assert (exact.scorer, default.scorer) == ("exact_match", "regex")
    assert unknown.reason == "SCORER_UNKNOWN"
    assert f"There are {', '.join(registry.installed())}" in unknown.message


async def test_no_scorer_is_an_error_not_a_zero() -> None:
    async with served_reward() as client:
        assert values(await client.score(items("7"), deadline_seconds=120)) == ["SCORER_UNKNOWN"]
        assert values(await client.score(items("7"), "exact_match", deadline_seconds=120)) == [1.0]
        with refused(NotFound, "exact_macth", "exact_match", reason="SCORER_UNKNOWN"):
            await client.score(items("7"), "exact_macth", deadline_seconds=120)


async def test_failures_of_a_hook_stay_with_their_items(hooks: str) -> None:
    asked = items("7", "loop", "8", "crash", "x", "raise", "none", "nan", "text", "exit", "7")
    async with served_reward(custom_rm_path=f"{hooks}:reward", reward_timeout_seconds=2.0) as client:
        judged = await client.score(asked, deadline_seconds=120)
        again = await client.score(items("7"), deadline_seconds=120)
    expected = [1.0, "SCORER_TIMEOUT", 0.3, "SCORER_CRASHED", 0.0, "SCORER_RAISED"]
    expected += ["SCORER_ABSTAINED", "SCORER_NOT_FINITE", "SCORER_NOT_FINITE", "SCORER_RAISED", 1.0]
    assert values(judged) == expected
    assert values(again) == [1.0]
    assert judged[5].message == f"hook {hooks}:reward raised ValueError: bad tokens ({hooks}:12)"
    assert "SIGSEGV" in judged[3].message


async def test_a_hook_says_its_files_digest(hooks: str) -> None:
    async with served_reward(custom_rm_path=f"{hooks}:reward") as client:
        (score,) = await client.score(items("7"), deadline_seconds=120)
        (custom,) = [s for s in await client.list_scorers() if s.is_default]
    assert score.scorer_version == custom.version
    assert "sha256:" in custom.version
    assert custom.description == "A bare integer is worth 0.3, the right one 0.7 more."


async def scored_by(path: str, asked: list[ScoreItem]) -> list[Score | ScoreError]:
    """The results; a function that the service does not take at all is an error of every item."""
    try:
        async with served_reward(custom_rm_path=path) as client:
            return await client.score(asked, deadline_seconds=120)
    except ConfigError as error:
        return [ScoreError("REFUSED", error.message)] * len(asked)


async def test_a_reward_function_in_trls_form_gets_completions_and_columns_as_lists(hooks: str) -> None:
    metadata = {"difficulty": 0.25, "source": "made"}
    talk = '[{"role": "user", "content": "3 + 4 ="}]'
    asked = [
        ScoreItem("0", "3 + 4 =", "7", "7", metadata, group_id="a"),
        ScoreItem("1", "3 + 4 =", "?", "7", metadata, group_id="a"),
        ScoreItem("2", talk, "8", "7", metadata, group_id="b"),
        ScoreItem("3", talk, "7", "7", metadata, group_id="b"),
    ]
    judged = await scored_by(f"{hooks}:trl_answer", asked)
    assert values(judged) == [1.25, "SCORER_ABSTAINED", 0.25, 1.25]


async def test_trls_form_may_take_completions_alone_and_names_a_column_that_no_row_has(hooks: str) -> None:
    assert values(await scored_by(f"{hooks}:trl_length", items("abcde", ""))) == [0.5, 0.0]
    (error,) = await scored_by(f"{hooks}:trl_lacks", items("7"))
    assert isinstance(error, ScoreError)
    assert "requires the column 'verifier'" in error.message


async def test_a_dict_needs_its_key(hooks: str) -> None:
    async with served_reward(custom_rm_path=f"{hooks}:parts", reward_key="length") as client:
        (score,) = await client.score(items("abc"), deadline_seconds=120)
        assert (score.value, score.parts) == (3.0, {"correct": 1.0, "length": 3.0})
    async with served_reward(custom_rm_path=f"{hooks}:parts") as client:
        (error,) = await client.score(items("abc"), deadline_seconds=120)
        assert error.message.endswith("gave the parts ['correct', 'length']: set --reward-key")


async def test_a_group_scorer_sees_each_group_whole(hooks: str) -> None:
    asked = [ScoreItem(str(i), "", "", group_id=g) for i, g in enumerate("aabba")]
    async with served_reward(custom_rm_path=f"{hooks}:group", group_rm=True) as client:
        assert values(await client.score(asked, deadline_seconds=120)) == [3.0, 3.0, 2.0, 2.0, 3.0]


async def test_a_class_is_made_with_its_model(hooks: str, tmp_path: Path) -> None:
    async with served_reward(custom_rm_path=f"{hooks}:Model", reward_model_path=tmp_path) as client:
        assert values(await client.score(items("a", "bcd"), deadline_seconds=120)) == [1.0, 3.0]
    with refused(ConfigError, "--reward-model-path"):
        async with served_reward(custom_rm_path=f"{hooks}:Model"):
            pass


async def test_bad_requests_are_refused() -> None:
    async with served_reward(rm_type="math") as client:
        with pytest.raises(InvalidArgument, match="unique"):
            await client.score([*items("7"), *items("7")], deadline_seconds=10)
        with refused(InvalidArgument, 4096):
            await call(client._stub.Score, pb.ScoreRequest(), deadline_seconds=10)


async def test_a_full_queue_says_when_to_come_back(hooks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_SCORE_ITEMS", 2)
    async with served_reward(custom_rm_path=f"{hooks}:reward", reward_timeout_seconds=120) as client:
        slow = asyncio.create_task(client.score(items("wait"), deadline_seconds=120))
        refused: ResourceExhausted | None = None
        while refused is None:
            try:
                await client.score(items("7", "8"), deadline_seconds=0.9)  # shorter than it is told to stay away
            except ResourceExhausted as error:
                refused = error
            except DeadlineExceeded:  # on a slow machine
                continue
        assert refused.retry_after_seconds == 1.0
        Path(f"{hooks}.go").touch()
        assert values(await slow) == [0.0]
        assert values(await client.score(items("7", "8"), deadline_seconds=120)) == [1.0, 0.3]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.reward", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(*command(*arguments), env=environment())
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_a_service_is_replaced_at_its_address_while_a_client_scores(hooks: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = asyncio.Event()
    seen: list[Score | ScoreError] = []

    async def keep_scoring() -> None:
        async with RewardClient(address) as client:
            while not done.is_set():
                seen.extend(await client.score(items("7", "8"), deadline_seconds=120))

    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(180):
            while not await condition():
                await asyncio.sleep(0.02)

    async def judged_by(scorer: str) -> bool:
        return any(isinstance(j, Score) and j.scorer == scorer for j in seen)

    scoring = asyncio.create_task(keep_scoring())
    async with process("--address", address, "--rm-type", "exact_match") as first:
        await until(lambda: judged_by("exact_match"))
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0
    async with process("--address", address, "--custom-rm-path", f"{hooks}:reward") as second:
        await until(lambda: judged_by("custom"))
        second.kill()
    async with process("--address", address, "--rm-type", "math"):
        await until(lambda: judged_by("math"))
        done.set()
        await scoring
    rewards = {"exact_match": [1.0, 0.0], "custom": [1.0, 0.3], "math": [1.0, 0.0]}
    for seven, eight in zip(seen[::2], seen[1::2], strict=True):
        assert isinstance(seven, Score)
        assert isinstance(eight, Score)
        assert seven.scorer == eight.scorer
        assert [seven.value, eight.value] == rewards[seven.scorer]


def test_a_start_that_cannot_be_ends_with_one_line() -> None:
    ended = subprocess.run(command("--rm-type", "mth"), env=environment(), capture_output=True, text=True, timeout=180)
    assert ended.returncode == 2
    assert "headrace reward: rm_type is 'mth': did you mean 'math'?" in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_a_call_that_the_server_cuts_short_is_made_again_until_the_callers_own_deadline(
    hooks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "MAX_CALL_SECONDS", 3.0)
    async with served_reward(custom_rm_path=f"{hooks}:reward") as client:
        (score,) = await client.score([ScoreItem("1", "", "slow once", label="7")], deadline_seconds=300)
    assert isinstance(score, Score)
    assert Path(f"{hooks}.slow").exists()
