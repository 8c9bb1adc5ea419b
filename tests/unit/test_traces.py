"""A run's spans: the states of its groups, the life of one sample, and what Perfetto and Chrome are given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.errors import NotFound
from headrace.job.schema.job import Job
from headrace.job.schema.run import ModelSection, RunSection
from headrace.rpc import tracing
from headrace.run_folder import RunFolder
from headrace.traces import Span, by_trace, chrome, of_sample, read_spans
from services.buffer.ledger.work import Result
from services.buffer.runtime.spans import GroupSpans
from tests.support.ledgers.ledger_under_test import LedgerUnderTest
from tests.support.tracing import RUN, Begin, traced


class TracedLedger(LedgerUnderTest):
    """Its transactions are looked at as a buffer's are."""

    def restart(self) -> None:
        super().restart()
        self.spans = GroupSpans(self.ledger)

    def do(self, result: Result[Any]) -> Any:
        self.spans.add(result[1])
        return super().do(result)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Begin]:
    with traced(monkeypatch, tmp_path) as begin:
        yield begin


@pytest.fixture
def life(begin: Begin, tmp_path: Path) -> RunFolder:
    """Two groups whose first leases expire, with what all four services and two ranks say of them."""
    begin(process="buffer")
    it = TracedLedger()
    it.create(lease_seconds=30.0, max_attempts=3)
    epoch = it.rewind()
    it.submit("one", "two")
    it.seconds += 1.0
    it.lease()
    it.seconds += 31.0
    it.do(it.ledger.expire_leases(it.now))
    it.seconds += 1.0
    groups = it.lease()
    it.seconds += 2.0
    it.put(groups)
    it.seconds += 1.0
    assert it.batch(epoch, 0)
    it.seconds += 1.0
    batch = it.consume(epoch, 0)
    it.seconds += 1.0
    it.commit(epoch, 1)
    assert len(batch.groups) == 2
    begin(process="rollout")
    for group in groups:
        with tracing.span("headrace.lease", tracing.group(group.group_id, 2), {"headrace.group": group.group_id}):
            for index in range(2):
                with tracing.span("rl.sample", tracing.samples([(group.group_id, index)])):
                    facts = {tracing.LANE: "engine-0"}
                    with tracing.span(tracing.GENERATE, attributes=facts):
                        parents = tracing.metadata()
    begin(process="reward")
    with tracing.span("reward/Score", tracing.received(parents)):
        pass
    for rank in (1, 0):
        begin(process=f"trainer-{rank}")
        facts = {tracing.LANE: f"rank {rank}", tracing.STEP: 0}
        around = tracing.span("headrace.rank", tracing.step(0), facts)
        with around, tracing.span("headrace.forward"), tracing.span("headrace.inner"):
            pass
    for traces in (tracing.group(groups[0].group_id, 2), tracing.step(0)):
        with tracing.span("rl.train", traces, {tracing.STEP: 0}):
            pass
    return RunFolder(tmp_path)


def test_a_group_whose_lease_expired_has_each_of_its_states_in_one_trace(life: RunFolder) -> None:
    spans = [span for span in of_sample(by_trace(read_spans(life)), RUN, "train/0/2/1") if span.service == "buffer"]
    (root,) = [span for span in spans if span.name == "headrace.sample"]
    states = [span for span in spans if span is not root]
    names = ["queued", "leased", "queued", "leased", "ready", "batched", "consumed"]
    assert [span.name.removeprefix("headrace.") for span in states] == names
    assert [span.attributes["headrace.ended_by"] for span in states[:2]] == ["leased", "lease_expired"]
    assert [round((span.ended - span.begun) / 1e6) for span in states] == [1, 31, 1, 2, 1, 1, 1]
    assert all(span.parent_id == root.span_id and span.trace_id == root.trace_id for span in states)
    assert root.parent_id == ""
    assert (root.begun, root.ended) == (states[0].begun, states[-1].ended)


def test_a_buffer_that_restarts_traces_a_group_from_its_next_event_on(begin: Begin, tmp_path: Path) -> None:
    begin(process="buffer")
    it = TracedLedger()
    it.create()
    it.submit("one")
    it.seconds += 1.0
    it.lease()
    it.restart()
    (group,) = it.ledger.stream("train").groups.values()
    it.seconds += 1.0
    it.put([group])
    it.seconds += 1.0
    it.do(it.ledger.drop(it.now, "train", "r", [group.group_id], "for the test"))
    names = [span.name for span in read_spans(RunFolder(tmp_path)) if span.trace_id == _trace(group.group_id)]
    assert names == ["headrace.queued", "headrace.ready", "headrace.sample"]


