"""Promise 10: prompts are read exactly once per epoch, whatever they come from and however often it is resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.stream import FileSource
from services.buffer.prompts.reader import PromptMix
from services.buffer.runtime.prompt_sources import open_files

READERS = BlockingPool("prompts", 2)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def source(path: Path, **changes: Any) -> FileSource:
    return FileSource(**{"path": str(path), "input_key": "prompt", **changes})


def parsed(prompt: Prompt) -> sample_pb2.Prompt:
    return sample_pb2.Prompt.FromString(prompt.body)


@asynccontextmanager
async def opened(*sources: FileSource) -> AsyncIterator[PromptMix]:
    mix = PromptMix(open_files(sources, READERS))
    try:
        yield mix
    finally:
        await mix.close()


async def read_all(mix: PromptMix, chunk: int) -> list[str]:
    """All prompt ids, read `chunk` at a time until the end."""
    cursors, ids, exhausted = mix.start(), [], False
    while not exhausted:
        reading = await mix.read(cursors, [chunk] * len(cursors))
        ids += [p.prompt_id for prompts in reading.prompts for p in prompts]
        cursors, exhausted = reading.cursors, all(reading.ended)
    assert sum(cursor.prompts_read for cursor in cursors) == len(ids)
    return ids


async def read_all_of(*sources: FileSource, chunk: int = 7) -> list[str]:
    async with opened(*sources) as mix:
        return await read_all(mix, chunk)


async def first_prompt(source: FileSource) -> Prompt:
    async with opened(source) as mix:
        return (await mix.read(mix.start(), [1])).prompts[0][0]


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    return write(tmp_path / "ten.jsonl", *({"prompt": f"q{i}"} for i in range(10)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("streaming", [False, True])
async def test_every_prompt_comes_exactly_once_in_every_epoch(
    ten: Path, shuffle: bool, chunk: int, streaming: bool
) -> None:
    ids = await read_all_of(source(ten, num_epochs=3, shuffle=shuffle, streaming=streaming), chunk=chunk)
    for epoch in range(3):
        part = ids[epoch * 10 : epoch * 10 + 10]
        assert sorted(part) == sorted(f"ten.jsonl:{line}@{epoch}" for line in range(1, 11))


async def test_the_order_is_drawn_from_seed_and_epoch(ten: Path) -> None:
    async def order(seed: int) -> list[str]:
        ids = await read_all_of(source(ten, num_epochs=2, shuffle=True, seed=seed))
        return [i.split("@")[0] for i in ids]

    first = await order(1)
    assert first == await order(1)
    assert first != await order(2)
    assert first[:10] != first[10:]
    # Fixed for ever: a ledger's cursor must mean the same prompt in the next version of headrace.
    assert [int(i.split(":")[1]) for i in (await order(42))[:10]] == ORDER_OF_SEED_42


ORDER_OF_SEED_42 = [8, 9, 3, 6, 1, 7, 4, 5, 10, 2]


async def test_text_label_metadata_and_tools_travel(tmp_path: Path) -> None:
    big = 2**60 + 1
    row = {"q": "2+2?", "a": 4, "info": {"n": big}, "tools": [{"name": "add"}]}
    path = write(tmp_path / "p.jsonl", row)
    keys = {"input_key": "q", "label_key": "a", "metadata_key": "info", "tool_key": "tools"}
    message = parsed(await first_prompt(source(path, **keys)))
    assert (message.text, message.label, message.prompt_id) == ("2+2?", "4", "p.jsonl:1@0")
    assert json.loads(message.metadata_json) == {"n": big}
    assert json.loads(message.tools_json) == [{"name": "add"}]


async def test_chat_prompts_keep_their_turns_and_what_else_they_carry(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    path = write(tmp_path / "p.jsonl", {"prompt": turns})
    system, assistant, user = parsed(await first_prompt(source(path))).messages.messages
    assert (system.role, system.content, system.extra_json) == ("system", "Be brief.", "")
    assert json.loads(assistant.extra_json) == {"tool_calls": [{"id": "1"}]}
    assert json.loads(user.extra_json) == {"content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops", "Expecting property name"),
        ('{"text": "x"}', "lacks 'prompt', has ['text']"),
        ('{"prompt": 7}', "must be text or an array of chat messages"),
        ('{"prompt": [{"content": "x"}]}', "an object with a role"),
        ('{"prompt": "x", "metadata": "y"}', "'metadata' must be an object"),
        ('{"prompt": "x", "metadata": {"a": NaN}}', "cannot be written as JSON"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(InvalidArgument) as refused:
        open_files([source(path, metadata_key="metadata")], READERS)
    assert f"{path}, line 3: " in refused.value.message
    assert complaint in refused.value.message


@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_lines_are_counted_and_passed_over_when_asked(tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, "{oops", {"prompt": "b"}, "7")
    async with opened(source(path, skip_bad_lines=True, num_epochs=2, streaming=streaming)) as mix:
        reading = await mix.read(mix.start(), [10])
    assert [p.prompt_id for p in reading.prompts[0]] == [
        f"p.jsonl:{line}@{epoch}" for epoch in (0, 1) for line in (1, 3)
    ]
    assert mix.bad_lines + reading.cursors[0].bad_lines == 2


def test_a_missing_or_empty_file_says_so(tmp_path: Path) -> None:
    for streaming in (False, True):
        with pytest.raises(InvalidArgument, match=r"nowhere.jsonl: No such file"):
            open_files([source(tmp_path / "nowhere.jsonl", streaming=streaming)], READERS)
        with pytest.raises(InvalidArgument, match="has no prompts"):
            open_files([source(write(tmp_path / "empty.jsonl"), streaming=streaming)], READERS)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_slice_holds_its_lines_and_no_others(ten: Path, streaming: bool) -> None:
    async def lines(first: int, end: int | None) -> list[int]:
        ids = await read_all_of(source(ten, first_row=first, end_row=end, num_epochs=1, streaming=streaming))
        return [int(i.split(":")[1].split("@")[0]) for i in ids]

    assert await lines(0, 3) == [1, 2, 3]
    assert await lines(4, 6) == [5, 6]
    assert await lines(8, None) == [9, 10]
    with pytest.raises(InvalidArgument, match="has no prompts"):
        await lines(10, None)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_walk_that_is_resumed_at_every_cursor_is_the_walk(tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": f"q{i}"} for i in range(3000)))
    one = source(path, shuffle=True, num_epochs=2, streaming=streaming, num_workers=2)
    whole = await read_all_of(one, chunk=6000)
    async with opened(one) as mix:
        cursors, ids = mix.start(), []
        for chunk in (1, 1022, 1, 1, 2000, 700, 5000):
            async with opened(one) as fresh:
                reading = await fresh.read(cursors, [chunk])
            ids += [p.prompt_id for p in reading.prompts[0]]
            cursors = reading.cursors
    assert ids == whole
    assert set(Counter(whole).values()) == {1}
    assert len(whole) == 6000


async def test_two_files_of_one_name_have_prompts_of_their_own(tmp_path: Path) -> None:
    paths = [tmp_path / name / "train.jsonl" for name in ("x", "y")]
    for path in paths:
        path.parent.mkdir()
        write(path, {"prompt": "the same"})
    ids = await read_all_of(*(source(path, num_epochs=1) for path in paths))
    assert ids == ["0.train.jsonl:1@0", "1.train.jsonl:1@0"]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    turns = [{"role": "user", "content": "hi", "name": None}]
    rows = [{"prompt": turns, "label": i, "metadata": {"n": i}, "first": i} for i in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=4)
    return tmp_path / "p.parquet"


@pytest.mark.parametrize("streaming", [False, True])
async def test_parquet_rows_are_prompts(parquet: Path, streaming: bool) -> None:
    keys = {"label_key": "label", "metadata_key": "metadata", "priority_key": "first", "streaming": streaming}
    async with opened(source(parquet, first_row=3, end_row=9, num_epochs=1, **keys)) as mix:
        reading = await mix.read(mix.start(), [100])
    messages = [parsed(prompt) for prompt in reading.prompts[0]]
    assert [m.prompt_id for m in messages] == [f"p.parquet:{row}@0" for row in range(4, 10)]
    assert [(m.label, m.metadata_json, m.priority) for m in messages] == [
        (str(i), f'{{"n":{i}}}', i) for i in range(3, 9)
    ]
    (turn,) = messages[0].messages.messages
    assert (turn.role, turn.content, turn.extra_json) == ("user", "hi", "")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_is_not_there_is_named(parquet: Path, streaming: bool) -> None:
    with pytest.raises(InvalidArgument, match=r"no column 'question' \(input_key\); the columns are prompt, label"):
        open_files([FileSource(str(parquet), "question", streaming=streaming)], READERS)


ROWS = [
    {"prompt": "2 + 2", "label": "4", "metadata": {"n": 1}},
    {"prompt": "say 'a, b'\nand \"c\"", "label": "ü", "metadata": {"n": 2}},
    {"prompt": "last", "label": "x", "metadata": {"n": 3}},
]


def written_csv(delimiter: str, quote: str = '"') -> str:
    def cell(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return quote + text.replace(quote, quote * 2) + quote

    lines = [delimiter.join(ROWS[0]), *(delimiter.join(map(cell, row.values())) for row in ROWS)]
    return "\r\n".join(lines) + "\r\n"


FILES = {
    "array.json": json.dumps(ROWS, indent=2),
    "one_line.jsonl": json.dumps(ROWS, ensure_ascii=False) + "\n\n",
    "with_mark.json": "\ufeff\n" + json.dumps(ROWS),
    "with_mark.jsonl": "\ufeff" + "\n".join(map(json.dumps, ROWS)),
    "comma.csv": written_csv(","),
    "of_excel.csv": "\ufeff" + written_csv(";"),
    "tabs.tsv": written_csv("\t"),
}


async def prompts_or_refusal(path: Path, **changes: Any) -> list[tuple[str, str, str]] | str:
    try:
        async with opened(source(path, num_epochs=1, label_key="label", metadata_key="metadata", **changes)) as mix:
            reading = await mix.read(mix.start(), [100])
    except InvalidArgument as error:
        return error.message
    return [(p.text, p.label, p.metadata_json) for p in map(parsed, reading.prompts[0])]


@pytest.mark.parametrize("name", FILES)
async def test_prompts_are_read_from_json_arrays_and_csv_and_behind_a_byte_order_mark(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(FILES[name].encode())
    expected = [(row["prompt"], row["label"], json.dumps(row["metadata"], separators=(",", ":"))) for row in ROWS]
    assert await prompts_or_refusal(tmp_path / name) == expected
    assert await prompts_or_refusal(tmp_path / name, first_row=1, end_row=2) == expected[1:2]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("object.json", json.dumps({"data": ROWS}, indent=1), "write one JSON object a line"),
        ("wide.csv", "prompt,label\nwho,me,you\n", "more cells than the header"),
    ],
)
async def test_a_file_in_another_form_is_told_the_form_that_is_read(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    said = await prompts_or_refusal(tmp_path / name)
    assert isinstance(said, str)
    assert message in said


@pytest.mark.parametrize(("key", "label"), [("reward.truth", "7"), ("a.b", "flat"), ("reward.x.y", "deep")])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
async def test_a_key_with_dots_is_one_of_an_inner_object(
    tmp_path: Path, key: str, label: str, streaming: bool, ending: str
) -> None:
    row = {"prompt": "q", "a.b": "flat", "reward": {"truth": "7", "all": ["7", "seven"], "x": {"y": "deep"}}}
    path = tmp_path / f"p.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        write(path, row)
    try:
        async with opened(source(path, num_epochs=1, label_key=key, streaming=streaming)) as mix:
            found = parsed((await mix.read(mix.start(), [1])).prompts[0][0]).label
    except InvalidArgument as error:
        found = error.message
    assert found == label
