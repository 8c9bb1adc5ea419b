"""One label rule: whichever way a prompt comes in, the scorer gets the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.rollout.v1.rollout_pb2 import EvalDataset
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.commands.ledger import prompt_of
from headrace.errors import InvalidArgument
from headrace.hooks import Sample
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import plain
from headrace.prompts import label_text
from services.buffer.ledger.stream import FileSource
from services.buffer.prompts.data_source import DataSourceReader
from services.buffer.prompts.files import RowReader
from services.rollout.evaluation.dataset import EvalFiles

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner | st.none(), max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def by_file(label: Any) -> str:
    line = json.dumps({"prompt": "p", "label": label}).encode()
    prompt = RowReader(FileSource("p.jsonl", "prompt", label_key="label"), "p.jsonl").from_line(line, 1, 0)
    return message_of(prompt.body)


def by_submit(label: Any) -> str:
    return prompt_of(json.loads(json.dumps({"prompt": "p", "label": label})), "id", chat=False).label


def by_data_source(label: Any) -> str:
    reader = DataSourceReader("source.py:S", HookArgs({}), seconds=1.0)
    return message_of(reader._prompt(plain(Sample(prompt="p", label=label)), 1).body)


def by_evaluation(label: Any, folder: Path) -> str:
    path = folder / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "p", "label": label}) + "\n")
    (row,) = EvalFiles([path], None).read(EvalDataset(path=str(path), input_key="prompt", label_key="label"))
    return row.label


def message_of(body: bytes) -> str:
    return sample_pb2.Prompt.FromString(body).label


@given(label=values)
def test_every_door_gives_the_scorer_the_same_bytes(label: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = label if isinstance(label, str) else label_text(label)
    folder = tmp_path_factory.getbasetemp()
    found = [by_file(label), by_submit(label), by_data_source(label), by_evaluation(label, folder)]
    assert [text.encode() for text in found] == [expected.encode()] * 4


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (True, "true"),
        (7, "7"),
        (0.5, "0.5"),
        ({"b": [1, None], "a": "é"}, '{"a":"é","b":[1,null]}'),
        (np.float64(0.25), "0.25"),
        (np.array([1, 2]), "[1,2]"),
        ("  as it is ", "  as it is "),
        (None, None),
    ],
)
def test_the_rule(label: Any, text: str | None) -> None:
    assert label_text(label) == text


@pytest.mark.parametrize("label", [float("nan"), float("inf"), {"a": {1, 2}}, b"bytes", object()])
def test_what_is_no_json_is_refused(label: Any) -> None:
    with pytest.raises(InvalidArgument, match="the label is neither text nor JSON"):
        label_text(label)
