"""Names of the Hugging Face hub in a job: what is downloaded, what is a path, and what is said where it fails."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from headrace.errors import ConfigError, Unavailable
from headrace.job.load.load import load
from headrace.job.rules.scope import Scope, scope_of_check
from headrace.job.schema.job import Job

GSM8K = ["main/test/0000.parquet", "main/train/0000.parquet", "socratic/train/0000.parquet"]


@dataclass
class Hub:
    """The hub's client with these repositories; what was downloaded is in its cache."""

    cache: Path
    models: dict[str, Path] = field(default_factory=dict)
    datasets: dict[str, list[str]] = field(default_factory=dict)
    failure: Callable[[str], Exception] | None = None
    downloads: list[str] = field(default_factory=list)

    def snapshot_download(
        self,
        repo_id: str,
        *,
        repo_type: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        allow_patterns: list[str] | str | None = None,
        ignore_patterns: list[str] | str | None = None,
    ) -> str:
        folder = self.cache / repo_id.replace("/", "--")
        if folder.is_dir():
            return str(folder)
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        self._reach(repo_id)
        assert allow_patterns is not None
        self.downloads.append(repo_id)
        if repo_type == "model":
            kept = [each.name for each in self.models[repo_id].iterdir() if _matches(each.name, allow_patterns)]
            folder.mkdir(parents=True)
            for name in kept:
                shutil.copy(self.models[repo_id] / name, folder / name)
        else:
            assert revision == "refs/convert/parquet"
            for name in self.datasets[repo_id]:
                if _matches(name, allow_patterns):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).touch()
        return str(folder)

    def list_repo_files(self, repo_id: str, *, revision: str | None = None, repo_type: str | None = None) -> list[str]:
        self._reach(repo_id)
        return self.datasets[repo_id]

    def _reach(self, repo_id: str) -> None:
        if self.failure:
            raise self.failure(repo_id)


def _matches(name: str, patterns: list[str] | str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def response_error(kind: type[errors.HfHubHTTPError]) -> Callable[[str], Exception]:
    return lambda name: kind(name, response=httpx.Response(404, request=httpx.Request("GET", "http://hub.invalid")))


@pytest.fixture
def hub(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path / "cache", {"Qwen/Qwen3-4B": model}, {"openai/gsm8k": GSM8K})
    for name in ("snapshot_download", "list_repo_files"):
        own, real = (inspect.signature(getattr(each, name)) for each in (fake, huggingface_hub))
        assert own.parameters.keys() <= real.parameters.keys()
        monkeypatch.setattr(huggingface_hub, name, getattr(fake, name))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return fake


def loaded(*flags: str, services: tuple[str, ...] = ("buffer", "rollout", "trainer"), **kwargs: Any) -> Job:
    batch = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--num-steps-per-rollout", "1"]
    words = [*batch, "--rm-type", "math", *flags]
    return load(None, words, {}, **{"scope_of": lambda _: Scope(services), **kwargs})


MODEL = ("--hf-checkpoint", "Qwen/Qwen3-4B")


def test_a_model_is_downloaded_once_and_its_folder_is_the_jobs(hub: Hub) -> None:
    said: list[str] = []
    job = loaded(*MODEL, note=said.append)
    assert job.model.hf_checkpoint == hub.cache / "Qwen--Qwen3-4B"
    assert any("Qwen/Qwen3-4B" in line for line in said)
    hub.failure = lambda _: httpx.ConnectError("no network")
    assert loaded(*MODEL).model.hf_checkpoint == job.model.hf_checkpoint
    assert hub.downloads == ["Qwen/Qwen3-4B"]


def test_a_path_that_exists_wins(hub: Hub, model: Path) -> None:
    shutil.copytree(model, Path("Qwen/Qwen3-4B"))
    assert loaded(*MODEL).model.hf_checkpoint == Path("Qwen/Qwen3-4B").absolute()
    assert hub.downloads == []


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "./Qwen/Qwen3-4B", "one/two/three", "data/x.jsonl"])
def test_what_is_in_a_folder_that_exists_or_has_another_form_is_a_path(hub: Hub, name: str) -> None:
    Path("Qwen").mkdir()
    flags = ("--prompt-data", name) if name.endswith("jsonl") else ()
    with pytest.raises(ConfigError, match="is not a folder|does not exist"):
        loaded(*(() if flags else ("--hf-checkpoint", name)), *flags, *(("--hf-checkpoint", "/x") if flags else ()),
               services=("buffer",) if flags else ("trainer",))  # fmt: skip
    assert hub.downloads == []


