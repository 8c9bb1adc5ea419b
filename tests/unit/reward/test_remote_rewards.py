"""Scorers that ask another server, against real HTTP servers: what is away is retried, what is wrong is said."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.rpc.net import free_port
from headrace.score import Score, ScoreError, ScoreItem
from headrace.trajectory import bounded_turns
from tests.support.processes.reward_server import served_reward

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


class AnsweringServer:
    """Answers each POST by a function, and keeps what it was asked. A client without a cookie is given one."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.cookies: list[str | None] = []
        self.visits: list[str | None] = []
        """The keys of requests that follow a redirect."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append({"path": self.path, **body})
                outer.keys.append(self.headers.get("authorization"))
                outer.cookies.append(self.headers.get("cookie"))
                status, text = answer(body)
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("location", text.decode())
                if outer.cookies[-1] is None:
                    self.send_header("set-cookie", f"session={body.get('uuid', '')}; path=/; httponly; samesite=lax")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                outer.visits.append(self.headers.get("authorization"))
                self.send_error(404)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def answering() -> Iterator[Callable[[Answer], AnsweringServer]]:
    servers: list[AnsweringServer] = []

    def start(answer: Answer) -> AnsweringServer:
        servers.append(AnsweringServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def item(response: str, **metadata: object) -> ScoreItem:
    return ScoreItem(response or "empty", "2 + 5 =", response, "7", metadata)


async def test_a_server_of_the_users_own_gives_rewards_and_each_failure_is_its_own_items(
    answering: Callable[[Answer], AnsweringServer],
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        match body["response"]:
            case "busy":
                return 503, b"later"
            case "refused":
                return 400, b"no such task"
            case "no number":
                return 200, b'"good"'
            case "no json":
                return 200, b"<html>"
            case "nan":
                return 200, b"NaN"
            case "parts":
                return 200, b'{"right": 1.0, "short": 0.25}'
            case "wrapped":
                return 200, b'{"reward": 0.5}'
        return 200, json.dumps(float(body["response"] == body["label"])).encode()

    remote = answering(answer)
    names = ("7", "8", "wrapped", "parts", "busy", "refused", "no number", "no json", "nan")
    async with served_reward(rm_type="remote_rm", rm_url=f"{remote.url}/score", reward_key="short") as client:
        results = dict(
            zip(names, await client.score([item(name, level=3) for name in names], deadline_seconds=120), strict=True)
        )
    values = {name: result.value for name, result in results.items() if isinstance(result, Score)}
    assert values == {"7": 1.0, "8": 0.0, "wrapped": 0.5, "parts": 0.25}
    errors = {name: result for name, result in results.items() if isinstance(result, ScoreError)}
    assert {name: error.retryable for name, error in errors.items()} == {
        "busy": True, "refused": False, "no number": False, "no json": False, "nan": False,
    }  # fmt: skip
    assert "answered 503: later" in errors["busy"].message
    assert "no such task" in errors["refused"].message
    assert all(remote.url in error.message for error in errors.values())
    assert {
        "path": "/score",
        "prompt": "2 + 5 =",
        "response": "7",
        "label": "7",
        "metadata": {"level": 3},
    } in remote.asked


async def test_a_server_that_is_away_or_silent_is_a_failure_that_may_pass(
    answering: Callable[[Answer], AnsweringServer],
) -> None:
    over = threading.Event()

    def silent(_: dict[str, Any]) -> tuple[int, bytes]:
        over.wait(60)
        return 200, b"1"

    for url in (f"http://127.0.0.1:{free_port()}", answering(silent).url):
        async with served_reward(rm_type="remote_rm", rm_url=url, reward_timeout_seconds=1.0) as client:
            (result,) = await client.score([item("7")], deadline_seconds=120)
        assert isinstance(result, ScoreError)
        assert result.retryable
    over.set()


async def test_a_judge_is_asked_once_about_equal_responses_and_its_rubric_is_in_the_version(
    answering: Callable[[Answer], AnsweringServer], tmp_path: Path
) -> None:
    said = json.dumps({"choices": [{"message": {"role": "assistant", "content": "7"}}]}).encode()
    judge, rubric = answering(lambda _: (200, said)), tmp_path / "rubric.txt"
    versions = set()
    for text in ("{prompt} {response}", "{prompt} {response}", "Be strict: {prompt} {response}"):
        rubric.write_text(text)
        flags = {"judge_url": f"{judge.url}/v1", "judge_model": "big", "judge_prompt": rubric}
        async with served_reward(rm_type="judge", **flags) as client:
            asked = len(judge.asked)
            for response in ("seven", "seven", "eight"):
                (score,) = await client.score([item(response)], deadline_seconds=120)
                assert isinstance(score, Score)
                versions.add(score.scorer_version)
            assert len(judge.asked) == asked + 2
    assert len(versions) == 2


async def test_a_judge_is_told_what_was_asked_and_its_grade_is_the_reward(
    answering: Callable[[Answer], AnsweringServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_JUDGE_KEY", "secret")

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        said = "No idea." if "silence" in body["messages"][0]["content"] else r"Fine. \boxed{4}"
        return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()

    judge, prompt = answering(answer), tmp_path / "prompt.txt"
    prompt.write_text('Q {prompt} A {response} L {label}. Answer as {{"grade": n}}.')
    flags = {"judge_url": f"{judge.url}/v1", "judge_model": "big", "judge_prompt": prompt, "judge_scale": 5.0}
    async with served_reward(rm_type="judge", **flags) as client:
        good, bad = await client.score([item("seven"), item("silence")], deadline_seconds=120)
    assert isinstance(good, Score)
    assert good.value == pytest.approx(0.8)
    assert isinstance(bad, ScoreError)
    assert "without a grade" in bad.message
    assert judge.keys == ["Bearer secret"] * 2
    asked = judge.asked[0]
    assert (asked["path"], asked["model"]) == ("/v1/chat/completions", "big")
    assert {call["messages"][0]["content"] for call in judge.asked} == {
        f'Q 2 + 5 = A {response} L 7. Answer as {{"grade": n}}.' for response in ("seven", "silence")
    }


async def test_a_judge_is_asked_for_json_and_its_verdict_is_read(
    answering: Callable[[Answer], AnsweringServer],
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        limits = body["response_format"]["json_schema"]["schema"]["properties"]["grade"]
        said = json.dumps({"reason": "The 9 is right.", "grade": limits["maximum"] / 2})
        return 200, json.dumps({"choices": [{"message": {"content": said}}]}).encode()

    judge = answering(answer)
    flags = {"judge_url": judge.url, "judge_model": "big", "judge_scale": 4.0, "judge_json": True}
    async with served_reward(rm_type="judge", **flags) as client:
        (result,) = await client.score([item("seven")], deadline_seconds=120)
    assert isinstance(result, Score)
    assert result.value == 0.5
    assert "from 0 (wrong) to 4" in judge.asked[0]["messages"][0]["content"]
    assert "boxed" not in judge.asked[0]["messages"][0]["content"]


async def test_a_redirect_is_refused_and_the_key_stays_where_it_was_sent(
    answering: Callable[[Answer], AnsweringServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_JUDGE_KEY", "secret")
    thief = answering(lambda _: (200, b"1"))
    there = f"{thief.url}/v1/chat/completions"
    door = answering(lambda _: (307, there.encode()))
    for flags in (
        {"judge_url": door.url, "judge_model": "m", "rm_type": "judge"},
        {"rm_url": door.url, "rm_type": "remote_rm"},
    ):
        async with served_reward(**flags) as client:
            (result,) = await client.score([item("7")], deadline_seconds=120)
        assert (thief.visits, thief.keys) == ([], [])
        assert isinstance(result, ScoreError)
        assert there in result.message
        assert not result.retryable


def gym_item(response: str, turns: Sequence[dict[str, Any]] = (), **metadata: object) -> ScoreItem:
    item_id = f"{response} {metadata.get('uuid')} {len(turns)}"
    return ScoreItem(item_id, "2 + 5 =", response, None, metadata, hook_fields={"turns": list(turns)} if turns else {})


def gym(body: dict[str, Any]) -> tuple[int, bytes]:
    """As a resource server of NeMo Gym answers: with all that it was sent, the reward, and figures of its own."""
    if "response" not in body:
        return 200, b"{}"
    match body.get("uuid"):
        case "wrong":
            return 422, b'{"detail": [{"loc": ["body", "options"], "msg": "Input should be a valid list"}]}'
        case "broken":
            return 500, b"\"KeyError('task')\""
        case "silent":
            return 200, json.dumps(body).encode()
    last = body["response"]["output"][-1]
    reward = float(last["type"] == "message" and body["expected_answer"] in last["content"][0]["text"])
    return 200, json.dumps({**body, "reward": reward, "length": 3, "extracted_answer": None}).encode()


async def test_a_resource_server_gets_the_row_then_the_trajectory_with_its_cookie_and_gives_the_reward(
    answering: Callable[[Answer], AnsweringServer],
) -> None:
    server = answering(gym)
    row: dict[str, Any] = {"uuid": "a", "expected_answer": "7", "level": 4}
    async with served_reward(rm_type="nemo_gym", rm_url=f"{server.url}/") as client:
        (right,) = await client.score([gym_item("<think>5 + 2</think>It is 7", **row)], deadline_seconds=120)
        (wrong,) = await client.score([gym_item("8", **row | {"uuid": "b"})], deadline_seconds=120)
    assert isinstance(right, Score)
    assert (right.value, right.parts) == (1.0, {"reward": 1.0, "length": 3.0})
    assert isinstance(wrong, Score)
    assert wrong.value == 0.0
    assert [asked["path"] for asked in server.asked] == ["/seed_session", "/verify"] * 2
    assert server.cookies == [None, "session=a", None, "session=b"]  # each sample has a session of its own
    seeded, verified = server.asked[:2]
    asked = {"input": [{"type": "message", "role": "user", "content": "2 + 5 ="}]}
    assert seeded == {"path": "/seed_session", **row, "responses_create_params": asked}
    assert {name: verified[name] for name in seeded.keys() - {"path"}} == {**row, "responses_create_params": asked}
    response = verified["response"]
    assert (response["object"], response["status"], response["tools"]) == ("response", "completed", [])
    thought, message = response["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "5 + 2"}]
    assert message["content"] == [{"type": "output_text", "text": "It is 7", "annotations": []}]


async def test_a_conversation_is_sent_with_its_function_calls_and_their_outputs(
    answering: Callable[[Answer], AnsweringServer],
) -> None:
    server = answering(gym)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 5}'}}
    turns = bounded_turns(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 5 ="},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "assistant", "content": "7"},
        ]
    )
    own = {"input": "the row's own", "tools": [{"type": "function", "name": "add"}], "parallel_tool_calls": False}
    items = [gym_item("7", turns, expected_answer="7", responses_create_params=each) for each in ({}, own)]
    async with served_reward(rm_type="nemo_gym", rm_url=server.url) as client:
        for each in items:
            (result,) = await client.score([each], deadline_seconds=120)
            assert isinstance(result, Score)
            assert result.value == 1.0
    first, second = (asked for asked in server.asked if asked["path"] == "/verify")
    assert [each["role"] for each in first["responses_create_params"]["input"]] == ["system", "user"]
    called, output, message = first["response"]["output"]
    assert called == {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2, "b": 5}'}
    assert output == {"type": "function_call_output", "call_id": "c1", "output": "7"}
    assert message["content"][0]["text"] == "7"
    assert second["responses_create_params"] == own
    assert second["response"]["tools"] == own["tools"]


async def test_a_resource_servers_refusal_fails_the_sample_and_its_outage_lets_it_wait(
    answering: Callable[[Answer], AnsweringServer],
) -> None:
    server, nobody = answering(gym), f"http://127.0.0.1:{free_port()}"
    cut = bounded_turns([{"role": "user", "content": "x" * 300_000}])
    items = {uuid: gym_item("7", uuid=uuid) for uuid in ("wrong", "silent", "broken")}
    items |= {"cut": gym_item("7", cut), "no object": gym_item("7", responses_create_params=3)}
    async with served_reward(rm_type="nemo_gym", rm_url=server.url) as client:
        found = dict(zip(items, await client.score(list(items.values()), deadline_seconds=120), strict=True))
    async with served_reward(rm_type="nemo_gym", rm_url=nobody) as client:
        (found["away"],) = await client.score([gym_item("7")], deadline_seconds=120)
    errors = {name: result for name, result in found.items() if isinstance(result, ScoreError)}
    assert {name: error.reason for name, error in errors.items()} == {
        **dict.fromkeys(("wrong", "silent", "cut", "no object"), "SCORER_RAISED"),
        **dict.fromkeys(("broken", "away"), "SCORER_UNAVAILABLE"),
    }
    assert "422" in errors["wrong"].message


@pytest.mark.parametrize(
    ("leaves", "way_out"),
    [
        ({"rm_type": "remote_rm"}, "--rm-url"),
        ({"rm_type": "nemo_gym"}, "--rm-url"),
        ({"rm_type": "judge"}, "--judge-url"),
        ({"rm_type": "judge", "judge_url": "http://h:1/v1"}, "--judge-model"),
    ],
)
async def test_a_server_that_nobody_named_is_said_before_the_first_item(leaves: dict[str, str], way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        async with served_reward(**leaves):
            pass
