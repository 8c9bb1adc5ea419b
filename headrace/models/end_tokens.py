"""Reads which tokens end a response: an engine stops at those of a model's config and of its generation_config."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError
from headrace.models.tokenizer.remote_code import read_json

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
