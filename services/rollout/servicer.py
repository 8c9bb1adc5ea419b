"""Translates protos to calls of the service's parts and back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.rpc.request_limits import RequestLimits
from headrace.wire.checks import cut_text, require_at_most, require_id
from headrace.wire.limits import MAX_LEASES_PER_CALL, MAX_PUBLISH_FIELDS, MAX_RESPONSES
from services.rollout.admission.shares import Kind
from services.rollout.agents.task_wire import finish_task, lease_tasks, require_hosts
from services.rollout.devices.turn import require_turn
from services.rollout.engine.api import Generation
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.publication.plan import plan_from_proto
from services.rollout.service import RolloutParts
from services.rollout.side_by_side import side_by_side
from services.rollout.text_pieces import TextPieces
from services.rollout.wire import (
    begun_from_proto,
    checksums_from_proto,
    engine_to_proto,
    finish_response,
    generate_response,
    probe_from_proto,
    prompt_from_proto,
    requests_to_proto,
    reward_target_from_proto,
    scale_from_proto,
)

Context = grpc.aio.ServicerContext[Any, Any]
_ID = "publication_id"
REQUEST_LIMITS = RequestLimits(num_fields={"BeginPublish": MAX_PUBLISH_FIELDS, "CommitPublish": MAX_PUBLISH_FIELDS})
WAITING = frozenset({"LeaseTasks", "Evaluate"})
"""Methods whose calls wait, or last longer than an ending service does."""


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        require_at_most(request.n, MAX_RESPONSES, "n")
        self._parts.slots.require_room(max(1, request.n))
        encoder = self._parts.encoder
        begun = begun_from_proto(request, encoder)
        prompt = await encoder.off_loop(prompt_from_proto, request, encoder)
        responses = [self._response(request, prompt, begun, index) for index in range(max(1, request.n))]
        async with contextlib.aclosing(side_by_side(responses)) as replies:
            async for reply in replies:
                yield reply

    async def _response(
        self, request: pb.GenerateRequest, prompt: EncodedPrompt, begun: Generation, index: int
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of one of the responses."""
        sampling = sample_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if index and sampling.HasField("seed"):
            sampling.seed += index
        sent_tokens, pieces = len(begun.tokens), TextPieces(self._parts.encoder.decode)
        pieces.next(begun.tokens, is_last=True)
        async with contextlib.aclosing(self._parts.ask(prompt, sampling, begun)) as answers:
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
            policy_version=parts.fleet.policy_version,
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
            memory_released=parts.turn is not None and parts.turn.is_trainers,
        )

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
        return pb.ReleaseMemoryResponse(engine_ids=await require_turn(self._parts.turn).release(request.epoch))

    async def ResumeMemory(self, request: pb.ResumeMemoryRequest, context: Context) -> pb.ResumeMemoryResponse:
        return pb.ResumeMemoryResponse(engine_ids=await require_turn(self._parts.turn).resume(request.epoch))

    async def SetReward(self, request: pb.SetRewardRequest, context: Context) -> pb.SetRewardResponse:
        address, scorer = reward_target_from_proto(request)
        target = await self._parts.scorer.retarget(address=address, scorer=scorer)
        response = pb.SetRewardResponse(address=target.address or "", scorer=target.scorer)
        response.time.FromDatetime(target.since)
        return response

    async def LeaseTasks(self, request: pb.LeaseTasksRequest, context: Context) -> pb.LeaseTasksResponse:
        return await lease_tasks(require_hosts(self._parts.agent_hosts), request)

    async def RenewTasks(self, request: pb.RenewTasksRequest, context: Context) -> pb.RenewTasksResponse:
        require_at_most(len(request.lease_ids), MAX_LEASES_PER_CALL, "lease_ids")
        hosts = require_hosts(self._parts.agent_hosts)
        return pb.RenewTasksResponse(lost_lease_ids=hosts.renew(request.lease_ids))

    async def FinishTask(self, request: pb.FinishTaskRequest, context: Context) -> pb.FinishTaskResponse:
        return pb.FinishTaskResponse(accepted=finish_task(require_hosts(self._parts.agent_hosts), request))
