"""Each RPC is in the table of roles, and each cell is what a server does: with certificates, and with tokens."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.authority import issue_client, issue_service
from headrace.limits import syntax_tree
from headrace.rpc.access import ALLOWED, Role, Tokens, add_token, roles_of
from headrace.rpc.client import connect
from headrace.rpc.tls import VARIABLE, TlsFolder
from tests.support.every_rpc import RPCS, code_of_call, serving_every_rpc
from tools import roles

NOT_A_MESSAGE = b"\xff\xff\xff"


def test_the_table_has_each_rpc_of_the_protocol_and_no_other() -> None:
    assert {(rpc.service, rpc.method) for rpc in RPCS} == {(name, each) for name, of in ALLOWED.items() for each in of}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    issue_service(folder, (), 30)
    for role in (each for each in Role if each is not Role.SERVICE):
        issue_client(folder, f"a-{role}", role, 30)
    return folder


async def calls_are_as_the_table_says(address: str, role: Role, name: str, reached: list[str]) -> None:
    async with connect(address) as channel:
        for rpc in RPCS:
            reached.clear()
            code, message = await code_of_call(channel, rpc)
            if role in roles_of(rpc.service, rpc.method):
                assert (code, reached) == (StatusCode.OK, [rpc.path]), (rpc, message)
                continue
            assert (code, reached) == (StatusCode.PERMISSION_DENIED, []), rpc
            assert f"{name} has the role {role}, which may not call" in message
            assert f"{rpc.method}: " in message
            assert "admin" in message
            assert (await code_of_call(channel, rpc, NOT_A_MESSAGE))[0] is StatusCode.PERMISSION_DENIED, "it is read"


@pytest.mark.parametrize("role", Role)
async def test_each_cell_with_certificates(authority: Path, monkeypatch, role: Role) -> None:
    monkeypatch.setenv(VARIABLE, str(authority if role is Role.SERVICE else authority / f"clients/a-{role}"))
    name = "headrace" if role is Role.SERVICE else f"a-{role}"
    async with serving_every_rpc(tls=TlsFolder(authority)) as (server, reached):
        await calls_are_as_the_table_says(server.address, role, name, reached)


async def test_without_certificates_and_tokens_everybody_may_call_everything() -> None:
    async with serving_every_rpc() as (server, reached), connect(server.address) as channel:
        for rpc in RPCS:
            assert await code_of_call(channel, rpc) == (StatusCode.OK, "")
        assert reached == [rpc.path for rpc in RPCS]


async def test_without_a_token_nothing_is_reached_but_health(tmp_path: Path) -> None:
    add_token(tmp_path / "tokens.json", "bob", Role.ADMIN)
    held = Tokens(tmp_path / "tokens.json")
    async with serving_every_rpc(tokens=held) as (server, reached), connect(server.address) as channel:
        for rpc in RPCS:
            code, message = await code_of_call(channel, rpc, NOT_A_MESSAGE)
            assert (code, reached) == (StatusCode.UNAUTHENTICATED, []), rpc
            assert "HEADRACE_TOKEN_FILE" in message
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60.0)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_each_service_gives_its_server_what_callers_are_known_by() -> None:
    found = {}
    for path in (roles.PAGE.parents[1] / "services").rglob("*.py"):
        for node in ast.walk(syntax_tree(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "RpcServer":
                found[path.parts[-3:]] = {each.arg for each in node.keywords}
    assert len(found) == 4
    assert [path for path, given in found.items() if not given >= {"tls", "tokens", "insecure"}] == []
