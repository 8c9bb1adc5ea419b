"""What the page of a run is given, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.errors import FailedPrecondition
from headrace.run_folder import RunFolder
from headrace.view import data as view_data
from headrace.view.data import LedgerCounts, RunData, TokenTexts, script
from headrace.view.server import write_page
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.viewed_run import HOSTILE, viewed_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> RunFolder:
    return viewed_run(tmp_path, model)


def loaded(text: str) -> tuple[str, Any]:
    """The name and the value that a script hands over."""
    name, value = json.loads(f"[{text.strip().removeprefix('headrace.load(').removesuffix(');')}]")
    return name, value


def test_the_overview_is_about_the_whole_run(run: RunFolder) -> None:
    found = RunData(run).overview(None)
    assert (found["run"], found["live"], found["state"]["phase"], found["state"]["step"]) == (
        "one",
        False,
        "finished",
        2,
    )
    assert found["metrics"]["step"] == [1, 2]
    assert found["metrics"]["columns"]["reward/mean"] == [0.25, 0.5]
    assert found["evaluations"] == {"step": [0], "time": [1.0], "columns": {"eval/sums": [0.25]}}
    assert found["marks"] == [[2, "restart"]]
    assert found["steps"] == {"step": [1, 2], "samples": [4.0, 4.0], "groups": [2, 2], "tokens": [1, 0]}
    assert (found["evals"], found["untrained"]) == ([2], {"failed": 1, "filtered": 1})
    assert ("n_samples_per_prompt", "2") in found["job"]
    assert found["tokenizer"] == {"error": None}


def test_the_ledger_is_as_the_buffer_says_or_as_the_metrics_do(run: RunFolder) -> None:
    by_metrics = RunData(run).overview(None)["ledger"]
    assert (by_metrics["source"], by_metrics["states"], by_metrics["produced"]) == ("metrics", None, 16)
    assert (by_metrics["failures"], by_metrics["filtered"]) == ([("SCORER_RAISED", 1)], [("all rewards are 1", 1)])
    assert by_metrics["staleness"] == [[0, 1.0]]
    counts = LedgerCounts(pb.StreamStats(groups={"QUEUED": 3}), time=5.0)
    by_ledger = RunData(run).overview(counts)["ledger"]
    assert (by_ledger["source"], by_ledger["states"], by_ledger["time"]) == ("ledger", {"QUEUED": 3}, 5.0)


def test_a_step_has_its_groups_with_samples_in_order(run: RunFolder) -> None:
    value = RunData(run).value("step-0000001")
    assert value is not None
    assert [(group["id"], group["prompt"]) for group in value["groups"]] == [("1-0", "prompt 0"), ("1-1", "prompt 1")]
    samples = value["groups"][0]["samples"]
    assert [(sample["id"], sample["reward"], sample["has_tokens"]) for sample in samples] == [
        ("1-0/0", 0.0, False),
        ("1-0/1", 1.0, True),
    ]
    assert (samples[0]["ranges"], samples[0]["failure"], samples[0]["dropped"]) == ([(1, 0, 2)], None, None)


def test_tokens_are_numbers_of_texts(run: RunFolder) -> None:
    value = RunData(run).value("tokens-0000001")
    assert value is not None
    (columns,) = value["samples"].values()
    assert [value["ids"][number] for number in columns["t"]] == [72, 105, 10, 11, 12]
    assert len(value["texts"]) == len(value["ids"]) == 5
    assert (columns["n"], columns["mask"], columns["trainer"]) == (3, [1, 0], [-0.25, None])


def test_token_texts_put_together_are_the_text(model: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer.encode("Hello, world: 1 + 2 = 3\n")
    texts = TokenTexts(model).of(ids)
    assert texts is not None
    assert "".join(texts) == "Hello, world: 1 + 2 = 3\n"
    assert TokenTexts(model).of(tokenizer.encode("é")) == ["\\xc3", "\\xa9"]
    assert TokenTexts(model).of([tokenizer.eos_token_id]) == [tokenizer.eos_token]


def test_without_a_tokenizer_tokens_are_numbers_and_the_page_says_why(
    run: RunFolder, tmp_path: Path, model: Path
) -> None:
    (tmp_path / "empty").mkdir()
    texts = TokenTexts(tmp_path / "empty")
    assert texts.of([1]) is None
    assert texts.error is not None
    assert "tokenizer.json" in texts.error
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    assert TokenTexts(tmp_path / "empty").of([1]) is None


def test_evaluations_untrained_groups_and_prompts_have_data(run: RunFolder) -> None:
    data = RunData(run)
    evaluation, untrained, prompts = (data.value(name) for name in ("eval-0000002", "untrained", "prompts"))
    assert evaluation is not None
    assert untrained is not None
    assert prompts is not None
    assert [(group["set"], len(group["samples"])) for group in evaluation["groups"]] == [("sums", 1)]
    assert {group["id"] for group in untrained["groups"]} == {"failed", "dropped"}
    assert prompts["texts"] == ["prompt 0", "prompt 1"]
    assert prompts["at"][1] == [(1, 1, 0.5), (2, 1, 0.5)]


@pytest.mark.parametrize("name", ["step-0000009", "tokens-0000002", "eval-0000001", "step-1", "../job", "overview"])
def test_what_is_not_there_has_no_data(run: RunFolder, name: str) -> None:
    assert RunData(run).value(name) is None


def test_a_text_cannot_end_the_script_that_holds_it() -> None:
    text = script("step-0000001", {"a": HOSTILE}).decode()
    assert "<" not in text
    assert "\u2028" not in text
    assert loaded(text) == ("step-0000001", {"a": HOSTILE})


def test_a_long_run_shows_each_kth_step_and_says_so(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_data, "MOST_ROWS", 1)
    found = RunData(run).overview(None)
    assert found["metrics"]["step"] == [2]
    assert any("1 of 2 steps" in note for note in found["notes"])


def test_a_folder_has_the_page_and_a_script_for_each_step(run: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "page"
    num_bytes = write_page(RunData(run), None, target)
    names = {file.name for file in (target / "data").iterdir()}
    assert names == {
        *("overview.js", "step-0000001.js", "step-0000002.js", "tokens-0000001.js", "eval-0000002.js"),
        *("untrained.js", "prompts.js"),
    }
    assert num_bytes == sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    assert loaded((target / "data" / "step-0000002.js").read_text())[1]["step"] == 2
    write_page(RunData(run), None, target)  # a page is written over an earlier one


def test_a_folder_with_other_files_is_refused(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with pytest.raises(FailedPrecondition):
        write_page(RunData(run), None, tmp_path / "thesis")


def test_tokens_beyond_the_limit_are_left_out_and_the_page_says_so(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.view.server.TOKEN_BYTES", 0)
    write_page(RunData(run), None, tmp_path / "page")
    data = tmp_path / "page" / "data"
    assert not (data / "tokens-0000001.js").exists()
    samples = loaded((data / "step-0000001.js").read_text())[1]["groups"][0]["samples"]
    assert not any(sample["has_tokens"] for sample in samples)
    assert any("left out" in note for note in loaded((data / "overview.js").read_text())[1]["notes"])
