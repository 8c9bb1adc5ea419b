"""Images of prompts: read, resized, and made what the engine and the trainer are given."""

from __future__ import annotations

import base64
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.images import IMAGE_GRIDS, MAX_IMAGE_BYTES, PIXEL_VALUES, image_starts, with_images
from headrace.job.schema.production import DataSection, EvalSection
from headrace.models.registry import read_architecture
from headrace.prompts import chat_message
from services.rollout.chat.images import image_reader
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, SampleRequest
from tests.support.fakes.fake_engine import response_to
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.models.tiny_vision import PATCH_VALUES as FAMILIES
from tests.support.models.tiny_vision import make_tiny_vision
from tests.support.pictures import png

IMAGE = 302


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture
def encoder(model: Path, tmp_path: Path) -> PromptEncoder:
    data = DataSection(prompt_data=(f"{tmp_path}/data/prompts.jsonl@[0:9]",), multimodal_keys={"image": "images"})
    (tmp_path / "data").mkdir()
    reader = image_reader(model, data, EvalSection(), None)
    return PromptEncoder(model, apply_chat_template=False, images=reader)


def prompt_of(images: list[Any], folder: Path, text: str = "<image>What is 1 + 2?") -> sample_pb2.Prompt:
    messages = with_images(text, {"images": images}, "images", folder)
    made = sample_pb2.Prompt(prompt_id="prompts.jsonl:3@0")
    made.messages.messages.extend(map(chat_message, messages))
    return made


@pytest.mark.parametrize("model", FAMILIES, indirect=True, scope="module")
@pytest.mark.parametrize("sizes", [[(100, 60)], [(30, 200), (56, 56)]])
def test_tokens_and_pixels_are_those_of_the_models_processor(
    model: Path, encoder: PromptEncoder, tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    names = []
    for number, size in enumerate(sizes):
        (tmp_path / "data" / f"{number}.png").write_bytes(png(*size, number))
        names.append(f"{number}.png")
    found = encoder.encode(prompt_of(names, tmp_path / "data", "<image> and " * len(sizes)))
    assert found.images is not None
    sent = [Image.open(io.BytesIO(base64.b64decode(each))) for each in found.images.data]
    processor = AutoProcessor.from_pretrained(model)  # torchvision's, as an engine's
    expected = processor(text=[found.text], images=sent, return_tensors="np")
    assert list(found.tokens) == expected["input_ids"][0].tolist()
    assert found.images.engine_tokens == tuple(processor.tokenizer.encode(found.text))
    assert (found.images.columns[IMAGE_GRIDS] == expected["image_grid_thw"]).all()
    np.testing.assert_allclose(found.images.columns[PIXEL_VALUES], expected["pixel_values"], atol=1e-5)
    vision = read_architecture(model).vision
    assert vision is not None
    starts = image_starts("", vision, np.array(found.tokens, np.int32), found.images.columns)
    assert [found.tokens[start : start + t * h * w] for start, (t, h, w) in starts] == [
        (IMAGE,) * (t * h * w) for _, (t, h, w) in starts
    ]


def test_a_bad_image_is_named_by_file_and_line_and_by_itself(
    encoder: PromptEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    (tmp_path / "secret.png").write_bytes(png(60, 60))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "torn.png").write_bytes(png(60, 60)[:200])
    (folder / "long.png").write_bytes(png(600, 2))
    (folder / "good.png").write_bytes(png(60, 60))
    with (folder / "huge.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    os.mkfifo(folder / "pipe.png")
    for name, said in (
        ("absent.png", "cannot be read on the rollout service's machine: No such file"),
        ("../secret.png", "is not below the folder of its prompt file"),
        ("link.png", "is not below the folder of its prompt file"),
        ("torn.png", "cannot be read as PNG"),
        ("long.png", "is 600 x 2: absolute aspect ratio"),
        ("huge.png", "may have 16,777,216"),
        ("pipe.png", "cannot be read"),
        ("data:image/png;base64,?", "is no base64"),
    ):
        shown = "inline" if name.startswith("data:") else name.removeprefix("..")
        with pytest.raises(InvalidArgument, match=f"prompt prompts.jsonl:3@0: image 1 .*{shown}.* {said}") as raised:
            encoder.encode(prompt_of([name], folder))
        assert raised.value.reason == "BAD_IMAGE"
    monkeypatch.setattr("headrace.images.MAX_IMAGE_PIXELS", 3599)
    with pytest.raises(InvalidArgument, match="is 60 x 60, may have 3,599 pixels"):
        encoder.encode(prompt_of(["good.png"], folder))


def test_a_text_that_says_the_image_token_itself_is_refused(encoder: PromptEncoder, tmp_path: Path) -> None:
    (tmp_path / "data" / "a.png").write_bytes(png(60, 60))
    with pytest.raises(InvalidArgument, match="wrote 2 image tokens for 1 images"):
        encoder.encode(prompt_of(["a.png"], tmp_path / "data", "<image><|image_pad|>"))


async def test_an_engine_is_sent_the_images_and_one_token_for_each(
    fakes: FakeFleet, encoder: PromptEncoder, tmp_path: Path
) -> None:
    (tmp_path / "data" / "a.png").write_bytes(png(60, 60))
    prompt = encoder.encode(prompt_of(["a.png"], tmp_path / "data"))
    assert prompt.images is not None
    fake = fakes.fake(0)
    fake.more_image_tokens = len(prompt.tokens) - len(prompt.images.engine_tokens)
    request = SampleRequest("s", "g", 0, prompt, None, {}, SamplingParams(max_new_tokens=5))
    async with EngineClient(fakes.fleet.engines[0].url) as client:
        sampler = EngineSampler(Generator(client, fakes.fleet.weights), encoder, seconds=20)
        sample = await sampler.sample(request)
        fake.more_image_tokens += 1
        other = await sampler.sample(replace(request, sample_id="t"))
    body = fake.bodies[0]
    assert (body["input_ids"], body["image_data"]) == ([*prompt.images.engine_tokens], [*prompt.images.data])
    assert sample.tokens.tolist() == [*prompt.tokens, *response_to(prompt.images.engine_tokens, 5)]
    assert sample.columns.keys() == prompt.images.columns.keys()
    assert other.failure is not None
    assert other.failure.reason == "OTHER_IMAGE_TOKENS"
