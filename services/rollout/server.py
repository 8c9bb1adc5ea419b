"""Translates protos to calls of the service's parts and back. While the service starts, calls wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.limits import (
    MAX_DRAIN_SECONDS,
    MAX_ENGINES,
    MAX_LEASES_PER_CALL,
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    MAX_PROBE_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSES,
    MAX_TENSORS,
    cut_text,
    optional_name,
    require_at_most,
    require_finite,
    require_id,
    require_name,
)
from headrace.publication import Probe
from headrace.rpc.client import merged_streams
from headrace.rpc.net import Address
from headrace.trajectory import (
    ROLLOUT_LOG_PROBS,
    TOKENS,
    Status,
    check_log_probs,
    check_row,
    check_token_ids,
    pack_column,
    unpack_column,
)
from services.rollout.admission import Kind, Shares
from services.rollout.agents.hosts import require_hosts
from services.rollout.engine.api import NOTHING_YET, Generation
from services.rollout.engine.fleet import Engine
from services.rollout.engine.replies import Finish
from services.rollout.engine_memory import require_shared
from services.rollout.production.prompts import EncodedPrompt, IncrementalDetokenizer, PromptEncoder
from services.rollout.publication.plan import plan_from_proto
from services.rollout.service import RolloutParts

_WAITING = 4
"""Parts of each response that may wait for a slow reader."""
_DRAIN_SECONDS = 30.0


def probe_from_proto(request: pb.CommitPublishRequest) -> Probe | None:
    """Returns None without a probe. Raises InvalidArgument when its parts contradict each other."""
    if not request.HasField("probe"):
        return None
    tokens = _token_ids(request.probe.tokens, MAX_PROBE_TOKENS, "probe.tokens")
    log_probs = unpack_column(request.probe.log_probs)
    check_row(f"probe {ROLLOUT_LOG_PROBS}", log_probs, len(tokens) - 1)
    check_log_probs("probe.log_probs", log_probs)
    return Probe(tokens, log_probs.tolist(), request.probe.max_mean_difference)


def checksums_from_proto(request: pb.CommitPublishRequest) -> dict[str, str]:
    """Returns checksums by the engine's tensor names. Raises InvalidArgument for a repeated name."""
    require_at_most(len(request.engine_checksums), MAX_TENSORS, "engine_checksums")
    checksums = {
        require_id(c.name, "engine_checksums.name"): require_name(c.checksum, "engine_checksums.checksum")
        for c in request.engine_checksums
    }
    if len(checksums) != len(request.engine_checksums):
        raise InvalidArgument("a tensor has two checksums", field="engine_checksums.name")
    return checksums


def prompt_from_proto(request: pb.GenerateRequest, encoder: PromptEncoder) -> EncodedPrompt:
    """Raises InvalidArgument for a missing or invalid prompt. It tokenizes, so it must not run on an event loop."""
    kind = request.WhichOneof("prompt")
    if kind == "tokens":
        tokens = _token_ids(request.tokens, MAX_PROMPT_TOKENS, "tokens", encoder.vocab_size)
        if not tokens:
            raise InvalidArgument("tokens is empty", field="tokens")
        return EncodedPrompt(encoder.decode(tokens), tokens)
    if kind == "messages":
        require_at_most(len(request.messages.messages), MAX_MESSAGES, "messages")
        return encoder.encode(sample_pb2.Prompt(prompt_id="generate", messages=request.messages))
    if kind == "text":
        return encoder.encode_plain(request.text)
    raise InvalidArgument("one of text, messages and tokens is needed", field="prompt")


def begun_from_proto(request: pb.GenerateRequest, encoder: PromptEncoder) -> Generation:
    """The response that the request continues, without the versions of its tokens. Raises InvalidArgument."""
    if not request.HasField("begun"):
        return NOTHING_YET
    if request.n > 1 or request.sampling.json_schema or request.sampling.regex:
        raise InvalidArgument(
            "begun is one response, and one that follows no json_schema or regex: ask for each with a request of its "
            "own, and begin a constrained one again",
            field="begun",
        )
    tokens = _token_ids(request.begun, MAX_NEW_TOKENS, "begun", encoder.vocab_size)
    return Generation(tokens, (0.0,) * len(tokens), Finish.ABORT, ())


