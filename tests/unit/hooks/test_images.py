"""A generate function's images: opened by Pillow on their way in, files on their way out."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.errors import InvalidArgument
from headrace.hooks import Sample, from_hook, hook_args, run_generate, to_hook
from headrace.images import MAX_IMAGES
from headrace.job.schema.job import Job
from headrace.process import worker_main as codec
from tests.support.pictures import png

SOURCE = """
import numpy as np

async def generate(args, sample, sampling_params):
    (image,) = sample.multimodal_inputs["images"]
    sample.metadata["seen"] = [*image.size, image.mode]
    sample.multimodal_inputs = {"images": [image, image.convert("CMYK")], "videos": None}
    sample.multimodal_train_inputs = {"pixel_values": np.ones((4, 3), np.float32), "image_grid_thw": [[1, 2, 2]]}
    sample.tokens, sample.response, sample.response_length = [1, 2], "x", 1
    sample.rollout_log_probs, sample.status = [-1.0], sample.Status.COMPLETED
    return sample
"""


async def test_a_function_sees_images_of_pillow_and_what_it_sets_comes_back(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(SOURCE)
    given = Sample(multimodal_inputs={"images": [png(20, 10)]})
    args = hook_args(Job.model_validate({"model": {"hf_checkpoint": tmp_path}}))
    made = await run_generate(f"{tmp_path}/hook.py:generate", args, [given], {}, False)
    ((out,),) = codec.decode(run_generate, codec.encode(made))
    back = to_hook(from_hook(out, sample_id="s", group_id="g", index=0))
    assert back.metadata["seen"] == [20, 10, "RGB"]
    assert back.multimodal_inputs is not None
    images = [Image.open(io.BytesIO(file)) for file in back.multimodal_inputs["images"]]
    assert [(image.size, image.mode, image.format) for image in images] == [((20, 10), "RGB", "PNG")] * 2
    assert (np.asarray(images[0]) == np.asarray(Image.open(io.BytesIO(png(20, 10))))).all()
    assert back.multimodal_train_inputs is not None
    assert back.multimodal_train_inputs["pixel_values"].shape == (4, 3)
    assert back.multimodal_train_inputs["image_grid_thw"].dtype == np.int64


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("multimodal_inputs", {"images": ["a.png"]}, "must be a list of images: PIL images, or their files' bytes"),
        ("multimodal_inputs", {"images": [b""] * (MAX_IMAGES + 1)}, f"has {MAX_IMAGES + 1} images"),
        ("multimodal_inputs", {"a.b": [b""]}, "has the key 'a.b'"),
        ("multimodal_train_inputs", {f"a{n}": [1] for n in range(17)}, "has 17 arrays, may have 16"),
        ("multimodal_train_inputs", {"a": [[1], [1, 2]]}, "is no array of numbers"),
    ],
)
def test_what_is_no_image_or_array_is_refused_by_name(field: str, value: object, said: str) -> None:
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], status=Sample.Status.COMPLETED)
    setattr(sample, field, value)
    with pytest.raises(InvalidArgument, match=f"sample s: {field}.*{said}"):
        from_hook(sample, sample_id="s", group_id="g", index=0)
