"""Spans: whose trace they are in, where they go, and that nothing of it is there where nothing is traced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.client.put_queue import PutQueue
from headrace.client.reward import RewardClient
from headrace.errors import ConfigError
from headrace.job.schema.run import TrackingSection
from headrace.process.workers import WorkerPool
from headrace.rpc import tracing
from headrace.rpc.server import RpcServer, Service
from headrace.run_folder import fields_in
from tests.support.tracing import RUN, Begin, traced

NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Begin]:
    """Traces until the end of the test."""
    with traced(monkeypatch, tmp_path) as begin:
        yield begin


def spans_in(file: Path) -> list[dict[str, Any]]:
    resources = [resource for fields in fields_in(file) for resource in fields["resourceSpans"]]
    return [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]


def named(file: Path, name: str) -> list[dict[str, Any]]:
    return [span for span in spans_in(file) if span["name"] == name]


def test_a_process_that_traces_nothing_imports_nothing_of_it_and_writes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from headrace.rpc import tracing, server, client\n"
        f"tracing.start('buffer', Path({str(tmp_path)!r}) / 'traces', run='r', ratio=0.0)\n"
        "with tracing.span('a', tracing.group('g', 8)) as span: span.set('b', 1)\n"
        "tracing.record('a', tracing.step(1), 0.0, 1.0, {})\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    assert not list(tmp_path.iterdir())


def test_every_process_and_every_lease_finds_the_same_trace(begin: Begin) -> None:
    begin()
    assert tracing.group("train/3", 2) == tracing.samples([("train/3", 0), ("train/3", 1)])
    assert tracing.group("train/3", 1)[0] == tracing.root(RUN, "train/3", 0) != tracing.root("b", "train/3", 0)


def test_the_trace_sample_ratio_is_the_share_that_is_traced_and_a_larger_share_holds_it(begin: Begin) -> None:
    places = [(f"train/{number}", 0) for number in range(2_000)]
    begin(TrackingSection(trace_sample_ratio=0.1).trace_sample_ratio)
    tenth = set(tracing.samples(places))
    begin(0.3)
    assert 140 < len(tenth) < 260 < 500 < len(tracing.samples(places)) < 700
    assert tenth <= set(tracing.samples(places))


def test_a_span_is_in_each_trace_below_the_span_around_it_and_has_the_error_that_left_it(begin: Begin) -> None:
    file = begin()
    with contextlib.suppress(ValueError), tracing.span("outer", tracing.group("g", 2), {"n": 2}):
        with tracing.span("inner", tracing.samples([("g", 1)])) as inner:
            inner.set("late", True)
        raise ValueError("broken")
    outers, (inner_span,) = named(file, "outer"), named(file, "inner")
    assert len({span["traceId"] for span in outers}) == 2
    (around,) = [span for span in outers if span["traceId"] == inner_span["traceId"]]
    assert inner_span["parentSpanId"] == around["spanId"]
    assert {"key": "late", "value": {"boolValue": True}} in inner_span["attributes"]
    assert [span["status"]["code"] for span in outers] == [2, 2]
    assert inner_span["status"] == {}


def test_what_a_sample_that_is_not_traced_does_is_in_no_other_trace(begin: Begin) -> None:
    file = begin()
    with tracing.span("group", tracing.group("g", 1)), tracing.span("untraced", ()), tracing.span("request"):
        assert tracing.parents() == []
    assert [span["name"] for span in spans_in(file)] == ["group"]


def test_a_file_is_what_opentelemetrys_own_definition_reads_and_a_torn_line_costs_itself_alone(begin: Begin) -> None:
    file = begin()
    for number in range(3):
        with tracing.span("work", tracing.step(number), {"text": "ä", "count": 1 << 40, "share": 0.5}):
            pass
    with file.open("ab") as torn:
        torn.write(b'{"resourceSpans": [{"resou')
    for line in file.read_bytes().splitlines()[:3]:
        data = json_format.Parse(line, TracesData())
        (resource,) = data.resource_spans
        facts = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert (facts["service.name"], facts["service.instance.id"], facts["rl.run.id"]) == ("rollout", "1", RUN)
        (span,) = resource.scope_spans[0].spans
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
        assert {each.key for each in span.attributes} == {"text", "count", "share"}
    assert len(spans_in(file)) == 3


class Answering(reward_pb2_grpc.RewardServiceServicer):
    async def ListScorers(self, request, context):
        with tracing.span("inside"):
            return reward_pb2.ListScorersResponse()


async def test_a_call_takes_its_spans_along_and_the_server_continues_them(begin: Begin) -> None:
    file = begin()
    server = RpcServer(
        "reward", "127.0.0.1:0", [Service(Answering(), reward_pb2_grpc.add_RewardServiceServicer_to_server, NAME)]
    )
    await server.start()
    try:
        async with RewardClient(server.address) as client:
            await client.list_scorers(deadline_seconds=10.0)
            with tracing.span("asks", tracing.group("g", 3)):
                await client.list_scorers(deadline_seconds=10.0)
    finally:
        await server.stop(0.0)
    asks, served, inside = (named(file, name) for name in ("asks", f"{NAME}/ListScorers", "inside"))
    assert {span["parentSpanId"] for span in served} == {span["spanId"] for span in asks}
    assert {span["parentSpanId"] for span in inside} == {span["spanId"] for span in served}
    assert len(asks) == len(served) == len(inside) == 3


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-00",  # not sampled
        "00-" + "g" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01-more",
    ],
)
def test_what_is_no_w3c_context_of_a_sampled_span_counts_as_none(parent: str) -> None:
    assert tracing.received([(tracing.TRACEPARENT, parent), (tracing.TRACEPARENT, b"1")]) == ()


async def test_puts_that_share_a_call_are_all_in_it(begin: Begin) -> None:
    begin()
    seen: list[set[tracing.Context]] = []
    may_answer = asyncio.Event()

    async def send(request: bytes, seconds: float) -> Any:
        seen.append(set(tracing.current()))
        await may_answer.wait()
        raise ConnectionError

    queue = PutQueue(send)

    async def put(index: int) -> None:
        with tracing.span("put", tracing.samples([("g", index)])):
            await queue.put([], 10.0)

    puts = [asyncio.ensure_future(put(index)) for index in range(4)]
    while len(seen) < 2:
        await asyncio.sleep(0)
    may_answer.set()
    await asyncio.gather(*puts, return_exceptions=True)
    assert {len(contexts) for contexts in seen[:2]} == {1}
    assert len(seen[2] | seen[3]) == 2, "the third and the fourth waited, and went together"


async def work_in_a_worker() -> int:
    with tracing.span("in the worker"):
        return len(tracing.current())


async def test_a_users_function_continues_the_trace_in_its_worker(begin: Begin) -> None:
    file = begin()
    pool = WorkerPool(1)
    try:
        with tracing.span("calls", tracing.group("g", 2)):
            assert await pool.run(work_in_a_worker, timeout_seconds=60.0, name="work") == 2
        assert await pool.run(work_in_a_worker, timeout_seconds=60.0, name="work") == 0
    finally:
        await pool.close()
    parents = {span["parentSpanId"] for span in named(file, "in the worker")}
    assert parents == {span["spanId"] for span in named(file, "calls")}


def test_with_an_endpoint_spans_are_sent_there_and_not_written(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        serving = threading.Thread(target=collector.serve_forever)
        serving.start()
        try:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
            begin()
            with tracing.span("sent", tracing.step(0)):
                pass
            assert tracing._tracer is not None
            tracing._tracer._processor.force_flush()
        finally:
            collector.shutdown()
            serving.join()
    (request,) = map(ExportTraceServiceRequest.FromString, bodies)
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id) == ("sent", tracing.step(0)[0].trace_id.to_bytes(16, "big"))
    assert not (tmp_path / "traces").exists()


def test_a_protocol_that_is_not_spoken_is_refused_by_name(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="grpc"):
        begin()


def test_without_the_sdk_a_job_that_traces_is_refused_with_the_extra_that_has_it(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ConfigError, match=r"headrace\[trace\]"):
        begin()
    begin(0.0)


def test_a_full_file_ends_with_one_warning_and_no_error(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracing, "_MOST_BYTES", 1_000)
    file = begin()
    for number in range(20):
        with tracing.span("work", tracing.step(number)):
            pass
    assert 0 < len(spans_in(file)) < 10
    assert all(json.loads(line) for line in file.read_text().splitlines())
    assert capsys.readouterr().out.count("spans_not_written") == 1
