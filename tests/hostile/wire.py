"""A client of all services that was written from the protos alone: it shares nothing else with headrace.

It imports the generated messages and gRPC, packs samples by itself, and retries nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.reward.v1 import reward_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2

BUFFER: ServiceDescriptor = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"]
ROLLOUT: ServiceDescriptor = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
REWARD: ServiceDescriptor = reward_pb2.DESCRIPTOR.services_by_name["RewardService"]
TRAINER: ServiceDescriptor = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]

_OPTIONS = [("grpc.max_receive_message_length", 300 << 20), ("grpc.max_send_message_length", 300 << 20)]


@dataclass(frozen=True)
class Reply:
    """What came back: messages of a stream, or one; `reason` and `retry_after` from the error's details."""

    code: grpc.StatusCode
    messages: tuple[Any, ...] = ()
    message: str = ""
    reason: str = ""
    field: str = ""

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK


class Refused(Exception):
    """A call that was not answered OK."""

    def __init__(self, method: str, reply: Reply) -> None:
        super().__init__(f"{method}: {reply.code.name} {reply.reason} {reply.message[:300]}")
        self.code = reply.code
        self.reason = reply.reason
        self.message = reply.message


class Wire:
    """One channel to one service."""

    def __init__(self, address: str, service: ServiceDescriptor) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._methods = dict(service.methods_by_name)

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ask(self, name: str, request: Message, *, seconds: float = 30.0) -> Any:
        """The answer of a unary call. Raises Refused."""
        return (await self._whole(name, request, seconds))[0]

    async def ask_all(self, name: str, request: Message, *, seconds: float = 60.0) -> Sequence[Any]:
        """All answers of a stream that ends. Raises Refused."""
        return await self._whole(name, request, seconds)

    async def _whole(self, name: str, request: Message, seconds: float) -> tuple[Any, ...]:
        reply = await self.send(self._methods[name], request.SerializeToString(), seconds=seconds)
        if not reply.ok:
            raise Refused(name, reply)
        return reply.messages

    async def send(
        self,
        method: MethodDescriptor,
        data: bytes,
        *,
        seconds: float,
        most_messages: int | None = None,
        wait_for_ready: bool = False,
    ) -> Reply:
        """Sends the bytes as they are. Of a stream at most so many messages are read; then it is cancelled."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        parse = GetMessageClass(method.output_type).FromString
        messages: list[Any] = []
        try:
            if not method.server_streaming:
                unary = self._channel.unary_unary(path, None, parse)
                messages.append(await unary(data, timeout=seconds, wait_for_ready=wait_for_ready))
                return Reply(grpc.StatusCode.OK, tuple(messages))
            stream = self._channel.unary_stream(path, None, parse)
            call = stream(data, timeout=seconds, wait_for_ready=wait_for_ready)
            async for message in call:
                messages.append(message)
                if len(messages) == most_messages:
                    call.cancel()
                    break
        except grpc.aio.AioRpcError as error:
            return _reply_of(error, messages)
        return Reply(grpc.StatusCode.OK, tuple(messages))


def _reply_of(error: grpc.aio.AioRpcError, messages: list[Any]) -> Reply:
    reason = field = ""
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for packed in status_pb2.Status.FromString(value).details:
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            if packed.Unpack(info):
                reason = info.reason
            elif packed.Unpack(bad):
                field = bad.field_violations[0].field
    return Reply(error.code(), tuple(messages), error.details() or "", reason, field)


def sha256_digest(payload: bytes) -> bytes:
    """A multihash."""
    return b"\x12\x20" + hashlib.sha256(payload).digest()


def payload(tokens: Sequence[int], response: int, *, text: str = "ok") -> bytes:
    """A SamplePayload whose last `response` tokens are the response."""

    def column(name: str, dtype: sample_pb2.Dtype.ValueType, code: str, values: Sequence[float]) -> sample_pb2.Column:
        return sample_pb2.Column(
            name=name, dtype=dtype, shape=[len(values)], data=struct.pack(f"<{len(values)}{code}", *values)
        )

    return sample_pb2.SamplePayload(
        prompt="?",
        response=text,
        columns=[
            column("tokens", sample_pb2.DTYPE_INT32, "i", tokens),
            column("loss_mask", sample_pb2.DTYPE_UINT8, "B", [1] * response),
            column("rollout_log_probs", sample_pb2.DTYPE_FLOAT32, "f", [-0.5] * response),
        ],
    ).SerializeToString()


def sample(
    sample_id: str, group_id: str, index: int, version: int, *, reward: float = 1.0, body: bytes = b""
) -> sample_pb2.Sample:
    """A finished sample of three prompt and two response tokens; `body` is another payload of that shape."""
    body = body or payload([1, 2, 3, 10 + index, 5], 2)
    envelope = sample_pb2.SampleEnvelope(
        sample_id=sample_id,
        group_id=group_id,
        index=index,
        rollout_id=sample_id,
        status=sample_pb2.SAMPLE_STATUS_COMPLETED,
        reward=reward,
        prompt_tokens=3,
        response_tokens=2,
        trained_tokens=2,
        policy_ranges=[sample_pb2.PolicyRange(policy_version=version, start=0, end=2)],
        digest=sha256_digest(body),
        payload_bytes=len(body),
    )
    return sample_pb2.Sample(envelope=envelope, payload=body)
