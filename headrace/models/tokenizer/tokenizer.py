"""Transformers' tokenizer of a checkpoint, and its end tokens. A folder's code runs only where the job trusts it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.limits import syntax_tree

# The Python files of a Hugging Face folder that transformers would run for its tokenizer. Nothing is run here.
#
# Kimi K2 and Moonlight publish a vocabulary (tiktoken.model) and the code that reads it; `auto_map` in their
# tokenizer_config.json and config.json names that code.

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_FILE_BYTES = 1 << 20
_FIELD = "trust_remote_code"


@dataclass(frozen=True, slots=True)
class RemoteCode:
    """Names of files in `folder`; both are empty for a folder without code."""

    folder: Path
    tokenizer: tuple[str, ...]
    """Loading the tokenizer runs these."""
    config: tuple[str, ...]
    """Transformers runs these to read config.json when code is trusted and it does not know the model_type."""

    @classmethod
    def of(cls, folder: Path) -> RemoteCode:
        """Raises ConfigError for code that is not in the folder, and for a file that cannot be read."""
        tokenizer = _reference(_auto_map(folder, TOKENIZER_CONFIG).get("AutoTokenizer"))
        config = _reference(_auto_map(folder, "config.json").get("AutoConfig"))
        return cls(folder, tuple(_files(folder, tokenizer)), tuple(_files(folder, config)))

    @property
    def is_needed(self) -> bool:
        """True when the tokenizer is its code: without a tokenizer.json nothing else says how texts are cut."""
        return bool(self.tokenizer) and not (self.folder / TOKENIZER_JSON).is_file()

    def require(self, *, trusted: bool) -> None:
        """Raises ConfigError that names the files, and what can be done without running them."""
        if self.is_needed and not trusted:
            raise ConfigError(
                f"{self.folder}: its tokenizer is code of the folder ({', '.join(self.tokenizer)}), which is not run "
                "unless you trust it: read it and pass --trust-remote-code, or write a folder without code, with a "
                f"tokenizer.json: python -m headrace.models.tokenizer.without_code {self.folder} FOLDER",
                field=_FIELD,
            )


def read_json(path: Path) -> Mapping[str, Any]:
    """An empty mapping for a file that is absent. Raises ConfigError for one that is no JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="hf_checkpoint") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object", field="hf_checkpoint")
    return content


def _auto_map(folder: Path, file: str) -> Mapping[str, Any]:
    found = read_json(folder / file).get("auto_map") or {}
    return found if isinstance(found, dict) else {"AutoTokenizer": found}  # a list is the tokenizer's, as of old


def _reference(found: Any) -> str | None:
    """`module.Class`; of a slow and a fast tokenizer the fast one, which transformers prefers."""
    names = [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]
    return names[-1] if names else None


def _files(folder: Path, reference: str | None) -> Iterator[str]:
    """The reference's module and the modules of the folder that it imports, each once."""
    if reference is None:
        return
    if "--" in reference or "/" in reference:
        raise ConfigError(
            f"{folder}: its auto_map names code of another repository, {reference.split('--')[0]!r}: headrace "
            "downloads none. Put that file into the folder and name it in auto_map without the repository",
            field=_FIELD,
        )
    waiting, seen = [reference.split(".")[0]], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield f"{module}.py"
        waiting += _imported(folder / f"{module}.py")


def _imported(path: Path) -> list[str]:
    return [
        node.module.split(".")[0] if node.module else alias.name
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    ]


def parsed(path: Path) -> ast.Module:
    """A Python file as a tree, without running it. Raises ConfigError for one that is absent, too long or no Python."""
    if not path.is_file():
        raise ConfigError(f"{path} is not there, though auto_map names it: download the whole model", field=_FIELD)
    if path.stat().st_size > _FILE_BYTES:
        raise ConfigError(f"{path} is longer than {_FILE_BYTES:,} bytes: no published tokenizer is", field=_FIELD)
    try:
        return syntax_tree(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is not Python: {error}", field=_FIELD) from error


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Takes seconds. Raises ConfigError when there is no tokenizer, when its code is not trusted, or when it fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds: only for those who tokenize

    code = RemoteCode.of(folder)
    code.require(trusted=trust_remote_code)
    try:
        if code.tokenizer and not trust_remote_code:
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        if code.tokenizer and trust_remote_code:  # it is user code, and may raise anything
            raise ConfigError(_of_code(code, error), field="trust_remote_code") from error
        if not isinstance(error, OSError | ValueError):
            raise
        raise ConfigError(
            f"no tokenizer in {folder}: {_first_line(error)}: give a Hugging Face folder", field="hf_checkpoint"
        ) from error


def load_processor(folder: Path, *, trust_remote_code: bool) -> Any:
    """Transformers' processor of text and images. Takes seconds."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(str(folder), trust_remote_code=trust_remote_code)


def _of_code(code: RemoteCode, error: Exception) -> str:
    from transformers import __version__

    return (
        f"{code.folder}: its own code ({', '.join(code.tokenizer)}) fails with transformers {__version__}: "
        f"{type(error).__name__}: {_first_line(error)}: take a newer revision of the model, or write a folder without "
        f"code: python -m headrace.models.tokenizer.without_code {code.folder} FOLDER"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


_FILES = ("config.json", "generation_config.json")


def end_tokens(folder: Path) -> frozenset[int]:
    """Returns the ids of both files; empty where they name none.

    Raises ConfigError for a file that is no JSON object, or whose eos_token_id is neither a number nor a list of them.
    """
    found = set[int]()
    for path in (folder / name for name in _FILES):
        said = read_json(path).get("eos_token_id")
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if not all(type(each) is int for each in ids):
            raise ConfigError(
                f"{path} has eos_token_id {said!r:.80}: it should be a token's number, or a list of them",
                field="hf_checkpoint",
            )
        found.update(ids)
    return frozenset(found)