def reward_target_from_proto(request: pb.SetRewardRequest) -> tuple[str | None, str | None]:
    """Returns (address, scorer); None changes nothing. Raises InvalidArgument."""
    address = None
    if request.HasField("address"):
        address = require_id(request.address, "address")
        if Address.parse(address).port == 0:
            raise InvalidArgument(f"address {address} has port 0: name the reward service's", field="address")
    scorer = None
    if request.HasField("scorer"):
        scorer = optional_name(request.scorer, "scorer") or ""
    return address, scorer


def scale_from_proto(request: pb.ScaleFleetRequest) -> tuple[int, float]:
    """Returns the number of engines and the seconds that requests of those that leave have. Raises InvalidArgument."""
    require_at_most(request.num_engines, MAX_ENGINES, "num_engines")
    seconds = request.drain_seconds if request.HasField("drain_seconds") else _DRAIN_SECONDS
    return request.num_engines, require_finite(seconds, "drain_seconds", most=MAX_DRAIN_SECONDS)


def _token_ids(column: sample_pb2.Column, most: int, field: str, vocab_size: int | None = None) -> tuple[int, ...]:
    tokens = unpack_column(column)
    check_row(f"{field} {TOKENS}", tokens)
    require_at_most(len(tokens), most, field)
    check_token_ids(field, tokens, vocab_size)
    return tuple(tokens.tolist())


def generate_response(
    new_text: str, tokens: Sequence[int], log_probs: Sequence[float], *, return_tokens: bool
) -> pb.GenerateResponse:
    """Packs what is new since the message before."""
    response = pb.GenerateResponse(text=new_text)
    if return_tokens:
        response.tokens.CopyFrom(pack_column("tokens", np.asarray(tokens, dtype=np.int32)))
        response.log_probs.CopyFrom(pack_column("rollout_log_probs", np.asarray(log_probs, dtype=np.float32)))
    return response


def finish_response(response: pb.GenerateResponse, generation: Generation, prompt_tokens: int) -> pb.GenerateResponse:
    """Adds the fields of the last message."""
    response.status = (Status.TRUNCATED if generation.finish is Finish.LENGTH else Status.COMPLETED).number
    response.prompt_tokens = prompt_tokens
    response.policy_ranges.extend(
        sample_pb2.PolicyRange(policy_version=r.policy_version, start=r.start, end=r.end)
        for r in generation.policy_ranges
    )
    return response


def engine_to_proto(engine: Engine) -> pb.Engine:
    return pb.Engine(
        engine_id=engine.engine_id,
        address=engine.url,
        state=pb.EngineState.Value(f"ENGINE_STATE_{engine.state.value}"),
        policy_version=engine.policy_version,
        restarts=engine.restarts,
        tensor_parallel_size=engine.shape.tp_size,
        weights_digest=engine.weights_digest,
        trouble=cut_text(engine.trouble),
        group=engine.group,
    )


def requests_to_proto(shares: Shares, kind: Kind) -> pb.Requests:
    return pb.Requests(
        kind=kind.value, in_flight=shares.in_use(kind), waiting=shares.waiting(kind), slots=shares.slots(kind)
    )


