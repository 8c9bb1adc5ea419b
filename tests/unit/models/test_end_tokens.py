"""The tokens that end a response, and the files that do not say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.models.tokenizer.tokenizer import end_tokens


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (None, None, set()),
        ("{}", '{"eos_token_id": null}', set()),
        ('{"eos_token_id": 2}', None, {2}),
        ('{"eos_token_id": 2}', '{"eos_token_id": [2, 7]}', {2, 7}),
    ],
)
def test_both_files_name_them(tmp_path: Path, config: str | None, generation: str | None, ids: set[int]) -> None:
    for name, text in (("config.json", config), ("generation_config.json", generation)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert end_tokens(tmp_path) == ids


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "[" * 200_000,
        *(f'{{"eos_token_id": {each}}}' for each in ('"2"', '{"a": 1}', "[[2]]", "true", "2.0")),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_does_not_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name) as refused:
        end_tokens(tmp_path)
    assert len(refused.value.message) < 600
