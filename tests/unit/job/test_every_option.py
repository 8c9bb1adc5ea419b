"""Every option of the job: what is shown is what services read, and what no run could use is refused in a sentence."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.job.load.load import read
from headrace.job.option import Arity, Option, options
from headrace.job.schema.job import Job, to_toml

LONG = os.environ.get("HEADRACE_OPTION_WORDS") == "all"
_EVERY = 2
"""Neighbouring options, which have like types, share the words; the long form gives all of them to each."""
OPTIONS = list(options().values())
EXTREME = [
    *(
        "inf",
        "-inf",
        "nan",
        "-1",
        "0",
        "-0.0",
        "1e308",
        "-1e308",
        "1e-320",
        "1e31",
        str(2**63),
        str(-(2**63)),
        "9" * 5000,
    ),
    *("", " ", "\0", "a\0b", "\x1b[31m", "x" * 10**6, "../..", "/" * 5000, "a/" * 3000, "\ud800", "[" * 200_000, "{}"),
    *("[1, [2]]", "null", "true", "1e400", "0x10", "١", "💧", "'", '"', "\\", "$(id)", "\x7f", "\x85", "a\nb"),
]
numbers = st.one_of(st.floats(), st.integers(-(2**65), 2**65), st.sampled_from([1, 2, 3, 0.5, 1e-4, 1e4]))
words = st.one_of(numbers.map(str), st.text(max_size=20), st.sampled_from(EXTREME), st.booleans().map(str))


def given_to(option: Option, word: str) -> list[str]:
    """The flag with the word in every place where one stands."""
    return [option.flag, *([word, word] if option.arity is Arity.PAIRS else [word])]


def read_flags(option: Option, word: str) -> Job | None:
    """The job, or None where the word is refused in one sentence of a reasonable length."""
    checkpoint = [] if option.name == "hf_checkpoint" else ["--hf-checkpoint", "model"]
    try:
        return read(None, [*checkpoint, *given_to(option, word)], {})
    except ConfigError as error:
        refusal = error.message
    assert option.flag in refusal or option.name in refusal or word.startswith("--")
    assert len(refusal) < 2_000
    return None


def plain(job: Job) -> Any:
    return job.model_dump(mode="json")


def numbers_of(value: Any) -> list[float]:
    if isinstance(value, dict | list | tuple):
        return [n for each in (value.values() if isinstance(value, dict) else value) for n in numbers_of(each)]
    return [value] if isinstance(value, int | float) else []


@settings(max_examples=20_000 if LONG else 200, suppress_health_check=list(HealthCheck))
@given(option=st.sampled_from(OPTIONS), word=words)
def test_what_is_read_from_a_flag_is_what_services_read(
    option: Option, word: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = read_flags(option, word)
    if job is None:
        return
    assert plain(Job.model_validate_json(job.model_dump_json())) == plain(job)
    assert all(n == 0 or 1e-30 <= abs(n) <= 1e30 for n in numbers_of(plain(job)))
    path = tmp_path_factory.getbasetemp() / "job"
    for suffix, text in ((".toml", to_toml(job)), (".json", job.model_dump_json())):
        path.with_suffix(suffix).write_text(text)
        assert plain(read(path.with_suffix(suffix), [], {})) == plain(job)
    if option.arity is Arity.ONE and not word.startswith("--"):
        variables = {"HEADRACE_HF_CHECKPOINT": "model", option.variable: word}
        assert plain(read(None, [], variables)) == plain(job)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["💧", "\x00\x1f\x7f", "\r\n", '"""']
)
values = st.recursive(
    texts | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=5_000 if LONG else 100)
@given(arguments=st.dictionaries(texts, values, max_size=4), stops=st.lists(texts, max_size=3))
def test_whatever_a_job_holds_its_toml_reads_back_exactly(arguments: dict[str, Any], stops: list[str]) -> None:
    job = read(None, ["--hf-checkpoint", "model"], {})
    rollout = job.rollout.model_copy(update={"rollout_stop": tuple(stops)})
    job = job.model_copy(update={"sglang": arguments, "rollout": rollout})  # past every validator
    back = tomllib.loads(to_toml(job))
    assert back.get("sglang", {}) == arguments
    assert back["rollout"].get("rollout_stop", []) == stops


def test_every_extreme_word_for_every_option_is_taken_whole_or_refused_in_a_sentence() -> None:
    for number, option in enumerate(OPTIONS):
        for word in EXTREME if LONG else EXTREME[number % _EVERY :: _EVERY]:
            job = read_flags(option, word)
            assert job is None or plain(Job.model_validate_json(job.model_dump_json())) == plain(job), (
                option,
                word[:80],
            )


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"a = " + b"[" * 200_000,
        b"model = 3\n",
        b"",
    ],
)
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_that_is_no_job_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, suffix: str
) -> None:
    path = tmp_path / f"job{suffix}"
    path.write_bytes(content)
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("headrace: ")
    assert "Traceback" not in said
    assert len(said) < 2_000
