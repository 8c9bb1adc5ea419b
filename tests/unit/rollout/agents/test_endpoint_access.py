"""The endpoint with certificates and tokens, as the `openai` package sees it: gRPC's roles, in OpenAI's errors."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.responses import Response

from headrace.cli.authority import issue_client, issue_service
from headrace.errors import ConfigError, NotFound
from headrace.rpc import http_server as gate
from headrace.rpc.access import Access, Role, Tokens, add_token, revoke_token, roles_of
from headrace.rpc.http_server import EndpointServer, Gate
from headrace.rpc.tls import TlsFolder
from services.rollout.agents.endpoint import SERVICE, Endpoint

ROLLOUT = "headrace.api.rollout.v1.RolloutService"
QUESTION: Any = [{"role": "user", "content": "2 + 2?"}]
SOON = 60.0


class Sessions:
    """There is one, `known`; what reaches a session was allowed."""

    def find(self, session_id: str | None) -> str:
        if session_id not in (None, "known"):
            raise NotFound("no such session")
        return session_id or "new"


class Reached(Endpoint):
    """Answers in place of a policy."""

    async def _respond(self, request: Request, session: Any, body: bytes, dialect: Any) -> Response:
        return Response(b'{"id": "1", "object": "chat.completion", "choices": [], "model": "m", "created": 0}')


@dataclass
class Place:
    folder: Path
    tokens: Path
    url: str = ""

    def context(self, client: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        if client:
            context.load_cert_chain(client / "cert.pem", client / "key.pem")
        return context

    def client(self, api_key: str = "none", of: Path | None = None) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(verify=self.context(of))
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, http_client=http, max_retries=0)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    issue_service(tmp_path / "tls", (), 30)
    add_token(tmp_path / "tokens.json", "first", Role.VIEWER)
    return Place(tmp_path / "tls", tmp_path / "tokens.json")


@asynccontextmanager
async def serving(place: Place, *, tls: bool = True, tokens: bool = True) -> AsyncIterator[Place]:
    access = Access(has_certificates=tls, tokens=Tokens(place.tokens) if tokens else None)
    endpoint = Reached(cast(Any, Sessions()), cast(Any, None), cast(Any, None), "m", Gate(SERVICE, access))
    server = EndpointServer(endpoint.application(), tls=TlsFolder(place.folder) if tls else None)
    await server.start()
    place.url = server.url
    try:
        yield place
    finally:
        await server.stop()


async def chat(client: openai.AsyncOpenAI) -> int:
    """The status; who is refused is told so in OpenAI's form."""
    async with client:
        try:
            await client.chat.completions.create(model="m", messages=QUESTION)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            status, said = error.status_code, (error.type, error.code)
        else:
            return 200
    assert (
        said
        == {401: ("authentication_error", "invalid_api_key"), 403: ("permission_error", "permission_denied")}[status]
    )
    return status


@pytest.mark.parametrize("tls", [True, False])
async def test_a_token_is_an_api_key_and_each_role_may_ask_what_generate_lets_it(place: Place, tls: bool) -> None:
    keys = {role: add_token(place.tokens, f"a-{role}", role) for role in Role}
    async with serving(place, tls=tls):
        assert place.url.startswith("https://" if tls else "http://")
        for role, key in keys.items():
            assert await chat(place.client(key)) == (200 if role in roles_of(ROLLOUT, "Generate") else 403), role
        assert await chat(place.client("headrace_unknown")) == 401
        async with place.client(keys[Role.VIEWER]) as viewer:
            assert [each.id async for each in viewer.models.list()] == ["m"]


async def test_a_token_is_also_an_x_api_key_and_a_refusal_has_anthropics_form(place: Place) -> None:
    key = add_token(place.tokens, "c", Role.CONSUMER)
    async with serving(place, tls=False), httpx.AsyncClient(base_url=place.url) as http:
        for shown, status in ((key, 200), ("headrace_unknown", 401)):
            response = await http.post("/v1/messages", json={}, headers={"x-api-key": shown})
            assert response.status_code == status
    assert response.json()["error"]["type"] == "authentication_error"


async def test_a_certificate_has_the_role_that_it_has_in_grpc(place: Place) -> None:
    async with serving(place, tokens=False):
        assert await chat(place.client()) == 401
        assert await chat(place.client(of=place.folder)) == 200
        for role in (each for each in Role if each is not Role.SERVICE):
            folder = issue_client(place.folder, f"a-{role}", role, 30).folder
            expected = 200 if role in roles_of(ROLLOUT, "Generate") else 403
            assert await chat(place.client(of=folder)) == expected, role
        assert await chat(place.client(of=issue_client(place.folder, "guests", None, 30).folder)) == 401


