"""Protos to plain values and back, for the servicer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.trajectory import Status, pack_column, unpack_column
from services.rollout.engine.api import Finish, Generation, TensorSpec
from services.rollout.engine.fleet import Engine
from services.rollout.prompts import EncodedPrompt, PromptEncoder
from services.rollout.publication.canary import Canary
from services.rollout.publication.state import GroupPlan, Plan

_PAUSE_MODES: Mapping[pb.PauseMode.ValueType, str] = {
    pb.PAUSE_MODE_UNSPECIFIED: "in_place",
    pb.PAUSE_MODE_IN_PLACE: "in_place",
    pb.PAUSE_MODE_RETRACT: "retract",
    pb.PAUSE_MODE_ABORT: "abort",
}
_COLLECTIVE = (pb.TRANSPORT_UNSPECIFIED, pb.TRANSPORT_COLLECTIVE)
_BACKENDS = ("gloo", "nccl")


def plan_of(request: pb.BeginPublishRequest) -> Plan:
    """Raises InvalidArgument for what this service does not do, or what contradicts itself."""
    if request.transport not in _COLLECTIVE:
        name = pb.Transport.Name(request.transport)
        raise InvalidArgument(f"{name} is not built yet: use TRANSPORT_COLLECTIVE", field="transport")
    if request.backend not in _BACKENDS:
        raise InvalidArgument(f"backend {request.backend!r} is not one of {', '.join(_BACKENDS)}", field="backend")
    if request.pause_mode not in _PAUSE_MODES:
        raise InvalidArgument(f"pause_mode {request.pause_mode} is not known", field="pause_mode")
    buckets: dict[int, list[TensorSpec]] = {}
    latest = 0
    for tensor in request.manifest.tensors:
        if tensor.bucket < latest:
            raise InvalidArgument(f"{tensor.name}: bucket {tensor.bucket} after {latest}", field="manifest.tensors")
        latest = tensor.bucket
        buckets.setdefault(latest, []).append(TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype))
    return Plan(
        publication_id=request.publication_id,
        epoch=request.epoch,
        policy_version=request.policy_version,
        pause_mode=_PAUSE_MODES[request.pause_mode],
        backend=request.backend,
        deadline_seconds=request.deadline_seconds,
        buckets=buckets,
        groups=[GroupPlan(g.name, g.master_address, g.master_port, tuple(g.buckets), g.joined) for g in request.groups],
        engine_ids=tuple(request.engine_ids),
    )


def canary_of(request: pb.CommitPublishRequest) -> Canary | None:
    """None where none is asked for. Raises InvalidArgument when its parts contradict each other."""
    if not request.HasField("canary"):
        return None
    canary = request.canary
    tokens, log_probs = unpack_column(canary.tokens), unpack_column(canary.log_probs)
    return Canary(tokens.tolist(), log_probs.tolist(), canary.max_mean_difference)


def prompt_of(request: pb.GenerateRequest, encoder: PromptEncoder) -> EncodedPrompt:
    """Raises InvalidArgument without a prompt."""
    kind = request.WhichOneof("prompt")
    if kind == "tokens":
        tokens = tuple(int(token) for token in unpack_column(request.tokens))
        if not tokens:
            raise InvalidArgument("tokens is empty", field="tokens")
        return EncodedPrompt(encoder.decode(tokens), tokens)
    if kind == "messages":
        return encoder.encode(sample_pb2.Prompt(prompt_id="generate", messages=request.messages))
    if kind == "text":
        return encoder.encode_plain(request.text)
    raise InvalidArgument("one of text, messages and tokens is needed", field="prompt")


def generate_response(
    new_text: str, tokens: Sequence[int], log_probs: Sequence[float], *, return_tokens: bool
) -> pb.GenerateResponse:
    """What came since the message before."""
    response = pb.GenerateResponse(text=new_text)
    if return_tokens:
        response.tokens.CopyFrom(pack_column("tokens", np.asarray(tokens, dtype=np.int32)))
        response.log_probs.CopyFrom(pack_column("rollout_log_probs", np.asarray(log_probs, dtype=np.float32)))
    return response


def finish_response(response: pb.GenerateResponse, generation: Generation, prompt_tokens: int) -> pb.GenerateResponse:
    """Makes a message the last one."""
    response.status = (Status.TRUNCATED if generation.finish is Finish.LENGTH else Status.COMPLETED).number
    response.prompt_tokens = prompt_tokens
    response.policy_ranges.extend(
        sample_pb2.PolicyRange(policy_version=r.policy_version, start=r.start, end=r.end)
        for r in generation.policy_ranges
    )
    return response


def engine_of(engine: Engine) -> pb.Engine:
    """An engine as GetFleet shows it."""
    return pb.Engine(
        engine_id=engine.engine_id,
        address=engine.url,
        state=pb.EngineState.Value(f"ENGINE_STATE_{engine.state.value}"),
        policy_version=engine.policy_version,
        restarts=engine.restarts,
        tensor_parallel_size=engine.tensor_parallel_size,
        weights_digest=engine.weights_digest,
    )
