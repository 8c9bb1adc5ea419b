"""`headrace eval --url`: a model behind an OpenAI-compatible server, scored by a reward service of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.cli.main import main
from headrace.rpc.net import free_port

pytestmark = pytest.mark.timeout(300)


class Remote:
    """Answers 4 to everything; every third request is told to come back, and one that says "refuse" is refused."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}/v1"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        self.asked.append((request.path, body))
        if len(self.asked) % 3 == 0:
            return web.json_response({"error": "busy"}, status=429)
        if "refuse" in json.dumps(body):
            return web.json_response({"error": "no"}, status=400)
        choice = {"message": {"role": "assistant", "content": "4"}, "text": "4", "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 7}})


@pytest.fixture
async def remote(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Remote]:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    remote, app = Remote(), web.Application()
    app.add_routes([web.post("/v1/{path:.*}", remote.answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(remote.url.split(":")[2].split("/")[0])).start()
    yield remote
    await runner.cleanup()


def rows(folder: Path, *given: dict[str, Any]) -> str:
    file = folder / "eval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(file)


async def test_an_openai_server_is_evaluated_with_messages_and_texts(
    tmp_path: Path, remote: Remote, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(
        tmp_path,
        {"prompt": [{"role": "user", "content": "2 + 2"}], "label": "4", "tools": [{"type": "function"}]},
        {"prompt": "1 + 1", "label": "2"},
        {"prompt": "refuse", "label": "4"},
    )
    words = ["eval", "--url", remote.url, "--model", "far", "--eval-prompt-data", "sums", data, "--label-key", "label"]
    more = ["--rm-type", "exact_match", "--n-samples-per-eval-prompt", "2", "--tool-key", "tools"]
    kept = ["--samples", str(tmp_path / "samples.jsonl")]
    assert await asyncio.to_thread(main, [*words, *more, *kept, "--eval-max-response-len", "9"]) == 0
    said = capsys.readouterr().out
    assert "eval/sums: mean reward 0.5000" in said
    assert "over 4 samples of 2 prompts (2 failed), pass@1 0.5000, pass@2 0.5000, 7.0 tokens" in said
    paths = {path for path, _ in remote.asked}
    assert paths == {"/v1/chat/completions", "/v1/completions"}
    chat = next(body for path, body in remote.asked if path.endswith("chat/completions"))
    assert (chat["model"], chat["max_tokens"], chat["tools"]) == ("far", 9, [{"type": "function"}])
    assert chat["messages"] == [{"role": "user", "content": "2 + 2"}]
    assert next(body for path, body in remote.asked if "chat" not in path)["prompt"] in ("1 + 1", "refuse")
    assert remote.keys == {"Bearer sk-test"}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sorted((s["response"], s["reward"], s["status"]) for s in samples if s["reward"] is not None) == [
        *[("4", 0.0, "completed")] * 2,
        *[("4", 1.0, "completed")] * 2,
    ]
    assert sum(s["status"] == "failed" for s in samples) == 2


async def test_an_evaluation_that_the_server_refuses_says_why(
    tmp_path: Path, remote: Remote, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path, {"prompt": "refuse", "label": "4"})
    words = ["eval", "--url", remote.url, "--model", "far", "--eval-prompt-data", "sums", data, "--label-key", "label"]
    assert await asyncio.to_thread(main, [*words, "--rm-type", "exact_match"]) == 1
    assert "answered 400" in capsys.readouterr().err


def test_a_url_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--url", "far.example", "--model", "x"]) != 0
    assert "must begin with http" in capsys.readouterr().err
