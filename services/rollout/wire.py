"""Translates protos to plain values and back, for the servicer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.probe import Probe
from headrace.rpc.net import Address
from headrace.sample_checks import ROLLOUT_LOG_PROBS, TOKENS, check_log_probs, check_row, check_token_ids
from headrace.trajectory import Status, pack_column, unpack_column
from headrace.wire.checks import cut_text, optional_name, require_at_most, require_finite, require_id, require_name
from headrace.wire.limits import (
    MAX_DRAIN_SECONDS,
    MAX_ENGINES,
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    MAX_PROBE_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_TENSORS,
)
from services.rollout.admission.shares import Kind, Shares
from services.rollout.engine.answers.response import Finish
from services.rollout.engine.api import NOTHING_YET, Generation
from services.rollout.engine.fleet import Engine
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder

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
        tensor_parallel_size=engine.tensor_parallel_size,
        weights_digest=engine.weights_digest,
        trouble=cut_text(engine.trouble),
        group=engine.group,
    )


def requests_to_proto(shares: Shares, kind: Kind) -> pb.Requests:
    return pb.Requests(
        kind=kind.value, in_flight=shares.in_use(kind), waiting=shares.waiting(kind), slots=shares.slots(kind)
    )
