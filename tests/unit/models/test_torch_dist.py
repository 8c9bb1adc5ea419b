"""Folders that Megatron wrote, and what they may not be: another model's, torn, or a program in disguise."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from headrace.errors import ConfigError
from headrace.job.rules.files import check_files
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from headrace.models.registry import architecture as read
from headrace.models.torch_dist import matched, rows_of
from services.trainer.hugging_face.shards import merge
from services.trainer.hugging_face.torch_dist import TorchDistFolder
from tests.support.models.tiny_families import make_tiny, tiny_config
from tests.support.models.torch_dist import make_torch_dist

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


@pytest.fixture(scope="module")
def dense() -> Architecture:
    return read(tiny_config("qwen3"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, dense: Architecture) -> Path:
    folder = tmp_path_factory.mktemp("torch-dist") / "dense"
    make_torch_dist(folder, dense)
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_every_family_comes_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    architecture = read(tiny_config(family))
    weights = make_torch_dist(tmp_path / "written", architecture)
    source = TorchDistFolder(tmp_path / "written", architecture)
    for row, _ in rows_of(architecture):
        wanted = merge(row.sharding, [weights[row.hf[0].name]])
        assert all(torch.equal(got, want) for got, want in zip(source.parts(row), wanted, strict=True)), row


def test_a_checkpoint_of_a_model_with_linear_attention_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoints of qwen3_next are not read"):
        matched(folder, read(tiny_config("qwen3_next")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 8, "kv_channels": 16}, "num_attention_heads is 4 there and 8 here"),
        ({"ffn_hidden_size": 128}, r"linear_fc1.weight has shape \[2, 192, 64\] there and \[2, 256, 64\] here"),
        ({"add_qkv_bias": True}, "lacks 2 tensors of this model: decoder.layers.0.self_attention.linear_qkv.bias"),
        ({"qk_layernorm": False}, "holds 2 tensors that this model does not have: .*k_layernorm.weight"),
    ],
)
def test_another_models_checkpoint_is_refused_by_name(
    written: Path, dense: Architecture, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        matched(written, replace(dense, **change))


def _cut(folder: Path) -> None:
    data = folder / RELEASE / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 2000)


def _no_json(folder: Path) -> None:
    (folder / RELEASE / "metadata.json").write_text("[" * 100_000)


def _other_format(folder: Path) -> None:
    (folder / RELEASE / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


TORN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tracker": (lambda f: (f / TRACKER).unlink(), "has no latest_checkpointed_iteration.txt"),
    "a path in the tracker": (
        lambda f: (f / TRACKER).write_text("../../etc"),
        "says '../../etc': it has to be the num",
    ),
    "no common": (lambda f: (f / RELEASE / "common.pt").unlink(), "release has no common.pt"),
    "no data": (lambda f: (f / RELEASE / "__0_0.distcp").unlink(), "__0_0.distcp, which holds .*, is not there"),
    "half the data": (_cut, "__0_0.distcp has [0-9]+ bytes, and .* ends at"),
    "bytes for metadata": (
        lambda f: (f / RELEASE / ".metadata").write_bytes(b"\x80\x04nothing"),
        "metadata is damaged",
    ),
    "bytes for common": (lambda f: (f / RELEASE / "common.pt").write_bytes(b"PK"), "not a file of torch.save"),
    "nested json": (_no_json, "is no checkpoint's metadata.json"),
    "another format": (_other_format, "says sharded_backend 'zarr', and headrace reads torch_dist"),
}


@pytest.mark.parametrize("case", TORN)
def test_a_folder_that_is_not_whole_is_refused(folder: Path, dense: Architecture, case: str) -> None:
    spoil, message = TORN[case]
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        matched(folder, dense)


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def _with_chunk(folder: Path, content: bytes) -> None:
    """Puts other bytes where the embedding was."""
    path, data = folder / RELEASE / ".metadata", folder / RELEASE / "__0_0.distcp"
    metadata = pickle.loads(path.read_bytes())
    index = MetadataIndex("embedding.word_embeddings.weight", torch.Size((0, 0)))
    metadata.storage_data[index] = _StorageInfo(data.name, data.stat().st_size, len(content))
    with data.open("ab") as file:
        file.write(content)
    path.write_bytes(pickle.dumps(metadata))


def _saved(value: Any, path: Path) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


def test_a_program_in_any_file_is_named_and_not_run(tmp_path: Path, folder: Path, dense: Architecture) -> None:
    path, mark, embedding = folder / RELEASE / ".metadata", folder / "ran", next(row for row, _ in rows_of(dense))
    metadata = pickle.loads(path.read_bytes())
    _with_chunk(folder, _saved(Evil(mark), tmp_path / "evil"))
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: embedding\.word_emb.* asks for posix\.mkdir"):
        TorchDistFolder(folder, dense).parts(embedding)
    for planned, named in ((Evil(mark), "posix.mkdir"), (Namespace(), "argparse.Namespace")):
        metadata.planner_data = planned
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ConfigError, match=rf"\.metadata asks for {named}"):
            matched(folder, dense)
    torch.save({"args": Namespace(seed=Evil(mark))}, folder / RELEASE / "common.pt")
    with pytest.raises(
        ConfigError, match=r"common\.pt asks for posix.mkdir, which no checkpoint of Megatron-core holds"
    ):
        matched(folder, dense)
    assert not mark.exists()


@pytest.mark.parametrize("value", [torch.zeros(320, 63), {"a": 1}, b"nothing"])
def test_weights_that_are_not_what_the_metadata_says_are_refused(
    tmp_path: Path, folder: Path, dense: Architecture, value: Any
) -> None:
    _with_chunk(folder, value if isinstance(value, bytes) else _saved(value, tmp_path / "value"))
    with pytest.raises(ConfigError, match=r"is not the float32 of shape \[320, 64\]|cannot be read"):
        TorchDistFolder(folder, dense).parts(next(row for row, _ in rows_of(dense)))


def test_chunks_that_overlap_are_refused(folder: Path, dense: Architecture) -> None:
    path = folder / RELEASE / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    chunks = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks
    chunks[1] = chunks[0]
    path.write_bytes(pickle.dumps(metadata))
    source = TorchDistFolder(folder, dense)
    row = next(row for row, layer in rows_of(dense) if layer == 0 and row.megatron == "mlp.linear_fc2.weight")
    with pytest.raises(ConfigError, match="two chunks of decoder.layers.mlp.linear_fc2.weight overlap"):
        source.parts(row)
    second = next(row for row, layer in rows_of(dense) if layer == 1 and row.megatron == "mlp.linear_fc2.weight")
    with pytest.raises(ConfigError, match="the chunks of decoder.layers.mlp.linear_fc2.weight leave gaps"):
        source.parts(second)


@pytest.mark.parametrize("option", ["initial_megatron_checkpoint", "ref_load"])
def test_a_job_is_refused_before_it_starts_with_another_models_folder(
    tmp_path: Path, folder: Path, option: str
) -> None:
    section = "model" if option == "ref_load" else "checkpoint"
    job = Job.model_validate({"model": {"hf_checkpoint": str(make_tiny(tmp_path / "model", "qwen3"))}})
    job = job.model_copy(update={section: getattr(job, section).model_copy(update={option: folder})})
    check_files(job, Scope(["trainer"]))
    other = json.loads((tmp_path / "model" / "config.json").read_text()) | {"intermediate_size": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=rf"{option}: .*release is of another model: 2 tensors differ: "):
        check_files(job, Scope(["trainer"]))
