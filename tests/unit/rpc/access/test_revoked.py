"""Certificates that the authority signed and that no longer count."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import pytest
from cryptography import x509
from grpc import StatusCode

from headrace.cli.authority import issue_client, issue_service, revoke_client
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.rpc import client
from headrace.rpc.access import revoked, tokens_file
from headrace.rpc.access.access import Tokens
from headrace.rpc.access.certificate import valid_from
from headrace.rpc.access.revoked import FILE, Revoked
from headrace.rpc.access.roles import Role
from headrace.rpc.client import connect
from headrace.rpc.server import RpcServer
from headrace.rpc.tls import VARIABLE, TlsFolder
from tests.support.every_rpc import RPCS, code_of_call, serving_every_rpc

SOON = 60.0
SUBMIT = next(rpc for rpc in RPCS if rpc.method == "SubmitPrompts")
OK, UNKNOWN = StatusCode.OK, StatusCode.UNAUTHENTICATED


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    issue_service(tmp_path / "tls", (), 30)
    return tmp_path / "tls"


async def submit(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> tuple[StatusCode, str]:
    monkeypatch.setenv(VARIABLE, str(folder))
    async with connect(address) as channel:
        return await code_of_call(channel, SUBMIT)


async def test_a_revoked_certificate_and_a_new_one_count_without_a_restart(authority: Path, monkeypatch) -> None:
    """Earlier ones of that client are revoked with it, other clients' are not; the connection may be an older one."""
    earlier = issue_client(authority, "alice", Role.PRODUCER, 30).folder.rename(authority / "earlier")
    latest = issue_client(authority, "alice", Role.PRODUCER, 30).folder
    bob = issue_client(authority, "bob", Role.PRODUCER, 30).folder
    monkeypatch.setenv(VARIABLE, str(latest))
    async with serving_every_rpc(tls=TlsFolder(authority)) as (server, reached), connect(server.address) as open_one:
        assert (await code_of_call(open_one, SUBMIT))[0] is OK
        assert main(["certs", str(authority), "--revoke", "alice"]) == 0
        async with asyncio.timeout(SOON):
            while (await code_of_call(open_one, SUBMIT))[0] is OK:
                await asyncio.sleep(0.02)
        reached.clear()
        for folder in (latest, earlier):
            code, message = await submit(folder, server.address, monkeypatch)
            assert code is UNKNOWN
            assert "the certificate of alice is revoked" in message
            assert "`headrace certs FOLDER --client alice`" in message
        assert not reached
        assert (await submit(bob, server.address, monkeypatch))[0] is OK
        issue_client(authority, "alice", Role.PRODUCER, 30)
        assert (await submit(latest, server.address, monkeypatch))[0] is OK
        assert (await submit(earlier, server.address, monkeypatch))[0] is UNKNOWN


async def test_no_token_helps_a_revoked_certificate(authority: Path, tmp_path: Path, monkeypatch) -> None:
    tokens = tmp_path / "tokens.json"
    monkeypatch.setenv(client.VARIABLE, tokens_file.add(tokens, "bob", Role.ADMIN))
    guests = issue_client(authority, "guests", None, 30).folder
    async with serving_every_rpc(tls=TlsFolder(authority), tokens=Tokens(tokens)) as (server, _):
        assert (await submit(guests, server.address, monkeypatch))[0] is OK
    revoke_client(authority, "guests")
    async with serving_every_rpc(tls=TlsFolder(authority), tokens=Tokens(tokens)) as (server, _):
        assert (await submit(guests, server.address, monkeypatch))[0] is UNKNOWN


def test_what_was_revoked_stays_revoked_while_the_file_is_damaged_or_gone(authority: Path, monkeypatch) -> None:
    monkeypatch.setattr("headrace.disk._LOOK_SECONDS", 0.0)
    pem = (issue_client(authority, "alice", None, 30).folder / "cert.pem").read_bytes()
    alice = {"x509_common_name": [b"alice"], "x509_pem_cert": [pem]}
    held = Revoked(authority)
    assert not held.includes(alice)
    revoke_client(authority, "alice")
    file = authority / FILE
    whole = file.read_text()
    assert held.includes(alice)
    file.write_text("{")
    assert held.includes(alice)
    with pytest.raises(ConfigError, match="is not one that `headrace certs --revoke` wrote"):
        RpcServer("x", "127.0.0.1:0", [], tls=TlsFolder(authority))
    file.unlink()
    assert held.includes(alice)
    assert not Revoked(authority).includes(alice)
    file.write_text(whole.replace("alice", "bob"))
    assert not held.includes(alice)


@pytest.mark.parametrize("text", ["", "[]", '{"revoked": {"a": "never"}}', '{"revoked": {"": "2026-01-01T00:00:00Z"}}'])
def test_a_file_that_is_not_of_revoked_certificates_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match="copy it from the authority's folder"):
        Revoked(tmp_path)


def test_a_clock_that_goes_back_gives_no_certificate_its_validity_back(authority: Path) -> None:
    pem = (issue_client(authority, "alice", None, 30).folder / "cert.pem").read_bytes()
    alice = {"x509_common_name": [b"alice"], "x509_pem_cert": [pem]}
    revoke_client(authority, "alice")
    revoked.add(authority, "alice", datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    assert Revoked(authority).includes(alice)


def test_the_time_of_a_certificate_is_the_one_that_a_library_reads(authority: Path) -> None:
    pems = [authority / "ca.pem", authority / "cert.pem", issue_client(authority, "a", None, 9000).folder / "cert.pem"]
    for pem in (file.read_bytes() for file in pems):
        assert valid_from(pem) == x509.load_pem_x509_certificate(pem).not_valid_before_utc


@pytest.mark.parametrize("cut", [0, 30, 60, 200, 300])
def test_a_certificate_that_cannot_be_read_is_refused_where_its_name_is_revoked(authority: Path, cut: int) -> None:
    pem = (authority / "cert.pem").read_bytes()
    assert valid_from(pem[:cut] + b"\n-----END CERTIFICATE-----\n").year == 1
    revoke_client(authority, "alice")
    assert Revoked(authority).includes({"x509_common_name": [b"alice"], "x509_pem_cert": [pem[:cut]]})


def test_the_command_says_what_it_cannot_revoke(authority: Path, tmp_path: Path, capsys) -> None:
    folder = str(authority)
    assert main(["certs", folder, "--revoke", "alcie"]) == 0
    assert "has no alcie: it counts all the same, so check the name" in capsys.readouterr().out
    for words, said in (
        ([folder, "--revoke", "headrace"], "Make an authority in a new folder"),
        ([folder, "--revoke", "a b"], "cannot be named"),
        ([folder, "--revoke", "a", "--client", "a"], "--revoke makes no certificate"),
        ([str(tmp_path / "absent"), "--revoke", "a"], "has no ca-key.pem"),
    ):
        assert main(["certs", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()