def _trace(group_id: str) -> str:
    return f"{tracing.root(RUN, group_id, 0).trace_id:032x}"


def test_a_samples_life_has_all_services_and_attempts_and_the_step_that_trained_it(life: RunFolder) -> None:
    spans = of_sample(by_trace(read_spans(life)), RUN, "train/0/2/1")
    assert {span.service for span in spans} == {"buffer", "rollout", "engine 0", "trainer"}
    assert {span.lane for span in spans if span.service == "trainer"} == {"", "rank 0", "rank 1"}
    assert sum(span.name == "rl.train" for span in spans) == 1, "the sample's own and the step's are the same work"
    assert {span.trace_id for span in spans} == {
        f"{context.trace_id:032x}" for context in (tracing.root(RUN, "train/0", 1), *tracing.step(0))
    }
    assert of_sample(by_trace(read_spans(life)), RUN, "train/0/1/1") == spans, "another attempt of the sample"
    group = of_sample(by_trace(read_spans(life)), RUN, "train/0")
    assert {_trace("train/0"), *(span.trace_id for span in spans)} == {span.trace_id for span in group}


def test_what_a_rank_does_below_its_span_is_in_its_lane(life: RunFolder) -> None:
    lanes = [span.lane for span in read_spans(life) if span.name in ("headrace.forward", "headrace.inner")]
    assert lanes == ["rank 1", "rank 1", "rank 0", "rank 0"]


@pytest.mark.parametrize("sample_id", ["train/7/1/0", "train/0/1/9", "nothing", "/", ""])
def test_a_sample_that_was_not_traced_has_no_spans(life: RunFolder, sample_id: str) -> None:
    assert of_sample(by_trace(read_spans(life)), RUN, sample_id) == []


def test_a_run_that_traces_nothing_is_refused_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="--trace-sample-ratio"):
        read_spans(RunFolder(tmp_path))


def require_drawable(events: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format: named processes and threads, and slices of a thread that nest."""
    slices = [event for event in events if event["ph"] == "X"]
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    for event in slices:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
    for thread in {(event["pid"], event["tid"]) for event in slices}:
        ends: list[float] = []
        for event in (event for event in slices if (event["pid"], event["tid"]) == thread):
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, event
            ends.append(event["ts"] + event["dur"])
    for start, end in zip(
        (event for event in events if event["ph"] == "s"),
        (event for event in events if event["ph"] == "f"),
        strict=True,
    ):
        assert start["id"] == end["id"]
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"]


def test_what_perfetto_is_given_nests_in_named_lanes_and_arrows_go_from_service_to_service(life: RunFolder) -> None:
    spans = read_spans(life)
    events = chrome(spans)["traceEvents"]
    require_drawable(events)
    assert sum(event["ph"] == "X" for event in events) == len(spans)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["buffer", "rollout", "engine 0", "reward", "trainer"]
    arrows = chrome(of_sample(by_trace(spans), RUN, "train/0/2/1"), flows=True)["traceEvents"]
    require_drawable(arrows)
    assert any(event["ph"] == "s" for event in arrows)


def test_requests_that_an_engine_answers_side_by_side_have_a_row_each() -> None:
    def request(number: int, begun: float, ended: float) -> Span:
        return Span(f"{number:032x}", str(number), "", "r", begun, ended, "engine 0", "", {}, "")

    events = chrome([request(1, 0.0, 10.0), request(2, 1.0, 5.0), request(3, 2.0, 12.0), request(4, 6.0, 8.0)])
    require_drawable(events["traceEvents"])
    assert [event["tid"] for event in events["traceEvents"] if event["ph"] == "X"] == [1, 2, 3, 2]


def test_the_command_prints_the_trace_of_a_run_or_of_a_sample(
    life: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    life.create(Job(model=ModelSection(hf_checkpoint=tmp_path), run=RunSection(run_name="a-run")))
    life.services_file.write_text("{}")
    assert main(["trace", str(tmp_path)]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    assert len(events) > 30
    assert main(["trace", str(tmp_path), "train/0/2/1"]) == 0
    of_one = json.loads(capsys.readouterr().out)["traceEvents"]
    assert 15 < len(of_one) < len(events)
    assert main(["trace", str(tmp_path), "train/9/1/0"]) == 1
    assert "train/0, train/1" in capsys.readouterr().err
