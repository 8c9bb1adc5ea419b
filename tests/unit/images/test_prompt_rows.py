"""A row's images: where its prompt has a place for each, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from headrace.images import with_images
from headrace.job.eval_sets import EvalSet, eval_dataset
from headrace.job.schema.job import Job
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from headrace.job.schema.run import ModelSection
from services.buffer.build import train_stream
from services.buffer.ledger.stream import FileSource
from services.buffer.prompts.files import RowReader
from services.buffer.wire import config_from_proto, config_to_proto
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluation.dataset import EvalFiles, read_plan
from services.rollout.production.prompts import messages_of
from tests.support.pictures import png

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


def test_multimodal_keys_name_the_key_in_prompt_files_and_evaluations(tmp_path: Path) -> None:
    data = DataSection(prompt_data=("/a.jsonl",), multimodal_keys={"image": "pictures"})
    rollout = RolloutSection(rollout_batch_size=4, n_samples_per_prompt=2)
    config = train_stream(Job(model=ModelSection(hf_checkpoint=Path("/none")), rollout=rollout, data=data))
    assert config_from_proto(config_to_proto(config)).files[0].image_key == "pictures"
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "<image>?", "pictures": "b.png"}))
    asked = eval_dataset(EvalSet(name="e", path=path), EvalSection(), RolloutSection(), data)
    plan = read_plan(asked, EvalFiles([path], None), SamplingParams(max_new_tokens=5))
    messages, _ = messages_of(plan.rows[0])
    assert messages[0]["content"][0] == {"type": "image", "image": f"{tmp_path}/b.png"}


def _reader(path: str) -> RowReader:
    return RowReader(FileSource(path, "prompt", image_key="images"), "rows")
