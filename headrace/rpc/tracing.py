"""One trace for each sample, from its prompt to the gradient, and one for each training step.

Ids are hashes of what is traced: every service and every lease joins the same trace, and nobody stores a context. Spans
are OpenTelemetry's. They go to RUN/traces as OTLP in JSON lines, or where OTEL_EXPORTER_OTLP_ENDPOINT says. The SDK is
imported by `start` alone: before it, and in a run that traces nothing, all else here does nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from headrace import __version__
from headrace.errors import ConfigError
from headrace.rpc.log import log

TRACEPARENT, _FURTHER = "traceparent", "headrace-traceparents"
"""W3C's key; and that of a call's further samples, one behind the other: gRPC keeps one entry of W3C's key."""
LANE = "headrace.lane"
"""The attribute that names the engine or the rank that did the work, where it is not the service itself."""
STEP = "headrace.step"
"""The training step, counted from 0: of a step's own spans, and of those with which a sample joins it."""

GENERATE, OUTPUT_TOKENS = "rl.sample.generate", "gen_ai.usage.output_tokens"
"""One request at an engine: a turn, or a part of one that an engine broke off."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_HTTP = "http/protobuf"
_MOST_BYTES = 1 << 30
_MOST_TRACES_OF_A_CALL = 32
_QUEUED_SPANS = 1 << 16
_VARIABLE = "_HEADRACE_TRACES"
"""Tells workers of a process how it traces."""
_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f][13579bdf]")
"""Of a trace that is sampled."""

Attributes = Mapping[str, Any]
"""Texts, numbers, True and False"""


class Context(NamedTuple):
    """A span, as those below it know it."""

    trace_id: int
    span_id: int


Contexts = tuple[Context, ...]


def start(process: str, folder: Path, *, run: str, ratio: float) -> None:
    """Traces this share of the run's samples from now on. `process` names the file and, up to "-", the service.

    Raises as `require_usable`. Call it once, at the start of a process.
    """
    global _tracer  # as the configuration of logging, which a process has once
    require_usable(ratio)
    if ratio:
        _tracer = _Tracer(process, folder, run, ratio)
        os.environ[_VARIABLE] = json.dumps([process, str(folder.absolute()), run, ratio])


def require_usable(ratio: float) -> None:
    """Raises ConfigError for a package or a protocol that a run which traces this share would miss."""
    others = {os.environ.get(name) or _HTTP for name in _PROTOCOLS} - {_HTTP}
    if ratio and others and _is_sent():
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {others.pop()}: spans are sent as {_HTTP}, so unset it")
    if ratio and not all(map(_is_installed, _PACKAGES[: 1 + _is_sent()])):
        raise ConfigError(
            "trace_sample_ratio needs OpenTelemetry's SDK: pip install 'headrace[trace]'", field="trace_sample_ratio"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # nor is what it is a part of
        return False


def _is_sent() -> bool:
    return any(map(os.environ.get, _ENDPOINTS))


def is_on() -> bool:
    return _tracer is not None


def root(run: str, *names: str | int) -> Context:
    """The first span of the trace of a sample (its group and its place there) or of a step ("step" and its number)."""
    digest = hashlib.sha256("\0".join(map(str, (run, *names))).encode()).digest()
    return Context(int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1)


def samples(places: Iterable[tuple[str, int]]) -> Contexts:
    """The traces of those that are sampled, by group and index. A sample has one trace, whichever lease makes it."""
    if _tracer is None:
        return ()
    roots = (root(_tracer.run, *place) for place in places)
    return tuple(found for found in roots if found.trace_id & _LOW_BITS < _tracer.threshold)


def group(group_id: str, num_samples: int) -> Contexts:
    """The traces of a group's samples."""
    return samples((group_id, index) for index in range(num_samples))


def step(number: int) -> Contexts:
    """The trace of a training step."""
    return () if _tracer is None else (root(_tracer.run, "step", number),)


def current() -> Contexts:
    """The spans that are open around this call."""
    return _current.get()


def adopt(contexts: Contexts) -> None:
    """Makes them the current ones for the rest of this task, which does the work of another."""
    _current.set(contexts)


def adopt_call(parents: Sequence[str]) -> None:
    """As `adopt`, in a worker process: with what `parents()` said in its service. Traces as that does."""
    if parents:
        if _tracer is None and (given := os.environ.get(_VARIABLE)):
            process, folder, run, ratio = json.loads(given)
            start(process, Path(folder), run=run, ratio=ratio)
        adopt(_contexts(parents))


def span(
    name: str, of: Contexts | None = None, attributes: Attributes | None = None, *, has_children: bool = True
) -> AbstractContextManager[Span]:
    """A span around a block in each of these traces (default: the current ones), below the current span if it has one.

    What the block does is in these traces alone. An exception that leaves the block is its error. A block that yields,
    in a generator, has no children.
    """
    if _tracer is None or not (of or _current.get()):
        return _NO_SPAN
    return _open(_tracer, name, _parents(of), attributes or {}, has_children)


def record(
    name: str,
    of: Contexts,
    begun: float,
    ended: float,
    attributes: Attributes,
    *,
    error: str | None = None,
    is_root: bool = False,
) -> None:
    """A span that is over, in each of these traces; times are Unix seconds. `is_root`: it is the traces' first."""
    if _tracer is not None:
        for context in of if is_root else _parents(of):
            own, parent = (context, None) if is_root else (_new(context), context)
            _tracer.emit(name, own, parent, int(begun * 1e9), int(ended * 1e9), attributes, error)


def parents() -> list[str]:
    """The current spans as W3C writes them."""
    return [f"00-{each.trace_id:032x}-{each.span_id:016x}-01" for each in _current.get()[:_MOST_TRACES_OF_A_CALL]]


