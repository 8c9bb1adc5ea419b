"""Who a caller is: certificates and tokens together, tokens that come and go, and what nobody sees of them."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from headrace.cli.authority import issue_client, issue_service
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.rpc import client
from headrace.rpc.access import Caller, Role, Tokens, add_token, of_certificate, revoke_token
from headrace.rpc.client import connect
from headrace.rpc.server import RpcServer
from headrace.rpc.tls import VARIABLE, TlsFolder
from tests.support.every_rpc import RPCS, code_of_call, serving_every_rpc
from tests.support.modes import umask

SOON = 60.0
LOOK, SUBMIT, DROP = (
    next(rpc for rpc in RPCS if rpc.method == name) for name in ("GetStats", "SubmitPrompts", "DropGroups")
)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    add_token(file, "another", Role.VIEWER)
    return file


async def codes(address: str) -> list[StatusCode]:
    async with connect(address) as channel:
        return [(await code_of_call(channel, rpc))[0] for rpc in (LOOK, SUBMIT, DROP)]


OK, DENIED, UNKNOWN = StatusCode.OK, StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("certificate", "token", "answers"),
    [
        (Role.PRODUCER, None, [OK, OK, DENIED]),
        (Role.ADMIN, Role.VIEWER, [OK, DENIED, DENIED]),
        (Role.VIEWER, Role.ADMIN, [OK, DENIED, DENIED]),
        (None, Role.PRODUCER, [OK, OK, DENIED]),
        (None, Role.ADMIN, [OK, OK, OK]),
        (None, None, [UNKNOWN] * 3),
        (Role.ADMIN, "unknown", [UNKNOWN] * 3),
        (Role.SERVICE, Role.VIEWER, [OK, OK, DENIED]),
    ],
)
async def test_a_token_narrows_a_certificate_with_a_role_and_replaces_one_without(
    tmp_path: Path, tokens: Path, monkeypatch, certificate, token, answers
) -> None:
    folder = tmp_path / "tls"
    issue_service(folder, (), 30)
    own = folder if certificate is Role.SERVICE else issue_client(folder, "alice", certificate, 30).folder
    monkeypatch.setenv(VARIABLE, str(own))
    if token is not None:
        sent = add_token(tokens, "bob", token) if token in set(Role) else token
        monkeypatch.setenv(client.VARIABLE, sent)
    async with serving_every_rpc(tls=TlsFolder(folder), tokens=Tokens(tokens)) as (server, _):
        assert await codes(server.address) == answers


@pytest.mark.parametrize(
    ("names", "uris", "roles"),
    [
        (["headrace"], [], (Role.SERVICE,)),
        (["alice"], ["urn:headrace:role:viewer"], (Role.VIEWER,)),
        (["headrace"], ["urn:headrace:role:viewer"], (Role.VIEWER,)),
        (["alice"], [], ()),
        (["alice,CN=headrace"], [], ()),
        (["alice"], ["urn:headrace:role:service"], ()),
        (["alice"], ["urn:headrace:role:viewer", "urn:headrace:role:admin"], ()),
    ],
)
def test_a_role_is_read_from_what_the_authority_signed(names, uris, roles) -> None:
    peer = {"x509_common_name": [name.encode() for name in names], "peer_uri": [uri.encode() for uri in uris]}
    assert of_certificate(peer).roles == roles


async def test_a_certificate_without_a_role_is_told_how_to_get_one(tmp_path: Path, monkeypatch) -> None:
    issue_service(tmp_path, (), 30)
    monkeypatch.setenv(VARIABLE, str(issue_client(tmp_path, "alice", None, 30).folder))
    async with serving_every_rpc(tls=TlsFolder(tmp_path)) as (server, _), connect(server.address) as channel:
        code, message = await code_of_call(channel, LOOK)
    assert code is UNKNOWN
    assert "`headrace certs FOLDER --client alice --role ROLE`" in message


async def test_a_revoked_token_and_a_new_one_count_without_a_restart(tmp_path: Path, tokens: Path, monkeypatch) -> None:
    """Also in the client, whose file is replaced while its channel is open."""
    mine = tmp_path / "mine"
    mine.write_text(add_token(tokens, "bob", Role.PRODUCER) + "\n")
    monkeypatch.setenv(client.FILE_VARIABLE, str(mine))
    async with serving_every_rpc(tokens=Tokens(tokens)) as (server, _), connect(server.address) as channel:

        async def until(code: StatusCode) -> None:
            async with asyncio.timeout(SOON):
                while (await code_of_call(channel, SUBMIT))[0] is not code:
                    await asyncio.sleep(0.02)

        await until(OK)
        revoke_token(tokens, "bob")
        await until(UNKNOWN)
        following = add_token(tokens, "bob", Role.VIEWER)
        assert (await code_of_call(channel, SUBMIT))[0] is UNKNOWN
        mine.write_text(following)
        await until(DENIED)
        tokens.write_text("{")
        await until(UNKNOWN)
        tokens.unlink()
        following = add_token(tokens, "bob", Role.PRODUCER)
        mine.write_text(following)
        await until(OK)


def test_the_file_has_no_token_and_is_its_users_alone(tokens: Path) -> None:
    token = add_token(tokens, "bob", Role.ADMIN)
    assert Tokens(tokens).caller_of(token) == Caller("bob", (Role.ADMIN,))
    assert token not in tokens.read_text()
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    assert len(token) > 48


async def test_a_token_is_not_sent_unencrypted_to_another_machine(tokens: Path, monkeypatch) -> None:
    """Nor to 127.0.0.1 under a name that only somebody else's resolver vouches for."""
    monkeypatch.setenv(client.VARIABLE, "secret")
    seen = []
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, interceptors=None, **__: seen.append(interceptors))
    for address in ("127.0.0.1:1", "localhost:1", "127.0.0.1:1|127.0.0.2:1", "10.0.0.5:1", "127.0.0.1:1|10.0.0.5:1"):
        connect(address)
    assert [bool(each) for each in seen] == [True, True, True, False, False]
    for insecure in (False, True):
        with pytest.raises(ConfigError, match="--tls-dir"):
            RpcServer("x", "0.0.0.0:0", [], tokens=Tokens(tokens), insecure=insecure)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"tokens": {"a b": {}}}', '{"tokens": {"a": {"role": "root", "sha256": "0", "added": ""}}}', "\udcff"],
)
def test_a_file_that_is_not_of_tokens_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match="is not one that `headrace tokens` wrote"):
        Tokens(file)
    with pytest.raises(ConfigError, match="headrace tokens add"):
        Tokens(tmp_path / "absent.json")


