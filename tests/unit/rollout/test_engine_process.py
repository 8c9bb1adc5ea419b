"""An engine that has ended leaves nothing in the temporary folder, however it ended."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace.config.job import Job
from headrace.errors import Unavailable
from services.rollout.engine import arguments
from services.rollout.engine.machine import Machine
from services.rollout.engine.process import SglangProcess

ENGINE = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

Path(os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"].removeprefix("file://")).write_text("ranks meet here")
if sys.argv[2] == "fails":
    sys.exit(3)

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"weight_version": "default", "model_path": "m"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if sys.argv[2] == "ends":
            os._exit(0)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


class Engines:
    """Engines that do as they are told, and the folder for what is temporary."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))

    def __call__(self, behaviour: str) -> SglangProcess:
        def command(job: Job, machine: Machine, *, engine: int, port: int) -> list[str]:
            return [sys.executable, "-c", ENGINE, str(port), behaviour]

        self._monkeypatch.setattr(arguments, "command", command)
        job: dict[str, Any] = {"model": {"hf_checkpoint": self._folder}}
        return SglangProcess(Job.model_validate(job), Machine(False, {}), 0, self._folder / "engine.log")


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(tmp_path, monkeypatch)


async def test_nothing_is_left_of_an_engine_that_does_not_start(engines: Engines) -> None:
    with pytest.raises(Unavailable, match="exit code 3"):
        await engines("fails").start(seconds=50.0)
    assert not list(engines.temporary.iterdir())


async def test_nothing_is_left_of_an_engine_that_ends_by_itself(engines: Engines) -> None:
    engine = engines("ends")
    await engine.start(seconds=50.0)
    async with asyncio.timeout(50):
        assert await engine.wait() == 0
    assert not list(engines.temporary.iterdir())


async def test_nothing_is_left_of_an_engine_that_is_stopped(engines: Engines) -> None:
    engine = engines("serves")
    await engine.start(seconds=50.0)
    assert list(engines.temporary.iterdir())
    await engine.stop()
    assert not list(engines.temporary.iterdir())
