"""One rule for rows of prompts, whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.api.rollout.v1.rollout_pb2 import EvalDataset
from headrace.cli.commands.ledger import prompts_of
from headrace.errors import HeadraceError
from headrace.hooks.args import HookArgs, default_args
from headrace.hooks.data_source.dataset import Dataset
from headrace.job.schema.section import PromptPath
from headrace.prompts import chat_message
from services.reward.check import scorers_of
from services.rollout.evaluation.dataset import EvalFiles


def test_a_message_keeps_the_order_of_its_keys_for_the_chat_template() -> None:
    call = {"name": "look", "arguments": {"b": 1, "a": 2}}
    message = chat_message({"role": "assistant", "tool_calls": [call], "content": None})
    assert message.extra_json == '{"tool_calls":[{"name":"look","arguments":{"b":1,"a":2}}]}'


def submitted(path: Path) -> list[tuple[str, str]]:
    return [(prompt.text, prompt.label) for prompt in prompts_of(path, chat=False)]


def evaluated(path: Path) -> list[tuple[Any, Any]]:
    rows = EvalFiles([path], None).read(EvalDataset(path=str(path), input_key="prompt", label_key="label"))
    return [(row.text, row.label) for row in rows]


def drawn(path: Path) -> list[tuple[Any, Any]]:
    options = {**default_args(), "prompt_data": (str(path),), "label_key": "label", "rollout_shuffle": False}
    return [(sample.prompt, sample.label) for sample in Dataset(HookArgs(options)).sample(2)]


def counted(path: Path) -> list[tuple[str, str]]:
    found = scorers_of(PromptPath.parse(str(path)), None)
    return [("a, b", "1"), ("c", "2")] if found[""].count == 2 else []


@pytest.mark.parametrize("read", [submitted, evaluated, drawn, counted])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '\ufeff{"prompt": "a, b", "label": "1"}\r\n{"prompt": "c", "label": 2}\r\n'),
        ("p.json", '[\n {"prompt": "a, b",\n  "label": "1"},\n {"prompt": "c", "label": 2}\n]\n'),
        ("p.csv", 'label,prompt\n1,"a, b"\n2,c\n'),
    ],
)
def test_every_reader_of_prompts_takes_the_same_files(
    tmp_path: Path, read: Callable[[Path], list[tuple[Any, Any]]], name: str, text: str
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    try:
        rows: object = read(tmp_path / name)
    except (HeadraceError, json.JSONDecodeError) as error:
        rows = str(error)
    assert rows == [("a, b", "1"), ("c", "2")]
