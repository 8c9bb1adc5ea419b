"""Tinker's HTTP API: what clients of the package `tinker` ask, and the form of the answers.

A request is answered with its id at once, and `retrieve_future` waits for its outcome.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from headrace.errors import AlreadyExists, HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from headrace.limits import MAX_HTTP_BODY_BYTES
from headrace.rpc.http_server import Gate
from services.trainer.tinker.checkpoints import About
from services.trainer.tinker.journal import QueuedRequest
from services.trainer.tinker.service import Tinker
from services.trainer.tinker.wire import TinkerWire, WeightsInfoRequest, forward_backward, parsed
from services.trainer.tinker.work import TinkerPath

_WAIT_SECONDS = 20.0
"""Of one `retrieve_future`; the client asks again, and has 45 s for each."""
_STATUS: Mapping[type[HeadraceError], int] = {
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    AlreadyExists: 409,
    InvalidArgument: 422,
}
_OF_A_MODEL = {
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
}
_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": True,
    "sample_cancel_enabled": True,
    "custom_loss_server_side": False,
}
"""What the client shall use: whole JSON Web Tokens, uploads and stability records are not here."""
Handler = Callable[[Request, bytes], Awaitable[Response]]


class TinkerHttp:
    """`names`: what clients may call the base; the first is what it is called here."""

    def __init__(
        self, tinker: Tinker, wire: TinkerWire, gate: Gate, names: list[str], tokenizer: Path, max_tokens: int | None
    ) -> None:
        self._tinker = tinker
        self._wire = wire
        self._gate = gate
        self._names = names
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def application(self) -> Starlette:
        posts: dict[str, Handler] = {
            "client/config": partial(_fixed, _CONFIG),
            "client/dynamic_config": partial(_fixed, _CONFIG),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_several,
            "weights_info": self._weights_info,
            "telemetry": partial(_fixed, {"status": "accepted"}),  # clients report their use; it is not kept
            **{kind: partial(self._of_model, kind, message) for kind, message in _OF_A_MODEL.items()},
        }
        gets: dict[str, Handler] = {
            "healthz": partial(_fixed, {"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._get_sampler,
            "training_runs/{model_id}/checkpoints": self._list_checkpoints,
            "checkpoints": self._list_checkpoints,
        }
        routes = [
            Route(f"/api/v1/{path}", self._guarded(handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for path, handler in handlers.items()
        ]
        path = "/api/v1/training_runs/{model_id}/checkpoints/{checkpoint_id:path}"
        routes.append(Route(path, self._guarded(self._delete_checkpoint), methods=["DELETE"]))
        routes.append(Route("/{path:path}", self._guarded(self._unknown), methods=["GET", "POST", "PUT", "DELETE"]))
        return Starlette(routes=routes)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                coding = request.headers.get("content-encoding")
                body = await self._gate.body(request, "SaveCheckpoint", has_key=False, codings=("zstd",))
                return await handler(request, _unpacked(body) if coding == "zstd" else body)
            except HeadraceError as error:
                status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 429)
                return JSONResponse({"detail": error.message, "reason": error.reason}, status_code=status)

        return answer

    async def _unknown(self, request: Request, _: bytes) -> Response:
        raise NotFound(f"{request.method} {request.url.path} is not served here: see docs/tinker.md for what is")

    async def _capabilities(self, _: Request, __: bytes) -> Response:
        models = [
            {"model_name": name, "max_context_length": self._max_tokens, "trainable": True, "sampleable": True}
            for name in self._names
        ]
        return JSONResponse({"supported_models": models})

    async def _create_session(self, _: Request, body: bytes) -> Response:
        parsed(types.CreateSessionRequest, body)
        return JSONResponse({"session_id": self._tinker.open_session(), "type": "create_session"})

    async def _heartbeat(self, _: Request, body: bytes) -> Response:
        request = parsed(types.SessionHeartbeatRequest, body)
        try:
            self._tinker.heartbeat(request.session_id)
        except NotFound as error:
            return JSONResponse({"detail": error.message}, status_code=410)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, _: bytes) -> Response:
        await self._tinker.end_session(request.path_params["session_id"])
        return JSONResponse({})

    async def _create_model(self, _: Request, body: bytes) -> Response:
        request = parsed(types.CreateModelRequest, body)
        self._require_base(request.base_model)
        spec = self._wire.spec(request)
        return _future(self._tinker.create(request.session_id, request.model_seq_id, "create_model", body, spec))

    async def _load_weights(self, _: Request, body: bytes) -> Response:
        request = parsed(types.LoadWeightsRequest, body)
        spec, _file = self._tinker.checkpoints.trained(TinkerPath.parse(request.path))
        if request.base_model is not None:
            self._require_base(request.base_model)
        if request.session_id is None or request.model_seq_id is None:
            return self._ask(request.model_id, request.seq_id, "load_weights", body)
        return _future(self._tinker.create(request.session_id, request.model_seq_id, "load_weights", body, spec))

    async def _get_info(self, _: Request, body: bytes) -> Response:
        model = self._tinker.model(parsed(types.GetInfoRequest, body).model_id)
        about = {"arch": "unknown", "model_name": self._names[0], "tokenizer_id": str(self._tokenizer)}
        return JSONResponse(
            {
                "type": "get_info",
                "model_data": about,
                "model_id": model.model_id,
                "is_lora": True,
                "lora_rank": model.spec.rank,
                "model_name": self._names[0],
            }
        )

    async def _forward_backward(self, _: Request, body: bytes) -> Response:
        request = forward_backward(body)
        self._wire.work("forward_backward", body)  # what is wrong is said now
        return self._ask(request.model_id, request.seq_id, "forward_backward", body)

    async def _create_sampler(self, _: Request, body: bytes) -> Response:
        request = parsed(types.CreateSamplingSessionRequest, body)
        if request.model_path is None:
            self._require_base(request.base_model)
        sampler = self._tinker.add_sampler(request.session_id, request.sampling_session_seq_id, request.model_path)
        return JSONResponse({"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"})

    async def _get_sampler(self, request: Request, _: bytes) -> Response:
        sampler = self._tinker.sampler(request.path_params["sampler_id"])
        about = {"sampler_id": sampler.sampler_id, "base_model": self._names[0], "model_path": sampler.path}
        return JSONResponse(about)

    async def _sample(self, _: Request, body: bytes) -> Response:
        request = parsed(types.SampleRequest, body)
        if request.sampling_session_id is None or request.seq_id is None:
            raise InvalidArgument("sampling_session_id and seq_id are needed", field="sampling_session_id")
        self._wire.work("sample", body)
        asked = self._tinker.ask_sample(request.sampling_session_id, request.seq_id, body)
        names = [f"{asked.request_id}:{number}" for number in range(request.num_samples)]
        return JSONResponse({"request_id": asked.request_id, "sample_sequence_ids": names})

    async def _cancel(self, _: Request, body: bytes) -> Response:
        self._tinker.cancel(parsed(types.FutureRetrieveRequest, body).request_id)
        return JSONResponse({})

    async def _retrieve(self, _: Request, body: bytes) -> Response:
        request_id = parsed(types.FutureRetrieveRequest, body).request_id
        outcome = await self._tinker.outcome(request_id, _WAIT_SECONDS)
        if outcome is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        return Response(outcome.body, media_type=outcome.media_type)

    async def _retrieve_several(self, _: Request, body: bytes) -> Response:
        request = parsed(types.FuturesRetrieveRequest, body)
        seconds = _WAIT_SECONDS if request.timeout is None else min(request.timeout, _WAIT_SECONDS)
        sampler_id, since = request.target.sampling_session_id, request.prev_cursor
        found = await self._tinker.completions(sampler_id, since, seconds)
        completions = [
            {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": num_bytes}
            for request_id, num_bytes in found
        ]
        return JSONResponse({"completions": completions, "cursor": since + len(found)})

    async def _weights_info(self, _: Request, body: bytes) -> Response:
        path = TinkerPath.parse(parsed(WeightsInfoRequest, body).tinker_path)
        spec = self._tinker.checkpoints.about(path).spec
        return JSONResponse(
            {
                "base_model": self._names[0],
                "is_lora": True,
                "lora_rank": spec.rank,
                "train_unembed": False,
                "train_mlp": spec.train_mlp,
                "train_attn": spec.train_attn,
            }
        )

    async def _list_checkpoints(self, request: Request, _: bytes) -> Response:
        model_id = request.path_params.get("model_id")
        checkpoints = self._tinker.checkpoints
        found = checkpoints.all() if model_id is None else checkpoints.of_model(model_id)
        return JSONResponse({"checkpoints": [_described(each) for each in found], "cursor": None})

    async def _delete_checkpoint(self, request: Request, _: bytes) -> Response:
        values = request.path_params
        self._tinker.checkpoints.remove(TinkerPath.parse(f"tinker://{values['model_id']}/{values['checkpoint_id']}"))
        return Response(status_code=204)

    async def _of_model(self, kind: str, message: Any, _: Request, body: bytes) -> Response:
        request = parsed(message, body)
        self._wire.work(kind, body)
        return self._ask(request.model_id, request.seq_id, kind, body)

    def _ask(self, model_id: str | None, seq_id: int | None, kind: str, body: bytes) -> Response:
        if model_id is None or seq_id is None or seq_id < 1:
            raise InvalidArgument(f"{kind} needs model_id and a seq_id of 1 or more", field="seq_id")
        return _future(self._tinker.ask(model_id, seq_id, kind, body))

    def _require_base(self, name: str | None) -> None:
        if name not in self._names:
            raise InvalidArgument(
                f"base_model {name!r} is not served: it is {' or '.join(self._names)} here", field="base_model"
            )


async def _fixed(content: Mapping[str, object], _: Request, __: bytes) -> Response:
    return JSONResponse(content)


def _future(asked: QueuedRequest) -> Response:
    return JSONResponse({"request_id": asked.request_id, "model_id": asked.owner})


def _unpacked(body: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            found = reader.read(4 * MAX_HTTP_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise InvalidArgument(f"the body is not compressed with zstd: {error}") from error
    if len(found) > 4 * MAX_HTTP_BODY_BYTES:
        raise InvalidArgument(f"the body has more than {4 * MAX_HTTP_BODY_BYTES:,} bytes", reason="BODY_TOO_LARGE")
    return found


def _described(about: About) -> dict[str, Any]:
    path = TinkerPath.parse(about.path)
    expires = None if about.expires is None else datetime.fromtimestamp(about.expires, UTC).isoformat()
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": "training" if path.kind == "weights" else "sampler",
        "time": about.time.isoformat(),
        "tinker_path": about.path,
        "user_metadata": about.user_metadata,
        "expires_at": expires,
    }
