"""SGLang's HTTP API, as much of it as we use. Every call has a time limit; failures are headrace's errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

import httpx

from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from services.rollout.engine.api import Generation, GroupJoin, SamplingParams, TensorSpec

_CONTROL_SECONDS = 30.0
_CONNECT_SECONDS = 5.0


class EngineClient:
    """One engine, or the router (which knows /generate only), at http://host:port.

    With `routed_experts` it answers with the experts of every token too; the engine must have been started so.
    """

    def __init__(self, url: str, *, routed_experts: bool = False) -> None:
        self.url = url
        self._further = {"return_routed_experts": True} if routed_experts else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Plain HTTP on a private address: without verify=False, loading certificates blocks the event loop for 50 ms.
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, limits=limits)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, request_id: str, cache_key: str, seconds: float
    ) -> Generation:
        """Response tokens with log-probs. `cache_key` keeps prefixes made by other weights apart."""
        body = self._generate_body(tokens, params, request_id, cache_key)
        return Generation.from_engine(await self._post("/generate", body, seconds))

    async def stream(
        self, tokens: Sequence[int], params: SamplingParams, *, request_id: str, cache_key: str, seconds: float
    ) -> AsyncIterator[Generation]:
        """All tokens so far, again and again; the last one has `finish`."""
        body = {**self._generate_body(tokens, params, request_id, cache_key), "stream": True}
        try:
            async with self._http.stream("POST", "/generate", json=body, timeout=_timeout(seconds)) as response:
                if response.is_error:
                    await response.aread()
                    _raise_for(response)
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield Generation.from_engine(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            raise self._unreachable("/generate", error, seconds) from error

    async def score(self, tokens: Sequence[int], *, cache_key: str, seconds: float) -> list[float]:
        """Log-probs of all tokens but the first, at temperature 1. Raises Unavailable when they are others'."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": cache_key,
        }
        reply = await self._post("/generate", body, seconds)
        scored = reply["meta_info"]["input_token_logprobs"][1:]
        if [token for _, token, _ in scored] != list(tokens[1:]):
            raise Unavailable(f"{self.url} scored {len(scored)} other tokens than the {len(tokens) - 1} asked about")
        return [float(log_prob) for log_prob, _, _ in scored]

    async def weight_version(self, *, seconds: float = 5.0) -> str:
        """The version it believes to serve; the cheapest sign of life."""
        reply = await self._request("GET", "/model_info", None, seconds)
        return str(reply["weight_version"])

    async def pause(self, mode: str) -> None:
        """`in_place`, `retract` or `abort`."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Ends a pause."""
        await self._post("/continue_generation", {})

    async def abort_all(self) -> None:
        """Ends every request; they answer with finish `abort`."""
        await self._request("POST", "/abort_request", {"abort_all": True}, _CONTROL_SECONDS, wants_json=False)

    async def flush_cache(self) -> bool:
        """Forgets prefixes. False when requests are in flight: SGLang refuses then."""
        try:
            await self._request("POST", "/flush_cache", {}, _CONTROL_SECONDS, wants_json=False)
        except InvalidArgument:
            return False
        return True

    async def join_group(self, join: GroupJoin, *, seconds: float) -> None:
        """Waits until all members have joined."""
        await self._post(
            "/init_weights_update_group",
            {
                "master_address": join.master_address,
                "master_port": join.master_port,
                "rank_offset": join.rank_offset,
                "world_size": join.world_size,
                "group_name": join.name,
                "backend": join.backend,
            },
            seconds,
        )

    async def leave_group(self, name: str) -> None:
        """Gives the group up. FailedPrecondition when it is in no such group."""
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        """Opens the session that buckets need."""
        await self._post("/begin_weight_update", {"selector": "all"})

    async def end_weight_update(self) -> None:
        """Closes it."""
        await self._post("/end_weight_update", {})

    async def receive_bucket(self, group: str, tensors: Sequence[TensorSpec], *, seconds: float) -> None:
        """Takes part in the broadcast of one flattened bucket and loads it."""
        await self._post(
            "/update_weights_from_distributed",
            {
                "names": [t.name for t in tensors],
                "dtypes": [t.dtype for t in tensors],
                "shapes": [list(t.shape) for t in tensors],
                "group_name": group,
                "flush_cache": False,
                "load_format": "flattened_bucket",
            },
            seconds,
        )

    async def checksums(self, *, seconds: float = 120.0) -> list[dict[str, str]]:
        """Name → checksum of every tensor, for each tensor-parallel rank."""
        reply = await self._post("/weights_checker", {"action": "checksum"}, seconds)
        return [dict(rank["checksums"]) for rank in reply["ranks"]]

    async def set_weight_version(self, version: int) -> None:
        """Stamps the weights; requests in flight go on and carry both versions."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _generate_body(
        self, tokens: Sequence[int], params: SamplingParams, request_id: str, cache_key: str
    ) -> dict[str, Any]:
        return {
            "input_ids": list(tokens),
            "sampling_params": params.for_engine(),
            "return_logprob": True,
            "rid": request_id,
            "extra_key": cache_key,
            **self._further,
        }

    async def _post(self, path: str, body: dict[str, Any], seconds: float = _CONTROL_SECONDS) -> Any:
        return await self._request("POST", path, body, seconds)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, *, wants_json: bool = True
    ) -> Any:
        try:
            response = await self._http.request(method, path, json=body, timeout=_timeout(seconds))
        except httpx.TransportError as error:
            raise self._unreachable(path, error, seconds) from error
        _raise_for(response)
        return response.json() if wants_json else None

    def _unreachable(self, path: str, error: httpx.TransportError, seconds: float) -> Exception:
        if isinstance(error, httpx.ReadTimeout):
            return DeadlineExceeded(f"{self.url}{path} did not answer within {seconds:g} s")
        return Unavailable(f"{self.url}{path}: {type(error).__name__} {error}", reason="ENGINE_UNREACHABLE")


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS), pool=None)


def _raise_for(response: httpx.Response) -> None:
    if not response.is_error:
        return
    text = response.text[:500]
    path = response.request.url.path
    if response.status_code == 400 and '"success":false' in text:
        raise FailedPrecondition(f"{path} was refused: {text}", reason="ENGINE_REFUSED")
    if response.status_code < 500 and response.status_code not in (408, 429):
        raise InvalidArgument(f"{path} answered {response.status_code}: {text}", reason="ENGINE_REFUSED")
    raise Unavailable(f"{path} answered {response.status_code}: {text}", reason="ENGINE_UNREACHABLE")
