"""Bodies of Tinker's HTTP API, as the package `tinker` defines them: its messages are the protocol.

The only module here that knows the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import HeadraceError, InvalidArgument
from services.trainer.tinker.journal import Outcome
from services.trainer.tinker.losses import loss_of
from services.trainer.tinker.work import (
    AdamParams,
    Completion,
    Create,
    Datum,
    ForwardBackward,
    Load,
    LoraSpec,
    Losses,
    Sample,
    Save,
    TinkerPath,
    Work,
    is_name,
)

JSON, PROTOBUF = "application/json", "application/x-protobuf"
_MAX_SAMPLES = 128
_MOST_SEED = (1 << 31) - 1
Message = TypeVar("Message", bound=BaseModel)


class WeightsInfoRequest(BaseModel):
    """The package has no message for it."""

    tinker_path: str


def parsed(kind: type[Message], body: bytes) -> Message:
    """A JSON body as one of the package's messages. Raises InvalidArgument."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidArgument(f"{kind.__name__}: {field}: {first['msg']}", field=field) from None


def forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises InvalidArgument."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidArgument(f"forward_backward: the body is no ForwardBackwardRequest: {error}") from None


class TinkerWire:
    """`vocab_size` and `max_rank` are the base's; `max_tokens` is the engines' context."""

    def __init__(self, *, vocab_size: int, max_rank: int, max_tokens: int | None) -> None:
        self._vocab_size = vocab_size
        self._max_rank = max_rank
        self._max_tokens = max_tokens

    def work(self, kind: str, body: bytes) -> Work:
        match kind:
            case "create_model":
                return Create()
            case "load_weights":
                request = parsed(types.LoadWeightsRequest, body)
                return Load(TinkerPath.parse(request.path), request.optimizer)
            case "forward_backward":
                return self._forward_backward(forward_backward(body))
            case "optim_step":
                return _adam(parsed(types.OptimStepRequest, body))
            case "save_weights":
                return _save(parsed(types.SaveWeightsRequest, body))
            case "save_weights_for_sampler":
                return _save_for_sampler(parsed(types.SaveWeightsForSamplerRequest, body))
            case "sample":
                return self._sample(parsed(types.SampleRequest, body))
        raise AssertionError(f"no endpoint takes {kind}")

    def spec(self, request: types.CreateModelRequest) -> LoraSpec:
        """Raises InvalidArgument for a model that cannot be here."""
        if request.optimizer_config.type != "adamw":
            raise InvalidArgument(
                f"optimizer {request.optimizer_config.type!r} is not served: use adamw", field="optimizer_config"
            )
        if (lora := request.lora_config) is None:
            raise InvalidArgument("lora_config is missing: only LoRA is trained here", field="lora_config")
        if not 1 <= lora.rank <= self._max_rank:
            raise InvalidArgument(
                f"rank {lora.rank} is outside 1 … {self._max_rank}: serve with a larger --lora-rank",
                field="lora_config.rank",
            )
        if not (lora.train_attn or lora.train_mlp):
            raise InvalidArgument(
                "train_attn and train_mlp are both off: nothing is left to train", field="lora_config"
            )
        seed = lora.seed if lora.seed is not None else int(np.random.default_rng().integers(_MOST_SEED))
        return LoraSpec(lora.rank, seed, lora.train_attn, lora.train_mlp)

    def computed(self, losses: Losses) -> Outcome:
        rows = losses.log_probs
        field = pb.BatchedTensor(
            data=b"".join(rows),
            offsets=np.cumsum([0, *map(len, rows)], dtype="<i8").tobytes(),
            dtype=pb.DTYPE_FLOAT32,
        )
        record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(rows))
        output = pb.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": losses.loss}
        )
        return Outcome(PROTOBUF, output.SerializeToString())

    def sampled(self, responses: Sequence[Completion], prompt: Sequence[float] | None) -> Outcome:
        message = pb.SampleResponse(
            sequences=[
                pb.SampledSequence(
                    stop_reason=pb.STOP_REASON_STOP if each.is_stopped else pb.STOP_REASON_LENGTH,
                    tokens=np.asarray(each.tokens, dtype="<i4").tobytes(),
                    logprobs=np.asarray(each.log_probs, dtype="<f4").tobytes(),
                )
                for each in responses
            ]
        )
        if prompt is not None:
            message.prompt_logprobs = np.asarray([np.nan, *prompt], dtype="<f4").tobytes()
        return Outcome(PROTOBUF, message.SerializeToString())

    def done(self, **values: object) -> Outcome:
        return Outcome(JSON, orjson.dumps(values))

    def failed(self, error: HeadraceError) -> Outcome:
        category = "user" if error.status in _USERS else "server"
        return self.done(error=error.message, category=category)

    def _forward_backward(self, request: pb.ForwardBackwardRequest) -> ForwardBackward:
        given: dict[str, float | str] = dict(request.loss_fn_config)
        for name, value in request.loss_fn_config_v2.items():
            given[name] = value.text if value.WhichOneof("value") == "text" else value.number
        loss, settings = loss_of(request.loss_fn, given)
        if not request.data:
            raise InvalidArgument("data is empty", field="data")
        data = [self._datum(number, datum, loss.columns) for number, datum in enumerate(request.data)]
        return ForwardBackward(data, request.loss_fn, settings, backward=not request.forward_only)

    def _datum(self, number: int, datum: pb.Datum, columns: Sequence[str]) -> Datum:
        chunks = []
        for chunk in datum.model_input:
            if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
                raise InvalidArgument(f"data[{number}] has a chunk of {kind}: only text is trained here", field="data")
            chunks.append(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4"))
        tokens = np.concatenate(chunks) if chunks else np.zeros(0, dtype="<i4")
        if not len(tokens) or (self._max_tokens is not None and len(tokens) > self._max_tokens):
            most = "" if self._max_tokens is None else f", and may have 1 … {self._max_tokens}"
            raise InvalidArgument(f"data[{number}] has {len(tokens)} tokens{most}", field="data")
        targets = _column(number, datum.loss_fn_inputs, "target_tokens", len(tokens))
        for name, ids in (("model_input", tokens), ("target_tokens", targets)):
            if ids.min() < 0 or ids.max() >= self._vocab_size:
                raise InvalidArgument(
                    f"data[{number}].{name} has a token outside 0 … {self._vocab_size - 1}", field="data"
                )
        found = {name: _column(number, datum.loss_fn_inputs, name, len(tokens)) for name in columns}
        for name, values in found.items():
            if not np.isfinite(values).all():
                raise InvalidArgument(f"data[{number}].{name} has a value that is not finite", field="data")
        return Datum(
            tokens.astype("<i4").tobytes(),
            targets.astype("<i4").tobytes(),
            {name: values.astype("<f4").tobytes() for name, values in found.items()},
        )

    def _sample(self, request: types.SampleRequest) -> Sample:
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(request, name):
                raise InvalidArgument(f"{name} is not served", field=name)
        if request.record_stability_info:
            raise InvalidArgument(
                "record_stability_info is for loss_fn stable_reinforce, which is not served: leave both out",
                field="record_stability_info",
            )
        if request.prompt_logprobs_last_n is not None:
            raise InvalidArgument(
                "prompt_logprobs_last_n is not served: leave it out, which scores the whole prompt",
                field="prompt_logprobs_last_n",
            )
        if not 1 <= request.num_samples <= _MAX_SAMPLES:
            raise InvalidArgument(
                f"num_samples {request.num_samples} is outside 1 … {_MAX_SAMPLES}", field="num_samples"
            )
        tokens: list[int] = []
        for chunk in request.prompt.chunks:
            if not isinstance(chunk, types.EncodedTextChunk):
                raise InvalidArgument("the prompt has a chunk that is not text: only text is served", field="prompt")
            tokens += chunk.tokens
        if not tokens or min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise InvalidArgument(f"the prompt has no token, or one outside 0 … {self._vocab_size - 1}", field="prompt")
        return Sample(tokens, request.num_samples, _params(request.sampling_params), bool(request.prompt_logprobs))


_USERS = (
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
)
"""The statuses of what a client can change"""


def _column(number: int, columns: Mapping[str, Any], name: str, size: int) -> np.ndarray[Any, Any]:
    if name not in columns:
        raise InvalidArgument(f"data[{number}] has no {name}", field=name)
    tensor = columns[name]
    kind = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8"}.get(tensor.dtype)
    if kind is None or tensor.WhichOneof("encoding") != "dense" or len(tensor.shape) > 1:
        raise InvalidArgument(f"data[{number}].{name} must be dense float32 or int64 of one dimension", field=name)
    values = np.frombuffer(tensor.dense, dtype=kind)
    if len(values) != size:
        raise InvalidArgument(f"data[{number}].{name} has {len(values)} entries for {size} tokens", field=name)
    return values


def _adam(request: types.OptimStepRequest) -> AdamParams:
    params = request.optim_params
    if not isinstance(params, types.AdamParams):
        raise InvalidArgument(f"optimizer {params.type!r} is not served: use AdamParams", field="optim_params")
    for name, least, most in (
        ("learning_rate", 0.0, 1e3),
        ("beta1", 0.0, 1.0),
        ("beta2", 0.0, 1.0),
        ("eps", 0.0, 1.0),
        ("weight_decay", 0.0, 1e3),
        ("grad_clip_norm", 0.0, 1e9),
    ):
        if not least <= (value := getattr(params, name)) <= most or (name.startswith("beta") and value == 1.0):
            raise InvalidArgument(f"{name} {value} is outside {least:g} … {most:g}", field=name)
    return AdamParams(
        params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm
    )


def _save(request: types.SaveWeightsRequest) -> Save:
    return Save(
        _name(request.path),
        for_sampler=False,
        ttl_seconds=request.ttl_seconds,
        overwrite=request.overwrite,
        user_metadata=request.user_metadata,
    )


def _save_for_sampler(request: types.SaveWeightsForSamplerRequest) -> Save:
    if request.kind != "snapshot":
        raise InvalidArgument(
            f"kind {request.kind!r} is not served: samplers keep the weights they began with", field="kind"
        )
    if request.path is None and request.sampling_session_seq_id is None:
        raise InvalidArgument("path or sampling_session_seq_id is needed", field="path")
    return Save(
        _name(request.path),
        for_sampler=True,
        sampler_seq=request.sampling_session_seq_id,
        ttl_seconds=request.ttl_seconds,
        user_metadata=request.user_metadata,
    )


def _name(path: str | None) -> str | None:
    if path is not None and not is_name(path):
        raise InvalidArgument(
            f"{path[:200]!r} is no name of a checkpoint: letters, digits, '_', '-' and '.', at most 128", field="path"
        )
    return path


def _params(params: types.SamplingParams) -> sample_pb2.SamplingParams:
    message = sample_pb2.SamplingParams(temperature=params.temperature, top_p=params.top_p)
    if params.max_tokens is not None:
        message.max_new_tokens = params.max_tokens
    if params.seed is not None:
        message.seed = params.seed
    if params.top_k != -1:
        message.top_k = params.top_k
    stop = params.stop
    if isinstance(stop, str):
        message.stop.append(stop)
    elif stop is not None:
        if not stop:
            raise InvalidArgument("stop=[] is not served: responses end at the end of the text", field="stop")
        for each in stop:
            message.stop.append(each) if isinstance(each, str) else message.stop_token_ids.append(each)
    return message