def test_the_command_adds_lists_and_revokes(tmp_path: Path, capsys) -> None:
    file = str(tmp_path / "tokens.json")
    assert main(["tokens", "add", file, "bob", "--role", "producer"]) == 0
    token = capsys.readouterr().out.strip()
    assert Tokens(Path(file)).caller_of(token) == Caller("bob", (Role.PRODUCER,))
    assert main(["tokens", "list", file]) == 0
    listed = capsys.readouterr().out
    assert "bob  producer  since" in listed
    assert token not in listed
    assert main(["tokens", "revoke", file, "bob"]) == 0
    assert Tokens(Path(file)).caller_of(token) is None
    capsys.readouterr()
    for words, said in (
        (["revoke", file, "bob"], "has no token bob"),
        (["add", file, "a b", "--role", "viewer"], "cannot be named"),
        (["add", file, "bob", "--role", "root"], "use one of viewer"),
        (["add", file, "bob"], "'--role'"),
        (["add", file], "'NAME'"),
    ):
        assert main(["tokens", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["tokens", "add", file, "bob", "--role", "viewer"]) == 0
    assert main(["tokens", "add", file, "bob", "--role", "viewer"]) == 2
    assert "revoke it first" in capsys.readouterr().err


def test_certs_gives_a_client_its_role_and_makes_the_operators(tmp_path: Path, capsys) -> None:
    folder = str(tmp_path / "tls")
    assert main(["certs", folder]) == 0
    assert main(["certs", folder, "--client", "alice", "--role", "viewer"]) == 0
    assert (tmp_path / "tls/clients/operator/cert.pem").is_file()
    assert "client alice (viewer)" in capsys.readouterr().out
    for words in (["--role", "viewer"], ["--client", "a", "--role", "service"], ["--client", "a", "--role", "root"]):
        assert main(["certs", folder, *words]) == 2


SECRETS = {"ca-key.pem", "key.pem", "tokens.json"}


def test_a_umask_that_closes_nothing_leaves_secrets_closed_from_the_start(tmp_path: Path) -> None:
    with umask(0):
        issue_service(tmp_path, [], 1)
        issue_client(tmp_path, "bob", Role.VIEWER, 1)
        add_token(tmp_path / "tokens.json", "eve", Role.VIEWER)
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    secret = {path: mode for path, mode in modes.items() if path.name in SECRETS}
    assert len(secret) == 4
    assert set(secret.values()) == {0o600}
    assert {mode & 0o444 for path, mode in modes.items() if path not in secret} == {0o444}
