"""The part of SGLang's HTTP API that headrace uses. Every call has a time limit; failures are headrace's errors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from headrace.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from headrace.publication import TensorSpec
from headrace.rpc.net import routed_by
from services.rollout.engine.api import GroupJoin, PromptImages, SamplingParams
from services.rollout.engine.http import Http
from services.rollout.engine.replies import (
    BadAnswer,
    Checksums,
    Done,
    EngineLoad,
    EngineResponse,
    ExpectedReply,
    ModelInfo,
    ServerInfo,
    read_load,
    read_response,
    read_scores,
)

_CONTROL_SECONDS = 30.0
D = TypeVar("D", bound=Done)
# A token is its id, its text, and [log-prob, id, null]: some 60 bytes, more where its text is escaped.
_BYTES_PER_ANSWER = 64 << 10
_BYTES_PER_TOKEN = 256
_FURTHER_EVENTS = 16  # of a stream, beside one for each token
_BYTES_PER_ROUTED_TOKEN = 32 << 10  # base64 of 4 bytes for each layer and chosen expert
_BYTES_PER_KEPT_TOKEN = 12  # its id, a comma, and blanks
_TO_NOBODY = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}  # SGLang's FAKE_BOOTSTRAP_HOST
_POLICY = "target"  # a draft model has other weights of the same names, which "all" would overwrite
_MASK_TOO_LARGE = "sampling-mask-max-tokens"  # SGLang names its flag where more tokens are kept


class EngineClient:
    """One engine, or the router (which knows /generate only), at http://host:port.

    With `routed_experts` it asks for the experts of every token, too; the engine must have been started for that.
    `mask_tokens`: how many tokens of each sampling mask the engine returns at most; 0: it returns none.
    """

    def __init__(
        self, url: str, *, routed_experts: bool = False, mask_tokens: int = 0, vocab_size: int | None = None
    ) -> None:
        self.url = url
        self._mask_tokens = mask_tokens
        self._further = {"return_routed_experts": True} if routed_experts else {}
        self._bytes_per_token = _BYTES_PER_ROUTED_TOKEN if routed_experts else _BYTES_PER_TOKEN
        self._vocab_size = vocab_size
        self._http = Http(url)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_key: str,
        seconds: float,
        priority: int | None = None,
        images: PromptImages | None = None,
        routing_key: str | None = None,
        sampling_mask: bool = False,
        adapter: str = "",
    ) -> EngineResponse:
        """Returns response tokens with log-probs. `cache_key` keeps prefixes of other weights apart.

        With an `adapter` the tokens are of the weights with its name, whatever the engine calls its own.
        The router sends requests of one `routing_key` to one engine. With `sampling_mask` the response says which
        tokens each one was sampled from; the parameters need a top_k for that.
        Raises BadAnswer for an impossible response, InvalidArgument when the engine refuses the request, and
        ResourceExhausted when a sampling mask has more tokens than the engine returns.
        """
        body = self._generate_body(tokens, params, request_id, cache_key, images, adapter)
        expected = replace(self._expected(tokens, params, images), has_sampling_mask=sampling_mask, adapter=adapter)
        if sampling_mask:
            body["return_sampling_mask"] = True
        if priority is not None:
            body["priority"] = priority
        reply = await self._http.request(
            "POST",
            "/generate",
            body,
            seconds=seconds,
            max_bytes=self._answer_bytes(expected),
            headers=routed_by(routing_key),
        )
        try:
            answer = read_response(reply.success(), expected)
        except InvalidArgument as error:
            if _MASK_TOO_LARGE not in error.message:
                raise
            raise ResourceExhausted(
                f"{error.message}: raise --sglang-sampling-mask-max-tokens, or lower --rollout-top-k",
                reason="SAMPLING_MASK_TOO_LARGE",
            ) from error
        if answer.finish is None:
            raise BadAnswer("finish_reason", "a whole answer without a finish_reason")
        return answer

    async def stream(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_key: str,
        seconds: float,
        images: PromptImages | None = None,
        routing_key: str | None = None,
        adapter: str = "",
    ) -> AsyncGenerator[EngineResponse, None]:
        """Yields all tokens so far, again and again; the last response has `finish`. Raises as `generate` does.

        Once the engine's weights have changed, only the last response says which token is of which weights: those
        between are left out.
        """
        body = {**self._generate_body(tokens, params, request_id, cache_key, images, adapter), "stream": True}
        expected = replace(self._expected(tokens, params, images), adapter=adapter)
        events = self._http.events(
            "/generate",
            body,
            seconds=seconds,
            max_bytes=self._answer_bytes(expected),
            max_events=params.max_new_tokens + _FURTHER_EVENTS,
            headers=routed_by(routing_key),
        )
        first_name: str | None = None
        async with contextlib.aclosing(events):
            async for event in events:
                answer = read_response(event, expected)
                if answer.finish is not None:
                    yield answer
                    return
                if answer.spans:
                    first_name = first_name or answer.spans[0].name
                    if answer.spans[-1].name == first_name:
                        yield answer
        raise BadAnswer("cut_short", "a stream that ended without a finish_reason")

    async def score(
        self,
        tokens: Sequence[int],
        *,
        cache_key: str,
        seconds: float,
        adapter: str = "",
        is_prefill: bool = False,
    ) -> list[float]:
        """Returns log-probs of all tokens but the first, at temperature 1. Raises BadAnswer.

        A prefill engine gives no decode engine anything of it.
        """
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": cache_key,
            **_with(adapter),
            **(_TO_NOBODY if is_prefill else {}),
        }
        max_bytes = _BYTES_PER_ANSWER + _BYTES_PER_TOKEN * len(tokens)
        reply = await self._http.request("POST", "/generate", body, seconds=seconds, max_bytes=max_bytes)
        return read_scores(reply.success(), tokens)

    async def weights_name(self, *, seconds: float = 5.0) -> str:
        """Returns the name of the weights that the engine serves. It is the cheapest health check."""
        reply = await self._http.request("GET", "/model_info", None, seconds=seconds)
        return reply.decode(ModelInfo).weight_version

    async def num_requests(self, *, seconds: float = 5.0) -> int:
        """Returns the number of requests that run or wait, as the engine noted it a moment ago."""
        found = await self.load(seconds=seconds)
        return found.running + found.waiting

    async def num_ranks(self, *, seconds: float) -> int:
        """Returns the number of its ranks. Raises BadAnswer when it says something else."""
        found = await self.server_info(seconds=seconds)
        return found.tp_size * found.pp_size

    async def server_info(self, *, seconds: float) -> ServerInfo:
        """Returns the arguments with which it was started. Raises BadAnswer."""
        reply = await self._http.request("GET", "/server_info", None, seconds=seconds)
        return reply.decode(ServerInfo)

    async def load(self, *, seconds: float) -> EngineLoad:
        """Returns its requests, running and waiting, and how full its cache is. Raises BadAnswer."""
        path = "/v1/loads?include=core,queues"
        return read_load((await self._http.request("GET", path, None, seconds=seconds)).success())

    async def pause(self, mode: str) -> None:
        """`mode` is `in_place`, `retract` or `abort`."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abort_all(self) -> None:
        """Ends every request; their responses have finish `abort`."""
        await self._tell("/abort_request", {"abort_all": True})

    async def abort(self, request_id: str) -> None:
        """Ends one request, whose response has finish `abort`; does nothing where the engine does not have it."""
        await self._tell("/abort_request", {"rid": request_id})

    async def freeze_gc(self) -> None:
        """Leaves what the engine holds now out of its garbage collections, one of which is in every `flush_cache`.

        SGLang asks this of itself when it starts, but only once: where its server is not yet listening, it gives up.
        """
        await self._tell("/freeze_gc", {})

    async def flush_cache(self) -> bool:
        """Empties the prefix cache. Returns False when SGLang refuses, because requests are in flight."""
        try:
            await self._tell("/flush_cache", {})
        except InvalidArgument:
            return False
        return True

    async def release_memory(self, *, seconds: float) -> None:
        """Gives weights, caches and graphs up on the device. It must be idle, and may not be asked twice."""
        await self._tell("/release_memory_occupation", {}, seconds)

    async def resume_memory(self, *, seconds: float) -> None:
        """Takes back what it released, with nothing in it: it needs weights before it may generate."""
        await self._tell("/resume_memory_occupation", {}, seconds)

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
        """Raises FailedPrecondition when the engine is in no such group."""
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        """Opens the session in which buckets are received."""
        await self._post("/begin_weight_update", {"selector": _POLICY})

    async def end_weight_update(self) -> None:
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
                "selector": _POLICY,
            },
            seconds,
        )

    async def load_folder(self, folder: str, *, seconds: float) -> None:
        """Loads a Hugging Face folder on the engine's machine in place of all its weights. It must be paused.

        Raises InvalidArgument when the engine finds no weights there: it then has those that it had.
        """
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
        await self._post("/update_weights_from_disk", body, seconds)

    async def load_adapter(self, name: str, folder: str, *, seconds: float) -> None:
        """Loads a folder of peft's on the engine's machine beside its weights. Raises InvalidArgument."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": folder}, seconds)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Returns once its last request has ended. Raises InvalidArgument where there is no such adapter."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, seconds)

    async def checksums(self, *, skipped: Sequence[str] = (), seconds: float = 120.0) -> list[dict[str, str]]:
        """Returns name → checksum for each tensor-parallel rank, but for names that contain one of `skipped`.

        The engine generates nothing meanwhile.
        """
        body = {"action": "checksum", "skip_tensor_list": list(skipped)}
        reply = await self._post("/weights_checker", body, seconds, reply=Checksums)
        if not skipped and not all(rank.checksums for rank in reply.ranks):
            raise BadAnswer("checksums", "a rank without checksums")
        return [dict(rank.checksums) for rank in reply.ranks]

    async def name_weights(self, name: str) -> None:
        """Names the weights; requests in flight go on and carry both names."""
        await self._post("/update_weight_version", {"new_version": name, "abort_all_requests": False})

    def _generate_body(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        request_id: str,
        cache_key: str,
        images: PromptImages | None,
        adapter: str,
    ) -> dict[str, Any]:
        return {
            "input_ids": list(tokens),
            "sampling_params": params.for_engine(),
            "return_logprob": True,
            "rid": request_id,
            "extra_key": cache_key,
            **self._further,
            **(images.body(tokens) if images else {}),
            **_with(adapter),
        }

    def _expected(self, tokens: Sequence[int], params: SamplingParams, images: PromptImages | None) -> ExpectedReply:
        return ExpectedReply(len(tokens), params.max_new_tokens, self._vocab_size, has_images=images is not None)

    def _answer_bytes(self, expected: ExpectedReply) -> int:
        tokens = expected.max_new_tokens + (expected.num_prompt_tokens if self._further else 0)
        of_masks = _BYTES_PER_KEPT_TOKEN * self._mask_tokens * expected.max_new_tokens
        return _BYTES_PER_ANSWER + self._bytes_per_token * tokens + of_masks

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        seconds: float = _CONTROL_SECONDS,
        *,
        reply: type[D] = Done,  # type: ignore[assignment]
    ) -> D:
        """Raises FailedPrecondition for a refusal, which may have status 200."""
        found = (await self._http.request("POST", path, body, seconds=seconds)).decode(reply)
        if not found.success:
            raise FailedPrecondition(f"{path} was refused: {found.message[:500]}", reason="ENGINE_REFUSED")
        return found

    async def _tell(self, path: str, body: Mapping[str, Any], seconds: float = _CONTROL_SECONDS) -> None:
        """For what answers with text."""
        (await self._http.request("POST", path, body, seconds=seconds)).require_success()


def _with(adapter: str) -> dict[str, str]:
    return {"lora_path": adapter} if adapter else {}