async def test_certificate_and_token_must_both_allow_it(place: Place) -> None:
    viewer = issue_client(place.folder, "v", Role.VIEWER, 30).folder
    guest = issue_client(place.folder, "g", None, 30).folder
    key = add_token(place.tokens, "c", Role.CONSUMER)
    async with serving(place):
        assert await chat(place.client(key, of=viewer)) == 403
        assert await chat(place.client(key, of=guest)) == 200


async def test_who_shows_nothing_or_another_authoritys_certificate_is_refused(place: Place, tmp_path: Path) -> None:
    issue_service(tmp_path / "other", (), 30)
    async with serving(place):
        async with httpx.AsyncClient(verify=place.context()) as http:
            refused = await http.post(f"{place.url}/v1/chat/completions", json={})
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert "without a certificate and without a token" in refused.json()["error"]["message"]
            assert "api_key" in refused.json()["error"]["message"]
        with pytest.raises(openai.APIConnectionError):
            await chat(place.client(of=tmp_path / "other"))
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
                await stranger.get(f"{place.url}/v1/models")


async def test_a_sessions_address_is_its_key(place: Place) -> None:
    async with serving(place), httpx.AsyncClient(verify=place.context()) as http:
        assert (await http.post(f"{place.url}/sessions/known/v1/chat/completions")).status_code == 200
        assert (await http.post(f"{place.url}/sessions/guess/v1/chat/completions")).status_code == 404


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        ("Content-Encoding: gzip", b"x", 415),
        ("Content-Length: 99999999", b"", 413),
        ("Transfer-Encoding: chunked", b"2\r\n{}\r\n", 408),
    ],
)
async def test_what_is_too_large_packed_or_never_ends_is_refused_by_name(
    place: Place, monkeypatch, head: str, body: bytes, status: int
) -> None:
    monkeypatch.setattr(gate, "MAX_HTTP_BODY_SECONDS", 0.3)
    async with serving(place, tls=False, tokens=False):
        answer = await said(place, f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b'"error"' in answer


async def said(place: Place, request: bytes) -> bytes:
    """All that is answered until the server ends the connection."""
    host, port = place.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = bytearray()
    async with asyncio.timeout(SOON):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                answer += data
                if b"\r\n\r\n" in answer and b'"error"' in answer:
                    break
    writer.close()
    return bytes(answer)


async def test_renewed_certificates_and_tokens_count_without_a_restart(place: Place) -> None:
    async with serving(place):
        key = add_token(place.tokens, "late", Role.CONSUMER)
        await until(lambda: chat(place.client(key)), 200)
        revoke_token(place.tokens, "late")
        await until(lambda: chat(place.client(key)), 401)
        before = await shown_certificate(place)
        issue_service(place.folder, (), 30)
        await until(lambda: shown_certificate(place), before, differs=True)


async def until(ask: Any, wanted: Any, *, differs: bool = False) -> None:
    """Waits for an answer that changes by itself."""
    end = time.monotonic() + SOON
    while True:
        answer = await ask()
        if (answer != wanted) if differs else (answer == wanted):
            return
        assert time.monotonic() < end, answer
        await asyncio.sleep(0.1)


async def shown_certificate(place: Place) -> bytes:
    host, port = place.url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=place.context())
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


def test_the_endpoint_is_refused_where_others_reach_it_unencrypted(place: Place) -> None:
    openai_host = "10.1.2.3"
    server = EndpointServer(None, 8000, host=openai_host)
    with pytest.raises(ConfigError, match=r"--tls-dir FOLDER.*pass --insecure"):
        server.require_private()
    server.require_private(insecure=True)
    with pytest.raises(ConfigError, match="tokens would travel unencrypted"):
        server.require_private(insecure=True, has_tokens=True)
    with pytest.raises(ConfigError, match=r"not for 10\.1\.2\.3.*--host 10\.1\.2\.3"):
        EndpointServer(None, 8000, host="10.1.2.3", tls=TlsFolder(place.folder))
    issue_service(place.folder, ("10.1.2.3",), 30)
    encrypted = EndpointServer(None, 8000, host="10.1.2.3", tls=TlsFolder(place.folder))
    encrypted.require_private(has_tokens=True)
    assert encrypted.url == "https://10.1.2.3:8000"