def metadata() -> list[tuple[str, str]]:
    """What tells the server of a call about the current spans."""
    first, *further = parents() or [""]
    return ([(TRACEPARENT, first)] if first else []) + ([(_FURTHER, ",".join(further))] if further else [])


def received(entries: Iterable[tuple[str, Any]]) -> Contexts:
    """The spans that a caller's metadata names; what is no W3C context counts as none."""
    known = (value for key, value in entries if key in (TRACEPARENT, _FURTHER) and isinstance(value, str))
    return _contexts(parent for value in known for parent in value.split(","))


def _contexts(parents: Iterable[str]) -> Contexts:
    found = (match for match in map(_PARENT.fullmatch, parents) if match)
    return tuple(Context(int(match[1], 16), int(match[2], 16)) for match in found)[:_MOST_TRACES_OF_A_CALL]


def engine_of(weights_name: str) -> str:
    """The engine's id in the name with which its weights are stamped: VERSION.RANDOM.ENGINE."""
    return weights_name.split(".", 2)[-1]


class Span:
    """What a block may say about its span."""

    def __init__(self, attributes: Attributes) -> None:
        self.attributes: dict[str, Any] = dict(attributes)

    def set(self, name: str, value: Any) -> None:
        """Adds what is known only now."""
        self.attributes[name] = value


class _Unseen(Span):
    def set(self, name: str, value: Any) -> None:
        """Nobody traces it."""


_NO_SPAN: AbstractContextManager[Span] = nullcontext(_Unseen({}))
_LOW_BITS = (1 << 64) - 1
_current: ContextVar[Contexts] = ContextVar("spans", default=())


def _parents(of: Contexts | None) -> Contexts:
    around = _current.get()
    if of is None or not around:
        return around if of is None else of
    by_trace = {context.trace_id: context for context in around}
    return tuple(by_trace.get(context.trace_id, context) for context in of)


def _new(parent: Context) -> Context:
    return Context(parent.trace_id, secrets.randbits(64) or 1)


@contextmanager
def _open(tracer: _Tracer, name: str, parents: Contexts, attributes: Attributes, has_children: bool) -> Iterator[Span]:
    opened, own, begun, error = Span(attributes), tuple(map(_new, parents)), time.time_ns(), None
    token = _current.set(own) if has_children else None
    try:
        yield opened
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"[:500]
        raise
    finally:
        if token is not None:
            _current.reset(token)
        ended = time.time_ns()
        for context, parent in zip(own, parents, strict=True):
            tracer.emit(name, context, parent, begun, ended, opened.attributes, error)


class _Tracer:
    """Makes the SDK's spans of finished ones, and gives them to its processor.

    The SDK's own tracer knows neither ids nor spans in several traces that are chosen by their caller.
    """

    def __init__(self, process: str, folder: Path, run: str, ratio: float) -> None:
        self.run = run
        self.threshold = int(ratio * (1 << 64))  # as OpenTelemetry's TraceIdRatioBased has it
        service, _, number = process.partition("-")
        attributes = {"service.name": service, "service.instance.id": number or "0", "service.version": __version__}
        from opentelemetry.sdk import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        self._processor = _processor(folder / f"{process}.jsonl")
        self._resource = Resource.create(attributes | {"rl.system": "headrace", "rl.run.id": run})
        sampled = TraceFlags(TraceFlags.SAMPLED)

        def made(
            name: str,
            own: Context,
            parent: Context | None,
            begun: int,
            ended: int,
            attributes: Attributes,
            error: str | None,
        ) -> Any:
            return trace.ReadableSpan(
                name,
                SpanContext(*own, is_remote=False, trace_flags=sampled),
                SpanContext(*parent, is_remote=False, trace_flags=sampled) if parent else None,
                self._resource,
                dict(attributes),
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=begun,
                end_time=max(begun, ended),
            )

        self._made: Callable[..., Any] = made
        atexit.register(self._processor.shutdown)

    def emit(
        self,
        name: str,
        own: Context,
        parent: Context | None,
        begun: int,
        ended: int,
        attributes: Attributes,
        error: str | None = None,
    ) -> None:
        """Times are nanoseconds."""
        self._processor.on_end(self._made(name, own, parent, begun, ended, attributes, error))


_tracer: _Tracer | None = None


def _processor(file: Path) -> Any:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

    if _is_sent():
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_QUEUED_SPANS)

    class FileExporter(SpanExporter):
        """Writes each span when it ends: a kill loses those alone that are open."""

        def __init__(self) -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab")
            self._lock = threading.Lock()
            self._is_full = False

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            try:
                with self._lock:
                    if self._file.tell() < _MOST_BYTES:
                        self._file.writelines(json.dumps(_otlp(span)).encode() + b"\n" for span in spans)
                        self._file.flush()
                        return SpanExportResult.SUCCESS
                why = f"it has {_MOST_BYTES:,} bytes: a smaller --trace-sample-ratio fills it later"
            except OSError as error:
                why = str(error)
            if not self._is_full:
                self._is_full = True
                log.warning("spans_not_written", file=str(file), why=why)
            return SpanExportResult.FAILURE

    return SimpleSpanProcessor(FileExporter())


def _otlp(span: Any) -> dict[str, Any]:
    """A line of OpenTelemetry's file format, as its collector reads it (otlpjsonfile)."""
    status = {"code": span.status.status_code.value, "message": span.status.description or ""}
    fields = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _values(span.attributes),
        "status": status if span.status.description else {},
    }
    scope = {"scope": {"name": "headrace", "version": __version__}, "spans": [fields]}
    return {"resourceSpans": [{"resource": {"attributes": _values(span.resource.attributes)}, "scopeSpans": [scope]}]}


def _values(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"stringValue": str(value)}
