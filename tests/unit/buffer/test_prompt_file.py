"""Promise 10: prompts are walked exactly once per epoch; bad lines are found before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from services.buffer.group import Prompt
from services.buffer.prompt_file import PromptFile
from services.buffer.stream import Cursor, FileSource


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def source(path: Path, **changes: Any) -> FileSource:
    return FileSource(**{"path": str(path), "input_key": "prompt", **changes})


def parsed(prompt: Prompt) -> sample_pb2.Prompt:
    return sample_pb2.Prompt.FromString(prompt.body)


def walk(file: PromptFile, portion: int) -> list[str]:
    """All prompt ids, read `portion` at a time until the end."""
    cursor, ids, exhausted = Cursor(), [], False
    while not exhausted:
        reading = file.read(cursor, portion)
        ids += [p.prompt_id for p in reading.prompts]
        cursor, exhausted = reading.cursor, reading.exhausted
    assert cursor.prompts_read == len(ids)
    return ids


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    return write(tmp_path / "ten.jsonl", *({"prompt": f"q{i}"} for i in range(10)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("portion", [1, 3, 10, 64])
def test_every_prompt_comes_exactly_once_in_every_epoch(ten: Path, shuffle: bool, portion: int) -> None:
    ids = walk(PromptFile(source(ten, num_epochs=3, shuffle=shuffle)), portion)
    for epoch in range(3):
        part = ids[epoch * 10 : epoch * 10 + 10]
        assert sorted(part) == sorted(f"ten.jsonl:{line}@{epoch}" for line in range(1, 11))


def test_the_order_is_drawn_from_seed_and_epoch(ten: Path) -> None:
    def order(seed: int) -> list[str]:
        return [i.split("@")[0] for i in walk(PromptFile(source(ten, num_epochs=2, shuffle=True, seed=seed)), 4)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:10] != order(1)[10:]
    # Fixed for ever: a ledger's cursor must mean the same prompt in the next version of headrace.
    assert [int(i.split(":")[1]) for i in order(42)[:10]] == ORDER_OF_SEED_42


ORDER_OF_SEED_42 = [8, 9, 3, 6, 1, 7, 4, 5, 10, 2]


def test_without_num_epochs_the_walk_has_no_end(ten: Path) -> None:
    reading = PromptFile(source(ten)).read(Cursor(), 25)
    assert (len(reading.prompts), reading.exhausted) == (25, False)
    assert reading.cursor == Cursor(epoch=2, row=5, prompts_read=25)


def test_text_label_metadata_and_tools_travel(tmp_path: Path) -> None:
    big = 2**60 + 1
    row = {"q": "2+2?", "a": 4, "info": {"n": big}, "tools": [{"name": "add"}]}
    path = write(tmp_path / "p.jsonl", row)
    keys = {"input_key": "q", "label_key": "a", "metadata_key": "info", "tool_key": "tools"}
    (prompt,) = PromptFile(source(path, **keys)).read(Cursor(), 1).prompts
    message = parsed(prompt)
    assert (message.text, message.label, message.prompt_id) == ("2+2?", "4", "p.jsonl:1@0")
    assert json.loads(message.metadata_json) == {"n": big}
    assert json.loads(message.tools_json) == [{"name": "add"}]


def test_chat_prompts_keep_their_turns_and_what_else_they_carry(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    path = write(tmp_path / "p.jsonl", {"prompt": turns})
    (prompt,) = PromptFile(source(path)).read(Cursor(), 1).prompts
    system, assistant, user = parsed(prompt).messages.messages
    assert (system.role, system.content, system.extra_json) == ("system", "Be brief.", "")
    assert json.loads(assistant.extra_json) == {"tool_calls": [{"id": "1"}]}
    assert json.loads(user.extra_json) == {"content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops", "Expecting property name"),
        ("[1]", "must be a JSON object"),
        ('{"text": "x"}', "lacks 'prompt', has ['text']"),
        ('{"prompt": 7}', "must be text or an array of chat messages"),
        ('{"prompt": []}', "must be text or an array of chat messages"),
        ('{"prompt": [{"content": "x"}]}', "an object with a role"),
        ('{"prompt": "x", "metadata": "y"}', "'metadata' must be an object"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(InvalidArgument) as refused:
        PromptFile(source(path, metadata_key="metadata"))
    assert f"{path}, line 3: " in refused.value.message
    assert complaint in refused.value.message


def test_bad_lines_are_counted_and_passed_over_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, "{oops", {"prompt": "b"}, "7")
    file = PromptFile(source(path, skip_bad_lines=True, num_epochs=1))
    assert file.bad_lines == 2
    assert walk(file, 1) == ["p.jsonl:1@0", "p.jsonl:3@0"]


def test_a_missing_or_empty_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere.jsonl: No such file"):
        PromptFile(source(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InvalidArgument, match="has no prompts"):
        PromptFile(source(write(tmp_path / "empty.jsonl")))
