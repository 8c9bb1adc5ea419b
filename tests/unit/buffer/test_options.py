"""Every option that the buffer reads is in the parts that are built of a job, with the job's value."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.rpc.server import RpcServer, Service
from services.buffer import __main__ as program
from services.buffer.build import of_shard, store_of_job, train_stream
from services.buffer.ledger.stream import Selection, StreamConfig, StreamState
from services.buffer.prompts.data_source import DataSourceReader
from services.buffer.runtime.prompt_sources import PromptSources
from services.buffer.runtime.user_code import GroupChooser
from services.buffer.store import postgres
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.job_options import Readers, ignored, options_named_in, options_read


@dataclass(frozen=True)
class Parts:
    """What the program makes of a job."""

    folder: Path
    buffer: Any

    @property
    def stream(self) -> Any:
        return self.buffer.ledger.streams["train"].state.config

    @property
    def source(self) -> Any:
        return self.buffer.sources._data_sources["train"]


FILES: Readers = {
    "hf_checkpoint": [lambda p: p.folder / "model" if p.stream.vocab_size == VOCAB_SIZE else None],
    **{
        option: [lambda p, name=name: getattr(p.stream, name)]
        for option, name in {
            "n_samples_per_prompt": "n_samples_per_prompt",
            "rollout_batch_size": "groups_per_step",
            "max_staleness": "max_staleness",
        }.items()
    },
    "over_sampling_batch_size": [lambda p: p.stream.over_sampling_groups + p.stream.groups_per_step],
    "selection": [lambda p: p.stream.selection.name.lower()],
    "max_payload_bytes": [lambda p: p.stream.max_payload_bytes, lambda p: p.buffer.columns._max_bytes],
    "min_size_to_sample": [lambda p: p.stream.limiter.min_size],
    "samples_per_insert": [lambda p: p.stream.limiter.samples_per_insert],
    "prompt_data": [lambda p: tuple(f"{file.path}@[{file.first_row}:{file.end_row}]" for file in p.stream.files)],
    "prompt_data_weights": [lambda p: tuple(file.weight for file in p.stream.files)],
    **{
        option: [
            lambda p, name=name: getattr(p.stream.files[0], name),
            lambda p, name=name: getattr(p.stream.files[1], name),
        ]
        for option, name in {
            "input_key": "input_key",
            "label_key": "label_key",
            "metadata_key": "metadata_key",
            "tool_key": "tool_key",
            "priority_key": "priority_key",
            "rollout_shuffle": "shuffle",
            "rollout_seed": "seed",
            "num_epoch": "num_epochs",
            "skip_bad_lines": "skip_bad_lines",
            "streaming_data": "streaming",
            "num_data_workers": "num_workers",
        }.items()
    },
    "multimodal_keys": [lambda p: {"image": p.stream.files[0].image_key}],
    "loss_type": [lambda p: "policy_loss" if p.stream.needs_reward else "sft_loss"],
    "prompt_root": [lambda p: p.buffer.sources.files.root],
    "retain_events": [lambda p: p.buffer.ledger.retain_events],
    "buffer_store": [lambda p: "memory" if isinstance(p.buffer._store, MemoryStore) else "another"],
}
HOOKS: Readers = {
    "buffer_filter_path": [
        lambda p: p.buffer._chooser._path,
        lambda p: "filter.py:choose" if p.stream.selection is Selection.HOOK else None,
    ],
    "data_source_path": [lambda p: p.stream.data_source, lambda p: p.source._path],
    "use_opd": [lambda p: not p.stream.needs_reward],
}
SHARDS: Readers = {
    "buffer_shards": [lambda p: p.stream.num_shards],
    "buffer_shard": [lambda p: p.stream.shard],
    "custom_convert_samples_to_train_data_path": [lambda p: None if p.stream.needs_reward else "hooks.py:convert"],
}
ADDRESSES: Readers = {
    "buffer_address": [lambda p: ",".join(f"127.0.0.1:{7001 + number}" for number in range(p.stream.num_shards))]
}
SHOWN_BY = {
    "run_name": "test_a_database_is_the_jobs, below",
    "buffer_postgres": "test_a_database_is_the_jobs, below",
    "trace_sample_ratio": "tests/unit/test_traces.py, in a run of all services",
    "vocab_size": "of config.json, and no option here",
    "update_weights_interval": "test_weights_that_are_published_too_seldom_are_refused, below",
}
"""Options that the buffer reads and no table compares, with the test that shows them."""
VOCAB_SIZE = 640
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "model": {"hf_checkpoint": folder / "model"},
        "run": {"run_name": "unusual"},
        "data": {
            "prompt_data": [f"{folder / 'a.jsonl'}@[2:9]", f"{folder / 'b.jsonl'}@[4:6]"],
            "prompt_data_weights": [3.0, 0.5],
            "streaming_data": True,
            "num_data_workers": 3,
            "input_key": "question",
            "label_key": "answer",
            "metadata_key": "facts",
            "tool_key": "tools",
            "multimodal_keys": {"image": "pictures"},
            "priority_key": "weight",
            "rollout_shuffle": True,
            "rollout_seed": 4711,
            "num_epoch": 7,
            "skip_bad_lines": True,
        },
        "rollout": {"rollout_batch_size": 12, "n_samples_per_prompt": 5, "over_sampling_batch_size": 15},
        "train": {"loss_type": "sft_loss"},
        "buffer": {
            "max_staleness": 5,
            "buffer_store": "memory",
            "max_payload_bytes": 6_543_210,
            "prompt_root": folder / "root",
            "retain_events": 1_999,
            "selection": "priority",
            "min_size_to_sample": 17,
            "samples_per_insert": 0.75,
        },
    }


VARIANTS: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], Readers]] = {
    "files": ({}, FILES),
    "hooks": (
        {
            "data": {"data_source_path": "source.py:Source"},
            "buffer": {"buffer_filter_path": "filter.py:choose"},
            "train": {"loss_type": "policy_loss"},
            "distillation": {"use_opd": True},
        },
        HOOKS,
    ),
    "shards": (
        {
            "buffer": {"buffer_shards": 3, "buffer_shard": 2},
            "train": {"loss_type": "policy_loss"},
            "hooks": {"custom_convert_samples_to_train_data_path": "hooks.py:convert"},
        },
        SHARDS,
    ),
    "addresses": (
        {"services": {"buffer_address": "127.0.0.1:7001,127.0.0.1:7002"}, "buffer": {"buffer_shard": 1}},
        ADDRESSES,
    ),
}
"""Options that exclude each other are in different jobs."""


def job_of(folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> Job:
    of_all = sections(folder)
    return Job.model_validate(of_all | {name: of_all.get(name, {}) | dict(of_one) for name, of_one in changes.items()})


async def parts_of(folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """The parts that the program makes of the job. It serves nothing, and no prompt is read."""
    found = list[Parts]()

    class Unserved(RpcServer):
        def __init__(self, name: str, address: str, services: Sequence[Service], **given: Any) -> None:
            super().__init__(name, address, services, **given)
            (service,) = services
            found.append(Parts(folder, service.servicer._buffer))

        async def start(self, *, ready: bool = True) -> None:
            pass

        async def run_until_signal(self, before: Any = None) -> None:
            pass

    async def nothing(part: object) -> None:
        pass

    async def begin(sources: PromptSources, config: StreamConfig) -> StreamState:
        if config.data_source:
            sources._data_sources[config.name] = await sources._user_code.data_source(config.data_source)
        return StreamState(config)

    monkeypatch.setattr(program, "RpcServer", Unserved)
    monkeypatch.setattr(PromptSources, "begin", begin)
    monkeypatch.setattr(GroupChooser, "start", nothing)
    monkeypatch.setattr(DataSourceReader, "start", nothing)
    given = {"address": "127.0.0.1:0", "metrics_address": None, "insecure": False, "tls_dir": None, "tokens_file": None}
    data_dir = folder / "ledger"
    await program.serve(job, argparse.Namespace(data_dir=data_dir, **given), store_of_job(job, data_dir))
    (parts,) = found
    return parts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


async def test_the_parts_have_the_values_that_the_job_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(program.__file__).parent
    files = [source / "__main__.py", source / "build.py"]
    read, compared = options_named_in(files), set(SHOWN_BY)
    for name, (changes, readers) in VARIANTS.items():
        job = job_of(folder, changes)
        with options_read() as now:
            parts = await parts_of(folder, job, monkeypatch)
        lines = ignored(job, parts, readers)
        assert not lines, f"{name}:\n" + "\n".join(lines)
        compared |= set(readers)
        read |= now
    assert sorted(read - compared) == [], "compare them above"


def test_a_database_is_the_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[object]()

    class NoStore:
        def __init__(self, *given: object, **named: object) -> None:
            opened.append((given, named))

    monkeypatch.setattr(postgres, "PostgresStore", NoStore)
    url = "postgresql://somebody@database/ledgers"
    job = job_of(folder, {"buffer": {"buffer_store": "postgres", "buffer_postgres": url}})
    store_of_job(job, folder / "ledger")
    store_of_job(of_shard(job, 1), folder / "ledger")
    assert opened == [((url, name), {"wait_seconds": 120.0}) for name in ("unusual", "unusual/1")]


def test_a_ledger_is_in_files_where_the_job_does_not_say_otherwise(folder: Path) -> None:
    store = store_of_job(Job.model_validate(sections(folder) | {"buffer": {}}), folder)
    store.close()
    assert isinstance(store, SqliteStore)


@pytest.mark.parametrize(
    ("interval", "staleness", "is_refused"), [(1, 0, False), (3, 1, True), (3, 2, False), (9, 7, True)]
)
def test_weights_that_are_published_too_seldom_are_refused(
    folder: Path, interval: int, staleness: int, is_refused: bool
) -> None:
    changes = {"publish": {"update_weights_interval": interval}, "buffer": {"max_staleness": staleness}}
    with pytest.raises(ConfigError, match=f"interval {interval} .* {staleness}:") if is_refused else nullcontext():
        assert train_stream(job_of(folder, changes)).max_staleness == staleness


def test_a_shard_that_is_not_told_which_it_is_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="one of 3 shards and was not told which: pass --buffer-shard"):
        train_stream(job_of(folder, {"services": {"buffer_address": "a:1,b:1,c:1"}}))
