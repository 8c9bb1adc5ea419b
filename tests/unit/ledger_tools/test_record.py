"""Lines of trained.jsonl: what is read, what a kill may have cut, and what is named as damaged."""

from __future__ import annotations

import json

import pytest

from headrace.ledger_tools.audit import parse_record


def line(step: int, *sample_ids: str) -> bytes:
    return json.dumps({"step": step, "digest": "ab" * 32, "sample_ids": sample_ids}).encode() + b"\n"


def test_the_last_whole_line_of_a_step_counts() -> None:
    record = parse_record([line(0, "a"), line(1, "x"), line(2, "c"), line(1, "b"), line(2, "ü")[:-20] + b"\n"])
    assert {step: list(each.sample_ids) for step, each in record.last_lines.items()} == {0: ["a"], 1: ["b"], 2: ["c"]}
    assert not record.findings


def test_wherever_a_kill_cuts_a_line_it_is_passed_over() -> None:
    whole = line(12, 'a "quoted" one', "ünïcode/0")
    for end in range(len(whole) - 1):
        for rest in (b"", b"\n"):
            record = parse_record([line(0, "a"), whole[:end] + rest])
            assert not record.findings, whole[:end]
            assert len(record.lines) == 1
    assert not parse_record([line(0, "a"), b"\0" * 40]).findings


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"hello", "is not as the trainer writes it"),
        (b'{"step": 1}}', "is not as the trainer writes it"),
        (b'{"step": 1, xx "digest": "ab"}', "is not as the trainer writes it"),
        (b'\xff\xfe{"step": 1', "is not as the trainer writes it"),
        (b"[" * 100_000, "is not as the trainer writes it"),
        (b"3", "Expected `object`"),
        (b'{"step": -1}', "$.step"),
        (b'{"step": true}', "$.step"),
        (b'{"step": 1e400}', "$.step"),
        (b'{"step": 3, "digest": 7}', "$.digest"),
        (line(1, "a").replace(b"ab" * 32, b"ab" * 31), "$.digest"),
        (line(1), "$.sample_ids"),
        (line(1, "a").replace(b'["a"]', b'"a"'), "$.sample_ids"),
    ],
)
def test_a_line_of_another_shape_is_named_by_its_number(text: bytes, why: str) -> None:
    record = parse_record([line(0, "a"), text + b"\n", line(1, "b")])
    (finding,) = record.findings
    assert finding.kind == "record"
    assert finding.what.startswith("line 2 is not as the trainer writes it")
    assert why in finding.what
    assert len(finding.what) < 200
    assert [each.step for each in record.lines] == [0, 1]
