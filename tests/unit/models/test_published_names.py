"""Presets against transformers' own model of the config: names and shapes, read as a published folder is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from headrace.errors import ConfigError
from headrace.models.registry import PRESETS, architecture, read_architecture, table
from services.trainer.hugging_face.hf_folder import HfFolder, check_names, passthrough_names
from tests.support.models.tiny_families import make_tiny
from tests.support.models.tiny_variants import stack_experts
from tests.support.ranks.rank_results import weights

STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
Shape = tuple[int, ...]


@pytest.mark.parametrize(
    "name", ["qwen3-next-80B-A3B", "qwen3.5-0.8B", "qwen3.5-27B", "qwen3.5-35B-A3B", "qwen3-vl-4B", "qwen3-vl-8B"]
)
def test_a_presets_tensors_are_those_of_transformers_and_of_the_published_folder(name: str, tmp_path: Path) -> None:
    """Of four layers, one of each kind among them: the number of parameters tells that the others are there too."""
    config = deepcopy(dict(PRESETS[name].config))
    config.get("text_config", config)["num_hidden_layers"] = 4
    published = dict(_published(config))
    _write(tmp_path, published)
    a = architecture(config)
    source = HfFolder(tmp_path, a)
    check_names(source, a)
    rows = {tensor.name: tensor.shape for tensor in table(a).tensors()}
    assert source.names - set(passthrough_names(source.names, a)) == rows.keys()
    stacked = rows.keys() - published.keys()
    assert all(published[each] == rows[each] for each in rows.keys() & published.keys())
    assert all(source.shape(each) == rows[each] for each in stacked)


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    expected = weights(make_tiny(tmp_path / "model", "qwen3_5_moe"))
    stack_experts(tmp_path / "model")
    source = HfFolder(tmp_path / "model", read_architecture(tmp_path / "model"))
    assert source.names == expected.keys()
    for name, weight in expected.items():
        assert source.shape(name) == weight.shape
        assert torch.equal(source.tensor(name), weight), name


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    """What lies behind the last expert would never be read."""
    make_tiny(tmp_path / "model", "qwen3_5_moe")
    stack_experts(tmp_path / "model")
    a = read_architecture(tmp_path / "model")
    assert a.experts
    fewer = replace(a, experts=replace(a.experts, count=a.experts.count // 2))
    source = HfFolder(tmp_path / "model", fewer)
    with pytest.raises(ConfigError, match="of different models"):
        source.parts(next(row for row in table(fewer).rows() if row.expert == 0))


def _published(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Qwen3-Next has a tensor for each expert, Qwen3.5 one for all, both layers that predict further tokens."""
    made = CONFIG_MAPPING[config["model_type"]](**config)
    kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        state = kind.from_config(made).state_dict()
    for name, tensor in state.items():
        stack = STACKED.fullmatch(name)
        if name == "lm_head.weight" and made.tie_word_embeddings:
            continue
        if stack is None or "text_config" in config:
            yield name, tuple(tensor.shape)
        else:
            yield from _apart(stack[1], stack[2], tuple(tensor.shape))
    if made.model_type != "qwen3_vl":
        yield "mtp.fc.weight", (8, 16)


def _apart(experts: str, kind: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    count, rows, columns = shape
    names = ("down_proj",) if kind == "down" else ("gate_proj", "up_proj")
    for expert in range(count):
        yield from ((f"{experts}.{expert}.{name}.weight", (rows // len(names), columns)) for name in names)


def _write(folder: Path, tensors: dict[str, Shape]) -> None:
    """An index of all of them, and for each stack a file with a hole in the place of its weights."""
    files = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in filter(STACKED.fullmatch, tensors):
        size = 2 * torch.Size(tensors[name]).numel()
        header = json.dumps({name: {"dtype": "BF16", "shape": tensors[name], "data_offsets": (0, size)}}).encode()
        with (folder / files[name]).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
