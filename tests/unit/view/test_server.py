"""`headrace view`: the page served on this machine, and written into a folder."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.view.data import RunData
from headrace.view.server import PageServer
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.viewed_run import viewed_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    data = RunData(viewed_run(tmp_path, tmp_path / "model"))
    with PageServer(data, lambda: None, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, str, bytes]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    found = response.status, response.headers["Content-Type"], response.read()
    connection.close()
    return found


def test_the_page_and_its_data_are_served(server: PageServer) -> None:
    status, kind, body = get(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in body.lower()
    for name in ("overview", "prompts", "untrained", "step-0000002", "tokens-0000001", "eval-0000002"):
        status, kind, body = get(server, f"/data/{name}.js?t=1")
        assert (status, kind) == (200, "text/javascript; charset=utf-8")
        assert body.startswith(f'headrace.load("{name}",'.encode())


@pytest.mark.parametrize("path", ["/data/step-0000099.js", "/../job.json", "/data/..%2fjob.json", "/nothing.js"])
def test_nothing_else_is_served(server: PageServer, path: str) -> None:
    assert get(server, path)[0] == 404


def test_a_name_that_was_made_to_mean_this_machine_is_refused(server: PageServer) -> None:
    assert get(server, "/data/overview.js", host="evil.example:80")[0] == 421


def test_the_command_writes_the_page_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    viewed_run(tmp_path, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert main(["view", "one", "--to", "page"]) == 0
    assert "page/index.html" in capsys.readouterr().out
    assert (tmp_path / "page" / "data" / "overview.js").is_file()


def test_a_page_that_is_written_takes_no_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "one", "--to", str(tmp_path / "page"), "--port", "0"]) == 2
    assert "--port" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def test_a_port_that_is_taken_is_named(
    server: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", "one", "--port", str(server.server_port)]) == 1
    assert str(server.server_port) in capsys.readouterr().err
