"""Models and data sets of the Hugging Face hub, by name: downloaded once into the hub's own cache."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.errors import ConfigError, DeadlineExceeded, Unavailable
from headrace.models.folders import is_whole

_REPOSITORY = r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_MODEL = re.compile(_REPOSITORY)
_DATASET = re.compile(_REPOSITORY + r"(?::(?:(?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?")
_FILES = (".jsonl", ".json", ".parquet", ".csv")
_OF_A_MODEL = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
_NOT_OF_A_MODEL = ("*/*", "consolidated*")
"""Folders with the weights in other forms, and Mistral's second copy of them."""
_PARQUET = "refs/convert/parquet"
"""The branch in which the hub keeps each data set as CONFIG/SPLIT/0000.parquet."""
_USUAL_CONFIGS = ("default", "main")
_SECONDS = 12 * 3600.0
"""For the largest models. The hub's client gives up much earlier where nothing comes."""

T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DatasetName:
    """`OWNER/NAME`, `OWNER/NAME:SPLIT` or `OWNER/NAME:CONFIG/SPLIT`."""

    name: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetName | None:
        """None for the name of a file. A path wins if it exists, or the folder that it would be in."""
        match = _DATASET.fullmatch(text)
        if match is None or match["name"].endswith(_FILES) or _is_here(text) or _is_here(match["name"]):
            return None
        return cls(match["name"], match["config"], match["split"])


def is_model_name(text: str) -> bool:
    """True for OWNER/NAME, unless it is a path: it exists, or the folder that it would be in."""
    return _MODEL.fullmatch(text) is not None and not _is_here(text)


def _is_here(text: str) -> bool:
    return Path(text).exists() or Path(text).parent.is_dir()


def model_folder(name: str, option: str, tell: Tell) -> Path:
    """The folder of a model, which is downloaded unless the cache has all of it.

    Raises ConfigError for a name that the hub does not have, and Unavailable where it cannot be reached.
    """
    hub = _Hub(name, option)
    if (cached := hub.cached_model()) is not None:
        return cached
    tell(f"{option} {name}: downloading the model from the hub (once)")
    return hub.download(allow=_OF_A_MODEL, ignore=_NOT_OF_A_MODEL)


def dataset_files(dataset: DatasetName, option: str, default_split: str, tell: Tell) -> Sequence[Path]:
    """The Parquet files of one split, in order; the hub has them of every data set that it can read.

    Raises what `model_folder` does, and ConfigError with the configurations or splits where the name leaves them open.
    """
    hub = _Hub(dataset.name, option, "dataset", _PARQUET)
    config, split, files = _chosen(hub.files(), dataset, option, default_split)
    tell(f"{option} {dataset.name}: {config}/{split} of the hub, {len(files)} Parquet file{'s' * (len(files) > 1)}")
    folder = hub.download(allow=files)
    return [folder / file for file in files]


def _chosen(
    files: Sequence[str], dataset: DatasetName, option: str, default_split: str
) -> tuple[str, str, Sequence[str]]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(files):
        match file.split("/"):
            case [of_config, of_split, name] if name.endswith(".parquet"):
                found[of_config][of_split].append(file)
    config = dataset.config or _usual(list(found))
    if config is None or config not in found:
        there = ", ".join(found) or "none in Parquet"
        raise ConfigError(
            f"{option} {dataset.name}: name one of its configurations ({there}): "
            f"{dataset.name}:CONFIG/{dataset.split or default_split}"
        )
    split = dataset.split or default_split
    if split not in found[config]:
        raise ConfigError(
            f"{option} {dataset.name} has no split {split} in {config}; it has {', '.join(found[config])}: "
            f"write {dataset.name}:{next(iter(found[config]))}"
        )
    return config, split, found[config][split]


def _usual(configs: Sequence[str]) -> str | None:
    usual = [name for name in _USUAL_CONFIGS if name in configs]
    return configs[0] if len(configs) == 1 else usual[0] if usual else None


@dataclass(frozen=True, slots=True)
class _Hub:
    """A repository. huggingface_hub is imported where it is asked."""

    name: str
    option: str
    repo_type: str = "model"
    revision: str | None = None

    def cached_model(self) -> Path | None:
        try:
            folder = self._ask(lambda: self._snapshot(_OF_A_MODEL, _NOT_OF_A_MODEL, local=True))
        except Unavailable:
            return None
        return folder if is_whole(folder) else None

    def files(self) -> Sequence[str]:
        """All of the repository's; those of the cache where the hub cannot be reached."""
        try:
            return self._ask(self._listed)
        except Unavailable as unreachable:
            try:
                folder = self._ask(lambda: self._snapshot(None, None, local=True))
            except Unavailable:
                raise unreachable from None
            return [str(file.relative_to(folder)) for file in folder.rglob("*.parquet")]

    def _listed(self) -> Sequence[str]:
        from huggingface_hub import list_repo_files

        return list_repo_files(self.name, repo_type=self.repo_type, revision=self.revision)

    def download(self, allow: Sequence[str], ignore: Sequence[str] = ()) -> Path:
        return self._ask(lambda: self._snapshot(allow, ignore))

    def _snapshot(self, allow: Sequence[str] | None, ignore: Sequence[str] | None, *, local: bool = False) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.name,
                repo_type=self.repo_type,
                revision=self.revision,
                allow_patterns=None if allow is None else list(allow),
                ignore_patterns=None if ignore is None else list(ignore),
                local_files_only=local,
            )
        )

    def _ask(self, ask: Callable[[], T]) -> T:
        try:
            import httpx  # its errors come through huggingface_hub
            from huggingface_hub import errors
        except ImportError as error:
            raise ConfigError(
                f"{self.option} {self.name} is no path here, and a name of the hub needs the package huggingface_hub: "
                "pip install 'headrace[hub]', or name a path"
            ) from error
        try:
            return _within(_SECONDS, ask)
        except errors.GatedRepoError as error:
            raise ConfigError(
                f"{self.option} {self.name}: its terms have to be accepted first: do so on its page of the hub, and "
                "set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{self.option} {self.name} is no path here, and the hub has no {self.repo_type} of this name, or a "
                "private one: correct it, or set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ConfigError(
                f"{self.option} {self.name}: the hub has no Parquet form of this data set: download its files, and "
                "name those"
            ) from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.option} {self.name}: not all of it came from the hub within {_SECONDS / 3600:g} h: the same "
                "command continues the download"
            ) from error
        except (OSError, httpx.HTTPError) as error:
            raise Unavailable(
                f"{self.option} {self.name} is no path here, and the hub cannot be reached "
                f"({type(error).__name__}): name a path, or download it where there is a network"
            ) from error


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Raises TimeoutError; what goes on then ends with this process."""
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(ask())
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is wanted
            result.set_exception(error)

    threading.Thread(target=work, name="hub", daemon=True).start()
    return result.result(seconds)
