"""An engine without a model, for fast tests: SGLang's HTTP API, deterministic tokens, and faults on demand.

A token follows from all tokens before it, so a continued response equals an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, MutableSequence, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from safetensors.numpy import load_file

from headrace.rpc.net import free_port
from services.rollout.production.generator import Texts
from tests.support.fake_weights import DELTA, fake_checksum, loaded_into

VOCAB_SIZE = 300
_compact = partial(json.dumps, separators=(",", ":"))
_MASKED = {"output_token_logprobs": [[None, 5, None]]}
_MASK_TOO_LARGE = "Sampling support exceeds --sampling-mask-max-tokens=64, commonly because of cutoff ties."
Fault = Literal["refuse", "refuse_for_now", "grammar", "masked", "hang", "die", "missing", "mask_too_large"]


class FakeEngine:
    """An EngineProcess. `wire` is what a sender would broadcast (tensor name → content); `faults` are by path."""

    resident_bytes = None

    def __init__(
        self,
        wire: Mapping[str, str] | None = None,
        *,
        token_seconds: float = 0.0,
        port: int | None = None,
        part: str = "null",
    ) -> None:
        self._port = port or free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.part = part
        """prefill or decode: of each request, which then has the number of the room where the two meet."""
        self.faults: dict[str, Fault] = {}
        self.calls: MutableSequence[str] = []
        self.bodies: MutableSequence[dict[str, Any]] = []
        self.sent_to_draft: list[str] = []
        """Names of weights that a draft model was given, too."""
        self.weights: dict[str, str] = {}
        self.cache_keys: list[str] = []
        self.num_tokens = 0
        self.takes_bytes: int | None = None
        self.groups: set[str] = set()
        self.adapters: dict[str, dict[str, str]] = {}
        """Contents by name. One that leaves stays here until its last request has ended."""
        self._adapters_leaving: set[str] = set()
        self._adapter_users: Counter[str | None] = Counter()
        self.log_prob_error = 0.0
        self.more_image_tokens = 0
        """By which a prompt with images grows in the engine."""
        self.aborted_after: dict[str, int] = {}
        """The tokens after which a request of that rid is aborted, whatever the last of them is."""
        self.texts: Texts | None = None
        """Of its tokenizer: without one it knows no stop strings."""
        self._wire = wire or {}
        self.token_seconds = token_seconds
        self._version = "0"
        self._in_session = False
        self._num_aborts = 0
        self.num_in_flight = 0
        self.max_running = 64
        self.cache_usage = 0.1
        self._rids: set[str] = set()
        self._ended: set[str] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._runner: web.AppRunner | None = None
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self, *, seconds: float) -> None:
        """Listens."""
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Ends it."""
        self.die(0)
        runner, self._runner = self._runner, None
        if runner:
            await runner.cleanup()

    def die(self, code: int = -9) -> None:
        """Ends it as a signal would: connections break."""
        if not self._exit.done():
            self._exit.set_result(code)
        if self._runner and self._runner.server:
            for connection in self._runner.server.connections:
                if connection.transport:
                    connection.transport.abort()

    def memory_bytes(self) -> int | None:
        """As it was told."""
        return self.takes_bytes

    def last_lines(self) -> str:
        """It says nothing."""
        return "(a fake engine)"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        fault = self.faults.get(path)
        if fault == "die" or self._exit.done():
            self.die()
            return web.Response(status=503)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault in ("refuse_for_now", "missing"):
            return web.Response(status=404 if fault == "missing" else 503)
        if fault == "grammar":
            return web.Response(status=500, text="Grammar accept_token failed: Tokens not accepted: 0")
        if fault == "masked":
            reply = reply_of([], [5], [self._version], "length")
            return web.json_response({**reply, "meta_info": {**reply["meta_info"], **_MASKED}})
        if fault == "mask_too_large":
            return web.json_response({"error": {"message": _MASK_TOO_LARGE}}, status=400)
        if fault == "refuse":
            return _refusal("told to")
        body = await request.json() if request.can_read_body else {}
        if path == "/generate":
            return await self._generated(request, body)
        if path == "/unload_lora_adapter" and body["lora_name"] in self.adapters:
            return await self._unload(body["lora_name"])
        return self._control(path, body)

    async def _generated(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.part != "null" and "bootstrap_room" not in body:
            return _refusal("Invalid request: Disaggregated request received without bootstrap room id.")
        self.bodies.append(body)
        adapter = body.get("lora_path")
        if adapter is not None and (adapter not in self.adapters or adapter in self._adapters_leaving):
            return _refusal(f"The following requested LoRA adapters are not loaded: {adapter}")
        self.num_in_flight += 1
        self._adapter_users[adapter] += 1
        rid = {body["rid"]} if "rid" in body else set()
        self._rids |= rid
        try:
            return await self._generate(request, body)
        finally:
            self.num_in_flight -= 1
            self._adapter_users[adapter] -= 1
            self._rids -= rid
            self._ended -= rid

    async def _unload(self, adapter: str) -> web.Response:
        self._adapters_leaving.add(adapter)
        while self._adapter_users[adapter]:
            await asyncio.sleep(0.001)
        self._adapters_leaving.remove(adapter)
        del self.adapters[adapter]
        return web.json_response({"success": True})

    def _control(self, path: str, body: dict[str, Any]) -> web.Response:  # noqa: C901  # one branch an endpoint
        match path:
            case "/model_info":
                return web.json_response({"weight_version": self._version})
            case "/server_info":
                part = {"disaggregation_mode": self.part, "disaggregation_bootstrap_port": 8998}
                return web.json_response({"tp_size": 1, "internal_states": [], **part})
            case "/v1/loads":
                running = min(self.num_in_flight, self.max_running)
                load = {"num_running_reqs": running, "num_waiting_reqs": self.num_in_flight - running}
                return web.json_response({"loads": [{**load, "token_usage": self.cache_usage}]})
            case "/pause_generation":
                self._running.clear()
                if body["mode"] == "abort":
                    self._end_all()
            case "/continue_generation":
                self._running.set()
            case "/abort_request" if "rid" in body:
                self._ended |= {rid for rid in self._rids if rid.startswith(body["rid"])}  # as SGLang
            case "/abort_request":
                self._end_all()
            case "/flush_cache" if self.num_in_flight:
                return web.Response(status=400, text="Flush cache failed.")
            case "/flush_cache" | "/freeze_gc" | "/health" | "/release_memory_occupation" | "/resume_memory_occupation":
                pass
            case "/init_weights_update_group":
                self.groups.add(body["group_name"])
            case "/destroy_weights_update_group":
                if body["group_name"] not in self.groups:
                    return _refusal("The group to be destroyed does not exist.")
                self.groups.remove(body["group_name"])
            case "/begin_weight_update":
                self._in_session = True
            case "/end_weight_update":
                self._in_session = False
            case "/update_weights_from_distributed":
                if not self._in_session or body["group_name"] not in self.groups:
                    return _refusal("no session or no group")
                self.weights = loaded_into(self.weights, {name: self._wire[name] for name in body["names"]})
                self.sent_to_draft += body["names"] if body.get("selector", "all") != "target" else []  # as SGLang
            case "/update_weights_from_disk":
                if not (loaded := self._load(Path(body["model_path"]))):
                    return _refusal("Cannot find any model weights")
                self.weights = loaded_into({}, loaded) if DELTA not in loaded else loaded_into(self.weights, loaded)
            case "/load_lora_adapter" if not (Path(body["lora_path"]) / "adapter_config.json").is_file():
                return _refusal("no such folder")
            case "/load_lora_adapter" if body["lora_name"] in self.adapters:
                return _refusal("already loaded")
            case "/load_lora_adapter":
                self.adapters[body["lora_name"]] = self._load(Path(body["lora_path"]))
            case "/unload_lora_adapter":
                return _refusal("not loaded")
            case "/weights_checker":
                skipped = body.get("skip_tensor_list") or ()
                checksums = {
                    name: fake_checksum(content)
                    for name, content in self.weights.items()
                    if not any(part in name for part in skipped)
                }
                return web.json_response({"success": True, "ranks": [{"checksums": checksums}]})
            case "/update_weight_version":
                self._version = body["new_version"]
            case _:
                return web.Response(status=404)
        return web.json_response({"success": True})

    def _end_all(self) -> None:
        self._num_aborts += 1  # those that wait in a pause end too, and later requests do not
        if not self._running.is_set():
            self._running.set()
            self._running = asyncio.Event()

    def _load(self, folder: Path) -> dict[str, str]:
        """Contents as `write_version` puts them there; {} where there are none."""
        files = folder.glob("*.safetensors")
        return {name: bytes(content).decode() for file in files for name, content in load_file(file).items()}

    def _score(self, tokens: Sequence[int]) -> list[tuple[float, int, None]]:
        return [(-(token % 7 + 1) / 10 + self.log_prob_error, token, None) for token in tokens]

    def _ends_by_text(self, made: Sequence[int], stops: Sequence[str]) -> bool:
        if self.texts is None or not stops:
            return False
        text = self.texts.decode(made[-max(self.texts.num_tokens(stop) + 1 for stop in stops) :])
        return any(stop in text for stop in stops)

    def _next_token(self, context: Sequence[int]) -> int:
        return next_token(context)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.cache_keys += [body["extra_key"]] if "extra_key" in body else []
        made: list[int] = []
        versions: list[str] = []
        params = body["sampling_params"]
        stops = set(params.get("stop_token_ids", ()))
        stream = web.StreamResponse() if body.get("stream") else None
        if stream is not None:
            await stream.prepare(request)
        finish, num_aborts = None, self._num_aborts
        while finish is None:
            if self._num_aborts > num_aborts or body.get("rid") in self._ended:
                finish = "abort"
            elif not self._running.is_set():
                await self._running.wait()
                continue
            else:
                made.append(self._next_token([*body["input_ids"], *made]))
                self.num_tokens += 1
                versions.append(self._version)
                if len(made) == self.aborted_after.get(body.get("rid", "")):
                    finish = "abort"  # as SGLang: nothing is said of the token of that step
                elif made[-1] in stops or self._ends_by_text(made, params.get("stop", ())):
                    finish = "stop"
                else:
                    finish = "length" if len(made) == params["max_new_tokens"] else None
                await asyncio.sleep(self.token_seconds)
            reply = reply_of(self._score(body["input_ids"]), made, versions, finish)
            if body.get("image_data"):
                reply["meta_info"]["prompt_tokens"] += self.more_image_tokens
            if body.get("return_routed_experts"):
                number = int((versions or [self._version])[-1].split(".")[0])
                reply["meta_info"]["routed_experts"] = routed_of([*body["input_ids"], *made], number)
            reply["meta_info"] |= mask_of(made) if body.get("return_sampling_mask") else {}
            if stream is not None:
                with contextlib.suppress(ConnectionError):  # a caller that left; its tokens are made all the same
                    await stream.write(f"data: {json.dumps(reply)}\n\n".encode())
        return stream if stream is not None else web.json_response(reply)


def reply_of(
    scores: Sequence[tuple[float, int, None]], made: Sequence[int], versions: Sequence[str], finish: str | None
) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return {
        "output_ids": list(made),
        "meta_info": {
            "finish_reason": {"type": finish} if finish else None,
            "input_token_logprobs": list(scores),
            "prompt_tokens": len(scores),
            "completion_tokens": len(made),
            "cached_tokens": 0,
            "output_token_logprobs": [[-(token % 7 + 1) / 10, token, None] for token in made],
            "weight_version": versions[-1] if versions else "0",
            **({"weight_versions": spans} if finish else {}),  # as SGLang: not in mid-stream
        },
    }


def routed_of(tokens: Sequence[int], version: int) -> str:
    """As SGLang: two layers, one expert each, for every token but the last; they follow from token and weights."""
    numbers = [number for token in tokens[:-1] for number in (token % 4, (token + version) % 4)]
    return b64encode(b"".join(number.to_bytes(4, "little") for number in numbers)).decode()


def mask_of(tokens: Sequence[int]) -> dict[str, Any]:
    """As SGLang: the tokens that each was sampled from, and its log-prob among them. Here one other, as likely."""
    return {
        "output_token_sampling_mask": [[token, (token + 1) % VOCAB_SIZE] for token in tokens],
        "output_token_sampling_logprobs": [math.log(0.5)] * len(tokens),
    }


def next_token(context: Sequence[int]) -> int:
    """What the fake's policy says after these tokens."""
    digest = hashlib.sha256(",".join(map(str, context)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCAB_SIZE


def response_to(prompt: Sequence[int], length: int) -> list[int]:
    """The whole response without interruption."""
    made: list[int] = []
    for _ in range(length):
        made.append(next_token([*prompt, *made]))
    return made


def _refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400, dumps=_compact)
