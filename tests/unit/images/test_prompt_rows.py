"""A row's images: where its prompt has a place for each, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.images import with_images
from headrace.job.eval_sets import EvalSet, eval_dataset
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from services.buffer.conversion.wire_stream import config_from_proto, config_to_proto
from services.buffer.ledger.stream import FileSource
from services.buffer.prompts.files import RowReader
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluation.dataset import EvalFiles, read_plan
from services.rollout.production.prompts import messages_of
from tests.support.pictures import png
from tests.unit.buffer.test_build import stream_of

FOLDER = Path("/data/set")
HERE = "/data/set/a.png"


def test_each_placeholder_is_an_image_of_the_row_in_order() -> None:
    row = {"images": ["a.png", "/other/b.png"]}
    assert with_images("Is <image> like <image>?", row, "images", FOLDER) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Is "},
                {"type": "image", "image": HERE},
                {"type": "text", "text": " like "},
                {"type": "image", "image": "/other/b.png"},
                {"type": "text", "text": "?"},
            ],
        }
    ]


def test_messages_keep_their_turns_and_parts_without_an_image_take_the_next() -> None:
    system, user = {"role": "system", "content": "Look."}, [{"type": "image"}, {"type": "text", "text": "What?"}]
    row = {"images": "a.png"}
    made = with_images([system, {"role": "user", "content": user}], row, "images", FOLDER)
    assert made == [system, {"role": "user", "content": [{"type": "image", "image": HERE}, user[1]]}]
    own = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    assert with_images(own, {}, "images", FOLDER)[0]["content"] == [{"type": "image", "image": HERE}]


def test_a_row_without_images_is_one_user_turn() -> None:
    assert with_images("What is 2?", {}, "images", FOLDER) == [{"role": "user", "content": "What is 2?"}]


@pytest.mark.parametrize("image", ["base64", {"bytes": png(8, 8), "path": "x.png"}, {"bytes": None, "path": "a.png"}])
def test_an_image_may_lie_in_the_row_itself(image: Any) -> None:
    text = base64.b64encode(png(8, 8)).decode()
    made = with_images("<image>", {"images": [text if image == "base64" else image]}, "images", FOLDER)
    expected = HERE if isinstance(image, dict) and image["bytes"] is None else f"data:;base64,{text}"
    assert made[0]["content"] == [{"type": "image", "image": expected}]


@pytest.mark.parametrize(
    ("prompt", "images", "said"),
    [
        ("<image>", [], "more <image> than its row has images"),
        ("<image>", ["a", "b"], "'images' has 2 images and the prompt <image> for 1"),
        ("<image>", ["https://example.org/a.png"], "is in a network, and images are never fetched"),
        ("<image>", [" ftp://example.org/a.png"], "is in a network"),
        ("<image>", [7], "an image is 7, must be a path"),
        ("<image>", ["a\0b"], "is no path"),
        ("<image>" * 33, ["a"] * 33, "'images' has 33 images, may have 32"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_line(prompt: str, images: list[Any], said: str) -> None:
    line = json.dumps({"prompt": prompt, "images": images}).encode()
    with pytest.raises(InvalidArgument, match=f"/data/set/rows.jsonl, line 3: .*{said}"):
        _reader("/data/set/rows.jsonl").from_line(line, 3, 0)


def test_a_parquet_file_may_hold_the_images_themselves(tmp_path: Path) -> None:
    from services.buffer.prompts.parquet import ParquetRows

    path = tmp_path / "rows.parquet"
    row = {"prompt": "<image>", "images": [{"bytes": png(8, 8), "path": None}]}
    pq.write_table(pa.Table.from_pylist([row]), path)
    (prompt,) = ParquetRows(_reader(str(path))).prompts([0], 0)
    messages, _ = messages_of(sample_pb2.Prompt.FromString(prompt.body))
    assert messages[0]["content"][0]["image"] == f"data:;base64,{base64.b64encode(png(8, 8)).decode()}"


def test_multimodal_keys_name_the_key_in_prompt_files_and_evaluations(tmp_path: Path) -> None:
    data = DataSection(prompt_data=("/a.jsonl",), multimodal_keys={"image": "pictures"})
    config = stream_of(data=data)
    assert config_from_proto(config_to_proto(config)).files[0].image_key == "pictures"
    assert stream_of(data=DataSection(prompt_data=("/a.jsonl",))).files[0].image_key is None
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "<image>?", "pictures": "b.png"}))
    asked = eval_dataset(EvalSet(name="e", path=path), EvalSection(), RolloutSection(), data)
    plan = read_plan(asked, EvalFiles([path], None), SamplingParams(max_new_tokens=5))
    messages, _ = messages_of(plan.rows[0])
    assert messages[0]["content"][0] == {"type": "image", "image": f"{tmp_path}/b.png"}


def test_an_image_in_its_row_is_bounded_by_its_message() -> None:
    image = "data:image/png;base64," + "A" * (1 << 20)
    with pytest.raises(InvalidArgument, match="a message with the images that lie in its row has"):
        with_images("<image>", {"images": image}, "images", FOLDER)


def _reader(path: str) -> RowReader:
    return RowReader(FileSource(path, "prompt", image_key="images"), "rows")
