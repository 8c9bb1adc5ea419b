"""The spans in a run's folder, and what Perfetto and Chrome draw of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import NotFound
from headrace.rpc import tracing
from headrace.run_folder import RunFolder, fields_in

_ORDER = ("buffer", "rollout", "engine", "reward", "trainer")
"""Services from top to bottom, engines below the one that asks them."""
GROUP = "headrace.group"
_MOST_ROWS = 10_000
"""Of a lane."""


@dataclass(frozen=True, slots=True)
class Span:
    """Times are microseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    begun: float
    ended: float
    service: str
    """Or the engine that did the work."""
    lane: str
    """A rank; empty for the service itself."""
    attributes: Mapping[str, Any]
    error: str

    @property
    def step(self) -> int | None:
        return self.attributes.get(tracing.STEP)


def span_files(run: RunFolder) -> list[Path]:
    return sorted((*run.path.glob("traces/*.jsonl"), *run.path.glob("node-*/traces/*.jsonl")))


def read_spans(run: RunFolder) -> list[Span]:
    """All spans of the run's processes on this machine, ordered by their beginning. Raises NotFound without any."""
    spans = [span for file in span_files(run) for fields in fields_in(file) for span in _spans(fields)]
    if not spans:
        raise NotFound(f"{run.path} has no spans: start a run with --trace-sample-ratio 0.1, say, which traces a tenth")
    spans.sort(key=_order)
    lanes: dict[tuple[str, str], str] = {}
    for span in spans:
        lanes[span.service, span.span_id] = span.lane or lanes.get((span.service, span.parent_id), "")
    return [replace(span, lane=lanes[span.service, span.span_id]) for span in spans]


def by_trace(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.trace_id, []).append(span)
    return found


def of_sample(traces: Mapping[str, Sequence[Span]], run_name: str, sample_id: str) -> list[Span]:
    """The life of one sample (GROUP/ATTEMPT/INDEX: all attempts) or group, with the steps that trained it.

    Empty where nothing of it was traced.
    """
    words = sample_id.split("/")
    own = {_root(run_name, "/".join(words[:i]), words[i + 1]) for i in range(1, len(words) - 1)} & traces.keys()
    if not own:
        own = {i for i, spans in traces.items() if any(span.attributes.get(GROUP) == sample_id for span in spans)}
    spans = [span for trace in own for span in traces[trace]]
    trained = {_root(run_name, "step", str(span.step)) for span in spans if span.name == "rl.train"} & traces.keys()
    if trained:  # a step's own trace has its training too
        spans = [span for span in spans if span.name != "rl.train"]
    return sorted([*spans, *(span for trace in trained for span in traces[trace])], key=_order)


def lane_of(span: Span) -> str:
    """Where the work was done, for a person."""
    return span.lane or span.service


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """From top to bottom."""
    places = {(_rank_of(span.service), span.lane): lane_of(span) for span in spans}
    return list(dict.fromkeys(places[place] for place in sorted(places)))


def chrome(spans: Sequence[Span], *, flows: bool = False) -> dict[str, Any]:
    """Chrome's trace events: a process for each service and engine, and as many rows as it needs.

    `flows`: arrows from service to service, along each trace.
    """
    first = min(span.begun for span in spans)
    services = sorted({span.service for span in spans}, key=_rank_of)
    lanes = sorted({span.lane for span in spans})
    rows: dict[tuple[str, str], list[list[Span]]] = {}
    placed: list[tuple[Span, dict[str, Any]]] = []
    for span in spans:
        row = _row(rows.setdefault((span.service, span.lane), []), span)
        tid = 1 + lanes.index(span.lane) * _MOST_ROWS + row
        place = {"pid": 1 + services.index(span.service), "tid": tid, "ts": round(span.begun - first, 3)}
        placed.append((span, place))
    events: list[dict[str, Any]] = []
    for pid, service in enumerate(services, 1):
        events += _named("process", pid, 0, service, pid)
    for pid, tid, name in sorted({(place["pid"], place["tid"], lane_of(span)) for span, place in placed}):
        events += _named("thread", pid, tid, name, tid)
    events += [_event(span, place) for span, place in placed]
    events += _flows(placed) if flows else ()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begun_unix_us": str(round(first))}}


def _order(span: Span) -> tuple[float, float]:
    """A parent comes before its children."""
    return span.begun, -span.ended


def _spans(fields: Mapping[str, Any]) -> Iterator[Span]:
    for resource in fields.get("resourceSpans", ()):
        of = _attributes(resource["resource"]["attributes"])
        number = of["service.instance.id"]
        service = of["service.name"] if number == "0" else f"{of['service.name']}-{number}"
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            attributes = _attributes(span["attributes"])
            lane = attributes.pop(tracing.LANE, "")
            is_engine = of["service.name"] == "rollout" and lane
            engine = lane.removeprefix("engine-") if number == "0" else f"{number}.{lane.removeprefix('engine-')}"
            yield Span(
                span["traceId"],
                span["spanId"],
                span["parentSpanId"],
                span["name"],
                int(span["startTimeUnixNano"]) / 1000,
                int(span["endTimeUnixNano"]) / 1000,
                f"engine {engine}" if is_engine else "trainer" if of["service.name"] == "trainer" else service,
                "" if is_engine else lane,
                attributes,
                span["status"].get("message", ""),
            )


def _attributes(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for each in values:
        ((kind, value),) = each["value"].items()
        found[each["key"]] = int(value) if kind == "intValue" else value
    return found


def _root(run_name: str, name: str, last: str) -> str:
    return f"{tracing.root(run_name, name, last).trace_id:032x}"


def _rank_of(service: str) -> tuple[int, str]:
    return _ORDER.index(service.partition(" ")[0].partition("-")[0]), service


def _row(rows: list[list[Span]], span: Span) -> int:
    """The first row in which nothing of another trace runs; a span lies within those of its own trace."""
    for number, open_spans in enumerate(rows):
        while open_spans and open_spans[-1].ended <= span.begun:
            open_spans.pop()
        if not open_spans or (open_spans[-1].trace_id == span.trace_id and span.ended <= open_spans[-1].ended):
            open_spans.append(span)
            return number
    rows.append([span])
    return len(rows) - 1


def _named(what: str, pid: int, tid: int, name: str, sort_index: int) -> list[dict[str, Any]]:
    event = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    return [
        {**event, "name": f"{what}_name", "args": {"name": name}},
        {**event, "name": f"{what}_sort_index", "args": {"sort_index": sort_index}},
    ]


def _event(span: Span, place: Mapping[str, Any]) -> dict[str, Any]:
    event = {"name": span.name, "cat": "headrace", "ph": "X", **place, "dur": round(span.ended - span.begun, 3)}
    arguments = {**span.attributes, "trace": span.trace_id}
    if span.error:
        return {**event, "cname": "terrible", "args": {**arguments, "error": span.error}}
    return {**event, "args": arguments}


def _flows(placed: Sequence[tuple[Span, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    last: dict[str, tuple[Span, dict[str, Any]]] = {}
    for number, (span, place) in enumerate(placed):
        before, there = last.get(span.trace_id, (span, place))
        if before.service != span.service:
            flow = {"name": "next", "cat": "flow", "id": number}
            yield {**flow, "ph": "s", **there}
            yield {**flow, "ph": "f", "bp": "e", **place}
        last[span.trace_id] = span, place