Context = grpc.aio.ServicerContext[Any, Any]
_ID = "publication_id"
WAITING = frozenset({"LeaseTasks", "Evaluate"})
"""Methods whose calls wait, or last longer than an ending service does."""


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts

    def of_run(self, request: Message) -> RolloutServicer:
        """That of the run which asks. Raises Unavailable for one that is not here."""
        run = getattr(request, "run", "") if "run" in request.DESCRIPTOR.fields_by_name else ""
        if not run or self._parts.runs is None or isinstance(request, pb.JoinRunRequest | pb.LeaveRunRequest):
            return self
        return RolloutServicer(self._parts.runs.parts_of(require_name(run, "run"), self._parts))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        require_at_most(request.n, MAX_RESPONSES, "n")
        self._parts.slots.require_room(max(1, request.n))
        encoder = self._parts.encoder
        begun = begun_from_proto(request, encoder)
        prompt = await encoder.off_loop(prompt_from_proto, request, encoder)
        async with self._parts.adapter(request.adapter_path) as adapter:
            scored = None
            if request.prompt_log_probs and len(prompt.tokens) > 1:
                scored = np.asarray(await self._parts.score(prompt, adapter), dtype=np.float32)
            responses = [self._response(request, prompt, begun, index, adapter) for index in range(max(1, request.n))]
            async with contextlib.aclosing(merged_streams(responses, _WAITING * len(responses))) as replies:
                async for reply in replies:
                    if scored is not None and reply.status and not reply.index:
                        reply.prompt_log_probs.CopyFrom(pack_column("prompt_log_probs", scored))
                    yield reply

    async def _response(
        self, request: pb.GenerateRequest, prompt: EncodedPrompt, begun: Generation, index: int, adapter: str
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of one of the responses."""
        sampling = sample_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if index and sampling.HasField("seed"):
            sampling.seed += index
        sent_tokens, pieces = len(begun.tokens), IncrementalDetokenizer(self._parts.encoder.decode)
        pieces.next(begun.tokens, is_last=True)
        async with contextlib.aclosing(self._parts.ask(prompt, sampling, begun, adapter)) as answers:
            async for so_far in answers:
                is_last = so_far.finish is not None and so_far.finish.is_final
                if (text := pieces.next(so_far.tokens, is_last=is_last)) is None:
                    continue
                response = generate_response(
                    text,
                    so_far.tokens[sent_tokens:],
                    so_far.log_probs[sent_tokens:],
                    return_tokens=request.return_tokens,
                )
                response.index = index
                sent_tokens = len(so_far.tokens)
                yield finish_response(response, so_far, len(prompt.tokens)) if is_last else response

    async def Evaluate(self, request: pb.EvaluateRequest, context: Context) -> AsyncIterator[pb.EvaluateResponse]:
        self._parts.require_engines()
        async with contextlib.aclosing(self._parts.evaluator.run(request.datasets)) as all_progress:
            async for progress in all_progress:
                samples = [s.pack() for s in progress.samples] if request.return_samples else []
                yield pb.EvaluateResponse(
                    done=progress.done, total=progress.total, results=progress.results, samples=samples
                )

    async def GetFleet(self, request: pb.GetFleetRequest, context: Context) -> pb.GetFleetResponse:
        parts = self._parts
        return pb.GetFleetResponse(
            engines=[engine_to_proto(engine) for engine in parts.fleet.engines],
            router_address=parts.router_url or "",
            policy_version=parts.weights.policy_version,
            paused=parts.producer.paused,
            samples_in_flight=parts.sampler.in_flight,
            groups_produced=parts.metrics.groups_produced,
            tokens_produced=parts.metrics.tokens_produced,
            publication_id=parts.receiver.open_id,
            reward_address=parts.scorer.target.address or "",
            scorer=parts.scorer.target.scorer,
            samples_being_scored=parts.scorer.being_scored,
            warnings=parts.warnings,
            wanted_engines=parts.scaler.wanted,
            groups_in_flight=parts.producer.groups_in_flight,
            max_groups_in_flight=parts.producer.max_groups_in_flight,
            requests=[requests_to_proto(parts.slots.shares, kind) for kind in Kind],
            memory_released=parts.engine_memory is not None and parts.engine_memory.is_trainers,
            adapters=parts.receiver.adapters.held,
            runs=parts.runs.to_protos(parts) if parts.runs else (),
        )

    async def JoinRun(self, request: pb.JoinRunRequest, context: Context) -> pb.JoinRunResponse:
        assert self._parts.runs is not None, "of_run leaves this to the service's own run"
        run = require_name(request.run, "run")
        seconds = await self._parts.runs.join(
            run, request.job_json, optional_name(request.base_digest, "base_digest") or ""
        )
        return pb.JoinRunResponse(lease_seconds=seconds)

    async def LeaveRun(self, request: pb.LeaveRunRequest, context: Context) -> pb.LeaveRunResponse:
        assert self._parts.runs is not None, "of_run leaves this to the service's own run"
        await self._parts.runs.leave(require_name(request.run, "run"))
        return pb.LeaveRunResponse()

    async def ScaleFleet(self, request: pb.ScaleFleetRequest, context: Context) -> pb.ScaleFleetResponse:
        num_engines, drain_seconds = scale_from_proto(request)
        scaled = await self._parts.scaler.scale(num_engines, drain_seconds=drain_seconds)
        return pb.ScaleFleetResponse(
            wanted_engines=scaled.wanted,
            wanted_before=scaled.wanted_before,
            coming_ids=scaled.coming,
            leaving_ids=scaled.leaving,
        )

    async def BeginPublish(self, request: pb.BeginPublishRequest, context: Context) -> pb.BeginPublishResponse:
        self._parts.require_engines()
        begun = await self._parts.receiver.begin(plan_from_proto(request))
        return pb.BeginPublishResponse(world_size=begun.world_size, engine_ids=begun.engine_ids)

    async def PublishBucket(self, request: pb.PublishBucketRequest, context: Context) -> pb.PublishBucketResponse:
        lost = await self._parts.receiver.receive(require_id(request.publication_id, _ID), request.bucket)
        return pb.PublishBucketResponse(lost_engine_ids=lost)

    async def CommitPublish(self, request: pb.CommitPublishRequest, context: Context) -> pb.CommitPublishResponse:
        publication_id, expected = require_id(request.publication_id, _ID), checksums_from_proto(request)
        committed = await self._parts.receiver.commit(publication_id, expected, probe_from_proto(request))
        self._parts.metrics.published(committed.paused_seconds)
        return pb.CommitPublishResponse(
            engine_ids=committed.engine_ids,
            weights_digest=committed.weights_digest,
            lost_engine_ids=committed.lost_engine_ids,
            paused_seconds=committed.paused_seconds,
            busy_share=committed.busy_share,
        )

    async def AbortPublish(self, request: pb.AbortPublishRequest, context: Context) -> pb.AbortPublishResponse:
        why = cut_text(request.reason) or "the trainer aborted it"
        await self._parts.receiver.abort(require_id(request.publication_id, _ID), why)
        return pb.AbortPublishResponse()

    async def PauseProduction(self, request: pb.PauseProductionRequest, context: Context) -> pb.PauseProductionResponse:
        self._parts.producer.pause()
        return pb.PauseProductionResponse(samples_in_flight=self._parts.sampler.in_flight)

    async def ResumeProduction(
        self, request: pb.ResumeProductionRequest, context: Context
    ) -> pb.ResumeProductionResponse:
        self._parts.producer.resume()
        return pb.ResumeProductionResponse()

    async def ReleaseMemory(self, request: pb.ReleaseMemoryRequest, context: Context) -> pb.ReleaseMemoryResponse:
        memory = require_shared(self._parts.engine_memory)
        return pb.ReleaseMemoryResponse(engine_ids=await memory.release(request.epoch))

    async def ResumeMemory(self, request: pb.ResumeMemoryRequest, context: Context) -> pb.ResumeMemoryResponse:
        memory = require_shared(self._parts.engine_memory)
        return pb.ResumeMemoryResponse(engine_ids=await memory.resume(request.epoch))

    async def SetReward(self, request: pb.SetRewardRequest, context: Context) -> pb.SetRewardResponse:
        address, scorer = reward_target_from_proto(request)
        target = await self._parts.scorer.retarget(address=address, scorer=scorer)
        response = pb.SetRewardResponse(address=target.address or "", scorer=target.scorer)
        response.time.FromDatetime(target.since)
        return response

    async def LeaseTasks(self, request: pb.LeaseTasksRequest, context: Context) -> pb.LeaseTasksResponse:
        return await require_hosts(self._parts.agent_hosts).lease(request)

    async def RenewTasks(self, request: pb.RenewTasksRequest, context: Context) -> pb.RenewTasksResponse:
        require_at_most(len(request.lease_ids), MAX_LEASES_PER_CALL, "lease_ids")
        return require_hosts(self._parts.agent_hosts).renew(request)

    async def FinishTask(self, request: pb.FinishTaskRequest, context: Context) -> pb.FinishTaskResponse:
        return require_hosts(self._parts.agent_hosts).finish(request)


# Calls to a service that still starts its engines wait for it; who only looks is answered at once.
# So a restart is a wait for callers, however long engines load, and not a port where nobody answers.

AT_ONCE = frozenset({"GetFleet"})


class WaitUntilStarted:
    """Has the methods of `servicer`, for the run that asks."""

    def __init__(self, servicer: RolloutServicer, started: asyncio.Event) -> None:
        self._servicer = servicer
        self._started = started

    def __getattr__(self, name: str) -> Any:
        is_stream = inspect.isasyncgenfunction(getattr(self._servicer, name))
        return self._stream(name) if is_stream else self._unary(name)

    async def _method(self, name: str, request: Any) -> Any:
        if name not in AT_ONCE:
            await self._started.wait()
        return getattr(self._servicer.of_run(request), name)

    def _unary(self, name: str) -> Any:
        async def call(request: Any, context: Any) -> Any:
            return await (await self._method(name, request))(request, context)

        return call

    def _stream(self, name: str) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing((await self._method(name, request))(request, context)) as replies:
                async for reply in replies:
                    yield reply

        return call
