"""A run's name is a folder's name: it cannot lead out of --run-dir."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.job.load.load import read


@pytest.mark.parametrize(
    "name", ["../../x", "..", ".", "", "a/b", "/tmp/x", ".hidden", "a\0b", "a b", "a\n", "é", "a" * 101]
)
def test_a_run_name_that_is_not_one_plain_word_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--run-name: a run's name is its folder's too: up to 100 letters"):
        read(None, ["--run-name", name, "--hf-checkpoint", "/m"], {})


@pytest.mark.parametrize("name", ["run", "7b-lr1e-6", "A.b_c", "a" * 100])
def test_a_run_name_is_letters_digits_and_three_signs(name: str) -> None:
    assert read(None, ["--run-name", name, "--hf-checkpoint", "/m"], {}).run.run_name == name
