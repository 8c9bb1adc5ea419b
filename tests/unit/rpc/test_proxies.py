"""A proxy in the environment stands before other people's servers, never between the parts of a run."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import HeadraceError
from headrace.job.schema.job import Job
from headrace.launch.health import is_serving
from headrace.launch.specs import spec
from headrace.run_folder import RunFolder
from headrace.score import ScoreItem
from services.buffer.store.memory import MemoryStore
from services.reward.scorers import judge, remote_rm
from tests.support.processes.buffer_server import served_buffer

NOWHERE = "http://127.0.0.1:9"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
LIMIT = 60.0
ELSEWHERE = [f"--{name}-address=127.0.0.1:70{at}" for at, name in enumerate(("buffer", "reward", "rollout"), 10)]
"""Services that start here are checked by processes of their own."""


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every proxy is one that nobody serves, in both spellings, and no host is excepted."""
    for name in VARIABLES:
        monkeypatch.setenv(name, NOWHERE)
        monkeypatch.setenv(name.upper(), NOWHERE)
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("variable", [*VARIABLES[:2], "grpc_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_service_is_reached_past_a_proxy(monkeypatch: pytest.MonkeyPatch, variable: str, host: str) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.setenv(variable, NOWHERE)
    async with served_buffer(MemoryStore(), address=f"{host}:0") as (_, server):
        assert await is_serving(server.address)


class Graded(http.server.BaseHTTPRequestHandler):
    """A judge, a reward model and a proxy before them: it keeps the URL that it was asked for."""

    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers["content-length"]))
        said = {"choices": [{"message": {"content": "\\boxed{7}"}}]}
        body = json.dumps(0.7 if self.path.endswith("/score") else said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def graded(host: str = "127.0.0.1") -> Iterator[tuple[str, list[str]]]:
    """The URL of a server, and what it was asked."""
    asked: list[str] = []
    server = http.server.HTTPServer((host, 0), type("Handler", (Graded,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Args:
    judge_model = "j"
    judge_prompt = None
    judge_scale = 10.0
    reward_timeout_seconds = LIMIT

    def __init__(self, url: str) -> None:
        self.judge_url = f"{url}/v1"
        self.rm_url = f"{url}/score"


async def graded_by(scorer: object, url: str) -> object:
    """The score, or why there is none."""
    try:
        return await scorer.score(ScoreItem("a", "p", "r"), Args(url))  # type: ignore[attr-defined]
    except (OSError, HeadraceError) as error:
        return str(error)


@pytest.mark.parametrize("scorer", [judge, remote_rm], ids=["judge", "remote_rm"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.7"])
async def test_a_grader_on_this_machine_is_asked_directly(proxied: None, scorer: object, host: str) -> None:
    with graded(host) as (url, asked):
        assert await graded_by(scorer, url) == 0.7
        assert len(asked) == 1


@pytest.mark.parametrize("scorer", [judge, remote_rm], ids=["judge", "remote_rm"])
async def test_a_grader_elsewhere_is_asked_through_the_proxy_unless_no_proxy_names_it(
    monkeypatch: pytest.MonkeyPatch, proxied: None, scorer: object
) -> None:
    with graded() as (proxy, asked):
        monkeypatch.setenv("http_proxy", proxy)
        assert await graded_by(scorer, "http://grader.example:8000") == 0.7
        assert asked[0].startswith("http://grader.example:8000/")
        monkeypatch.setenv("no_proxy", "grader.example")
        assert await graded_by(scorer, "http://grader.example:8000") != 0.7
        assert len(asked) == 1


@pytest.mark.parametrize("service", ["buffer", "reward", "rollout", "trainer"])
def test_every_service_is_told_to_reach_all_hosts_of_the_run_directly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str
) -> None:
    monkeypatch.setenv("no_proxy", "mirror.example")
    services = {
        "buffer_address": "buffer-a.example:7001|buffer-b.example:7001",
        "rollout_address": "10.1.2.3:7002,[fd00::7]:7002",
        "reward_address": "reward.example:7003",
        "trainer_address": "127.0.0.1:7004",
        "listen_host": "0.0.0.0",  # noqa: S104
        "rollout_service": 1,
    }
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services})
    environment = spec(job, service, RunFolder(tmp_path)).environment
    wanted = {"mirror.example", "buffer-a.example", "buffer-b.example", "10.1.2.3", "fd00::7", "reward.example"}
    for name in ("no_proxy", "NO_PROXY"):
        assert wanted | {"localhost", "127.0.0.1", "::1"} <= set(environment.get(name, "").split(","))


def test_check_names_the_proxy_without_its_password_and_says_what_goes_through_it(
    proxied: None, monkeypatch: pytest.MonkeyPatch, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name.upper())
    monkeypatch.setenv("http_proxy", "http://ada:secret@proxy.example:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    graders = ["--judge-url", "http://far.example/v1", "--rm-url", "http://near.example/score", "--judge-model", "j"]
    main(["check", str(job_file), *ELSEWHERE, "--rm-type", "judge", *graders])
    said = " ".join(capsys.readouterr().out.split())
    assert "http_proxy=http://…@proxy.example:3128" in said
    assert "the run's own addresses never use it" in said
    assert "judge_url http://far.example/v1 is asked through it" in said
    assert "rm_url http://near.example/score is asked directly" in said
    assert "secret" not in said
