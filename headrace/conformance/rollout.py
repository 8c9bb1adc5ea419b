"""The promises of RolloutService that can be tried while a run goes on: nothing here changes it."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.conformance.checks import CALL_SECONDS, Check, ask, refused, require, require_serving
from headrace.rpc.client import stream
from headrace.trajectory import check_ranges, pack_column, unpack_column

SERVICE = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name
_TOKENS = 8


@dataclass(frozen=True)
class RolloutSubject:
    channel: Any

    @property
    def stub(self) -> Any:
        return rollout_pb2_grpc.RolloutServiceStub(self.channel)

    async def generate(self, text: str = "1 + 1 =", n: int = 1, **sampling: Any) -> list[_Response]:
        """Returns the responses, put together of their pieces."""
        params = sample_pb2.SamplingParams(**{"max_new_tokens": _TOKENS, "temperature": 1.0, **sampling})
        request = pb.GenerateRequest(text=text, sampling=params, return_tokens=True, n=n)
        return await self.responses(request)

    async def responses(self, request: pb.GenerateRequest) -> list[_Response]:
        pieces: dict[int, list[pb.GenerateResponse]] = defaultdict(list)
        async for reply in stream(self.stub.Generate, request, deadline_seconds=CALL_SECONDS):
            pieces[reply.index].append(reply)
        return [_Response(pieces[index]) for index in sorted(pieces)]


@dataclass(frozen=True)
class _Response:
    pieces: Sequence[pb.GenerateResponse]

    @property
    def tokens(self) -> list[int]:
        return [int(token) for piece in self.pieces for token in unpack_column(piece.tokens)]

    @property
    def log_probs(self) -> list[float]:
        return [float(each) for piece in self.pieces for each in unpack_column(piece.log_probs)]


async def serves(subject: RolloutSubject) -> None:
    """Its health is SERVING, under the name of the service."""
    await require_serving(subject.channel, SERVICE)


async def shows_its_fleet(subject: RolloutSubject) -> None:
    """GetFleet lists each engine once, with a state, and no engine is ahead of the policy version."""
    fleet = await ask(subject.stub.GetFleet, pb.GetFleetRequest())
    ids = [engine.engine_id for engine in fleet.engines]
    require(ids, "there is no engine")
    require(len(set(ids)) == len(ids), f"engines are listed twice: {', '.join(ids)}")
    unknown = [engine.engine_id for engine in fleet.engines if engine.state == pb.ENGINE_STATE_UNSPECIFIED]
    require(not unknown, f"engines without a state: {', '.join(unknown)}")
    ahead = [engine.engine_id for engine in fleet.engines if engine.policy_version > fleet.policy_version]
    require(not ahead, f"engines ahead of policy version {fleet.policy_version}: {', '.join(ahead)}")


async def generates(subject: RolloutSubject) -> None:
    """Generate returns tokens within the limit, a finite log-prob of at most 0 for each, and an end status."""
    (response,) = await subject.generate()
    tokens, log_probs = response.tokens, response.log_probs
    require(1 <= len(tokens) <= _TOKENS, f"{len(tokens)} tokens, where {_TOKENS} were the most")
    require(len(log_probs) == len(tokens), f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    require(np.isfinite(log_probs).all() and max(log_probs) <= 1e-6, f"log-probs {log_probs}")
    status = response.pieces[-1].status
    ends = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)
    require(status in ends, f"the last status is {sample_pb2.SampleStatus.Name(status)}")
    check_ranges("policy_ranges", response.pieces[-1].policy_ranges, len(tokens))


async def returns_each_response(subject: RolloutSubject) -> None:
    """Generate with n = 3 returns three responses, told apart by their index."""
    responses = await subject.generate(n=3)
    require(len(responses) == 3, f"{len(responses)} responses")


async def tokens_are_taken_as_they_are(subject: RolloutSubject) -> None:
    """A prompt as tokens has as many prompt tokens as were sent."""
    column = pack_column("tokens", np.array([1, 2, 3, 4], np.int32))
    params = sample_pb2.SamplingParams(max_new_tokens=2)
    (response,) = await subject.responses(pb.GenerateRequest(tokens=column, sampling=params, return_tokens=True))
    counted = max(piece.prompt_tokens for piece in response.pieces)
    require(counted == 4, f"{counted} prompt tokens, where 4 were sent")


async def refuses_what_no_engine_can_do(subject: RolloutSubject) -> None:
    """A request without a prompt, and sampling parameters out of range, are INVALID_ARGUMENT."""
    with refused("a request without a prompt", "INVALID_ARGUMENT"):
        await subject.responses(pb.GenerateRequest())
    for name, value in (("temperature", -1.0), ("top_p", 2.0), ("temperature", float("nan"))):
        sampling: dict[str, Any] = {name: value}
        with refused(f"{name} {value}", "INVALID_ARGUMENT"):
            await subject.generate(**sampling)


async def an_unknown_publication_has_no_bucket(subject: RolloutSubject) -> None:
    """A bucket of a publication that was never begun is refused."""
    request = pb.PublishBucketRequest(publication_id=f"conformance-{uuid.uuid4().hex}", bucket=0)
    with refused("the bucket", "FAILED_PRECONDITION", "NOT_FOUND", "ABORTED"):
        await ask(subject.stub.PublishBucket, request)


CHECKS: Sequence[Check[RolloutSubject]] = (
    serves,
    shows_its_fleet,
    generates,
    returns_each_response,
    tokens_are_taken_as_they_are,
    refuses_what_no_engine_can_do,
    an_unknown_publication_has_no_bucket,
)