def test_a_service_downloads_what_it_reads(hub: Hub) -> None:
    job = loaded(*MODEL, "--prompt-data", "openai/gsm8k", services=("buffer",))
    assert hub.downloads == ["openai/gsm8k"]
    assert job.data.prompt_data == (str(hub.cache / "openai--gsm8k/main/train/0000.parquet"),)


def test_nothing_is_downloaded_for_another_machine(hub: Hub) -> None:
    scopes = []

    def elsewhere(job: Job) -> Scope:
        scopes.append(scope_of_check(job, elsewhere=True))
        return scopes[-1]

    loaded(*MODEL, scope_of=elsewhere)
    assert hub.downloads == []
    assert any("Qwen/Qwen3-4B" in line for line in scopes[-1].unchecked)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("openai/gsm8k", "main/train/0000.parquet"),
        ("openai/gsm8k:test", "main/test/0000.parquet"),
        ("openai/gsm8k:socratic/train", "socratic/train/0000.parquet"),
        ("openai/gsm8k:test@[0:64]", "main/test/0000.parquet@[:64]"),
    ],
)
def test_a_data_set_is_named_with_split_configuration_and_slice(hub: Hub, text: str, file: str) -> None:
    job = loaded(*MODEL, "--prompt-data", text)
    assert job.data.prompt_data == (str(hub.cache / "openai--gsm8k" / file),)


def test_a_data_set_in_the_cache_needs_no_network(hub: Hub) -> None:
    first = loaded(*MODEL, "--prompt-data", "openai/gsm8k")
    hub.failure = lambda _: httpx.ConnectError("no network")
    assert loaded(*MODEL, "--prompt-data", "openai/gsm8k").data.prompt_data == first.data.prompt_data


def test_a_split_of_several_files_keeps_its_share_of_the_batches(hub: Hub, tmp_path: Path) -> None:
    hub.datasets["a/large"] = ["default/train/0000.parquet", "default/train/0001.parquet"]
    (tmp_path / "own.jsonl").write_text('{"prompt": "1"}\n')
    job = loaded(*MODEL, "--prompt-data", "a/large", str(tmp_path / "own.jsonl"), "--prompt-data-weights", "3", "1")
    assert len(job.data.prompt_data) == 3
    assert job.data.prompt_data_weights == (1.5, 1.5, 1.0)


def test_an_evaluation_takes_the_test_split(hub: Hub) -> None:
    job = loaded(*MODEL, "--eval-prompt-data", "gsm8k", "openai/gsm8k")
    assert job.eval.eval_prompt_data == (("gsm8k", hub.cache / "openai--gsm8k/main/test/0000.parquet"),)


@pytest.mark.parametrize(
    ("text", "said"), [("openai/gsm8k:dev", "it has test, train"), ("openai/gsm8k:hard/train", "main, socratic")]
)
def test_a_split_or_configuration_that_is_not_there_is_refused_with_those_that_are(
    hub: Hub, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(*MODEL, "--prompt-data", text)


@pytest.mark.parametrize(
    ("failure", "kind", "way"),
    [
        (lambda _: httpx.ConnectError("no route"), Unavailable, "name a path"),
        (lambda _: errors.OfflineModeIsEnabled("offline"), Unavailable, "name a path"),
        (response_error(errors.RepositoryNotFoundError), ConfigError, "the hub has no"),
        (response_error(errors.GatedRepoError), ConfigError, "HF_TOKEN"),
        (response_error(errors.RevisionNotFoundError), ConfigError, "Parquet"),
    ],
)
def test_a_hub_that_does_not_give_it_is_one_sentence_with_the_way_out(
    hub: Hub, failure: Any, kind: type[Exception], way: str
) -> None:
    hub.failure = failure
    with pytest.raises(kind, match=way) as raised:
        loaded("--hf-checkpoint", "/x", "--prompt-data", "openai/gsm8k", services=("buffer",))
    assert "prompt_data openai/gsm8k" in str(raised.value)


def test_a_missing_package_is_named_with_the_extra(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"headrace\[hub\]"):
        loaded(*MODEL)
    with pytest.raises(ConfigError, match=r"headrace\[hub\]"):
        loaded("--hf-checkpoint", "/x", "--prompt-data", "openai/gsm8k", services=("buffer",))
