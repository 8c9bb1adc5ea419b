"""A run on loopback whose callers show tokens: its services, its operator, and those who may only look."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.cli.main import main
from headrace.rpc.access import Role, add_token
from headrace.rpc.client import FILE_VARIABLE, VARIABLE
from headrace.rpc.net import free_port
from tests.unit.cli.test_tls_of_runs import START_SECONDS, Up, callers_in, until_serving


async def test_a_run_with_tokens_file_is_reached_with_its_tokens_and_they_are_written_nowhere(
    job_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    file, own = tmp_path / "tokens.json", tmp_path / "services-token"
    tokens = {role: add_token(file, f"a-{role}", role) for role in Role}
    own.write_text(tokens[Role.SERVICE])
    address = f"127.0.0.1:{free_port()}"
    words = ["submit", "--buffer-address", address, "--prompt", "1 + 1 =", "--label", "2"]
    monkeypatch.setenv(FILE_VARIABLE, str(own))
    async with Up(tmp_path, job_file, "--tokens-file", str(file), "--buffer-address", address) as process:
        await until_serving(address, process)
        monkeypatch.delenv(FILE_VARIABLE)
        for token, said in (
            (tokens[Role.PRODUCER], None),
            (tokens[Role.VIEWER], "a-viewer has the role viewer, which may not call BufferService.SubmitPrompts"),
            ("of-another-run", "the token is none of the job's tokens_file"),
            (None, "it came without a token"),
        ):
            monkeypatch.delenv(VARIABLE, raising=False)
            if token is not None:
                monkeypatch.setenv(VARIABLE, token)
            assert await asyncio.to_thread(main, words) == (1 if said else 0)
            assert (said or "") in capsys.readouterr().err
    (run,) = (tmp_path / "runs").iterdir()
    assert callers_in(run / "logs/buffer.log") == [("a-viewer", "viewer"), ("", "none"), ("", "none")]
    written = [path for path in (*run.rglob("*"), tmp_path / "up.log") if path.is_file()]
    assert run / "job.json" in written
    for token in (*tokens.values(), "of-another-run"):
        assert [path for path in written if token.encode() in path.read_bytes()] == []


async def test_services_without_certificates_do_not_start_without_a_token_of_their_own(
    job_file: Path, tmp_path: Path, monkeypatch
) -> None:
    file = tmp_path / "tokens.json"
    monkeypatch.setenv(VARIABLE, add_token(file, "bob", Role.ADMIN))
    async with Up(tmp_path, job_file, "--tokens-file", str(file)) as process:
        assert await asyncio.wait_for(process.wait(), START_SECONDS) != 0
    said = (tmp_path / "up.log").read_text()
    assert "bob has the role admin" in said
    assert "--role service` prints one" in said
