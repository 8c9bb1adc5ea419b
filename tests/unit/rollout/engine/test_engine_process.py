"""An engine that has ended leaves nothing in the temporary folder, however it ended."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, Unavailable
from headrace.job.schema.job import Job
from headrace.process.scratch import Scratch
from services.rollout.engine import launch
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.process import SglangProcess
from services.rollout.fleet_build import sglang_factory

ENGINE = """
import json, os, sys, tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

Path(os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"].removeprefix("file://")).write_text("ranks meet here")
tempfile.NamedTemporaryFile(delete=False)  # as SGLang does for its sockets
if sys.argv[2] == "fails":
    sys.exit(3)
if sys.argv[2] == "refused":
    print("engine: --sglang-statik is no argument of SGLang's", file=sys.stderr)
    sys.exit(78)

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

    def __init__(self, folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self.temporary = temporary
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))

    def __call__(self, behaviour: str) -> SglangProcess:
        def command(options: EngineOptions, *, engine: int, port: int) -> list[str]:
            return [sys.executable, "-c", ENGINE, str(port), behaviour]

        self._monkeypatch.setattr(launch, "command", command)
        options = EngineOptions(self._folder, 1, 0, {}, threads=1)
        return SglangProcess(options, 0, self._folder / "engine.log", has_accelerator=False)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A path that is short enough for sockets, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def engines(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(tmp_path, temporary, monkeypatch)


async def test_nothing_is_left_of_an_engine_that_does_not_start(engines: Engines) -> None:
    with pytest.raises(Unavailable, match="exit code 3"):
        await engines("fails").start(seconds=50.0)
    assert not list(engines.temporary.iterdir())


async def test_an_argument_that_the_launcher_refuses_is_a_mistake_in_the_job(engines: Engines) -> None:
    with pytest.raises(ConfigError, match=r"^--sglang-statik is no argument of SGLang's$"):
        await engines("refused").start(seconds=50.0)
    assert not list(engines.temporary.iterdir())


async def test_nothing_is_left_of_an_engine_that_is_stopped(engines: Engines) -> None:
    engine = engines("serves")
    await engine.start(seconds=50.0)
    assert list(engines.temporary.iterdir())
    await engine.stop()
    assert not list(engines.temporary.iterdir())


def test_the_service_deletes_leftovers_before_its_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = Scratch(tmp_path, "engine-3")
    left.make()
    job: dict[str, Any] = {"model": {"hf_checkpoint": tmp_path}}
    sglang_factory(Job.model_validate(job), tmp_path, has_accelerator=False)
    assert not left.folder.exists()
