"""What `headrace check` finds out by trying, and that `headrace train` refuses the same before it starts anything."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.cli.main import main
from headrace.preflight import CheckOptions, Prompts, Report, report_of
from headrace.process.child import OneShot
from headrace.score import ScoreItem
from services.buffer.check import ReadingClock
from services.buffer.check import check as check_buffer
from services.reward.check import check as check_reward
from services.rollout.check import check as check_rollout
from tests.support.sandboxes import choose_sandbox

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
SUMS = ({"prompt": "2 + 2 =", "label": "4"}, {"prompt": "what is 3 + 4", "label": 7})


@pytest.fixture
def tokenizer(model: Path) -> Path:
    """Words are tokens."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "2": 1, "+": 2, "=": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def prompts_file(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(load_with, tmp_path: Path, rows: Sequence[Mapping[str, Any]], *flags: str) -> Report:
    """Of buffer and reward, as they run beside each other."""
    job = load_with("--prompt-data", str(prompts_file(tmp_path, rows)), *flags)
    options = CheckOptions(job, elsewhere=False, fast=True)
    buffer = asyncio.run(check_buffer(options, Prompts))
    report = asyncio.run(check_reward(options, lambda: buffer.prompts))
    buffer.join(report)
    return buffer


def test_a_job_that_fits_is_told_whole(
    job_file: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "5 + 5 =", "label": "10"}\n')
    flags = ["--prompt-data", str(prompts_file(tmp_path, SUMS)), "--label-key", "label", "--rm-type", "exact_match"]
    more = ["--apply-chat-template", "--eval-prompt-data", "sums", str(tmp_path / "eval.jsonl")]
    assert main(["check", str(job_file), *flags, *more, "--use-kl-loss", "--kl-loss-coef", "0.01"]) == 0
    said = "".join(capsys.readouterr().out.split())  # lines fold where the terminal ends
    for part in (
        "algorithm grpo",
        "ratio clipped to 0.8 … 1.2, KL (low_var_kl) to the starting weights in the loss, weight 0.01",
        f"2 in {tmp_path}/train.jsonl",
        "reward exact_match",
        "label as answer '4' (train.jsonl, line 1) scores 1 by exact_match",
        "first prompt train.jsonl, line 1, 4 tokens: <user>2 + 2 =<assistant>",
        "prompt lengths 4 to 5 tokens, half of them at most 4 (2 prompts)",
        f"evaluation sums 1 prompts of {tmp_path}/eval.jsonl",
        "reference 0.00 GB",
        "nothing prevents a start",
    ):
        assert part.replace(" ", "") in said, said


@pytest.mark.parametrize("command", ["check", "train"])
def test_check_and_train_refuse_the_same_before_anything_starts(
    job_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    flags = ["--prompt-data", str(prompts_file(tmp_path, SUMS)), "--label-key", "label", "--rm-type", "mth"]
    assert main([command, str(job_file), *flags, "--run-dir", str(tmp_path / "runs")]) == 2
    said = "".join(capfd.readouterr())
    assert "rm_type is 'mth': did you mean 'math'?" in " ".join(said.split())
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (SUMS, (), "2 of 2 prompts (train.jsonl, line 1): no reward scores them: pass --rm-type or --custom-rm-path"),
        (
            SUMS,
            ("--rm-type", "exact_match"),
            "train.jsonl, line 1 has no label, which the scorer compares with: --label",
        ),
        (
            [*SUMS, {"prompt": "x", "label": "1", "metadata": {"rm_type": "mth"}}],
            ("--rm-type", "exact_match", "--label-key", "label"),
            "1 of 3 prompts (train.jsonl, line 3): metadata.rm_type is 'mth': did you mean 'math'?",
        ),
        (
            [{"question": "x"}],
            ("--skip-bad-lines", "--rm-type", "exact_match"),
            "none of its rows is a prompt; the first: ",
        ),
        ([*SUMS, {"question": "x"}], ("--rm-type", "random"), "train.jsonl, line 3: lacks 'prompt', has ['question']"),
        (SUMS, ("--label-key", "answer", "--rm-type", "random"), "train.jsonl, line 1: lacks 'answer', has ['label'"),
    ],
)
def test_samples_that_could_never_be_rewarded_are_refused(
    load_with, tmp_path: Path, rows: Sequence[Mapping[str, Any]], flags: tuple[str, ...], message: str
) -> None:
    report = found(load_with, tmp_path, rows, *flags)
    assert any(message in refusal for refusal in report.refusals), report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(args, sample): raise KeyError('answer')\n", "the label as its own answer cannot be scored"),
        ("def f(args, sample): return 'good'\n", "a reward is a finite number or a dict of them"),
        ("class f:\n  def __init__(self, p): ...\n  def compute_reward(self, a, b): ...\n", "set --reward-model-path"),
    ],
)
def test_a_reward_that_always_fails_is_refused(load_with, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    report = found(load_with, tmp_path, SUMS, "--label-key", "label", "--custom-rm-path", f"{tmp_path}/mine.py:f")
    assert any(re.search(message, refusal) for refusal in report.refusals), report


def test_a_scorer_whose_server_is_away_is_a_warning_because_samples_wait_for_it(load_with, tmp_path: Path) -> None:
    text = "def f(args, sample): raise ConnectionError('http://127.0.0.1:1 cannot be reached')\n"
    (tmp_path / "mine.py").write_text(text)
    report = found(load_with, tmp_path, SUMS, "--label-key", "label", "--custom-rm-path", f"{tmp_path}/mine.py:f")
    assert report.refusals == []
    assert any("127.0.0.1:1" in warning for warning in report.warnings), report


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_row_behind_the_first_twenty_thousand_is_read(load_with, tmp_path: Path, form: str) -> None:
    path = prompts_file(tmp_path, [{"prompt": "x", "label": "1"}] * 20_100 + [{"question": "x", "label": "1"}])
    if form == "parquet":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path = tmp_path / "train.parquet"
        pq.write_table(pa.Table.from_pylist([{"prompt": None, "question": None, **row} for row in rows]), path)
    job = load_with("--prompt-data", str(path))
    options = CheckOptions(job, elsewhere=False, fast=True, read_seconds=600.0)
    report = asyncio.run(check_buffer(options, Prompts))
    assert any("20101" in refusal.replace(",", "") for refusal in report.refusals), report


def test_rows_that_there_was_no_time_for_are_counted_and_said_to_be_unread(load_with, tmp_path: Path) -> None:
    path = prompts_file(tmp_path, [{"prompt": "x", "label": "1"}] * 1_100 + [{"question": "x"}])
    options = CheckOptions(load_with("--prompt-data", str(path)), elsewhere=False, fast=True, read_seconds=0.0)
    found = asyncio.run(check_buffer(options, Prompts))
    assert found.refusals == []
    assert found.unchecked == [f"589 of 1,101 rows of {path}: the first 512 were read when the time was over"]
    assert found.prompts.num_rows == 1_101


def test_progress_is_told_every_two_seconds_and_then_that_the_rest_is_only_counted() -> None:
    now, told = [0.0], list[str]()
    clock = ReadingClock(20.0, told.append, lambda: now[0])
    for seconds, rows in ((1.9, 10), (2.0, 2_000), (3.9, 3_000), (21.0, 9_000)):
        now[0] = seconds
        clock.passed("a.jsonl", rows)
    assert told == [
        "reading prompts, for 20 s at most: 2,000 rows of a.jsonl",
        "reading prompts, the rest is only counted: 9,000 rows of a.jsonl",
    ]
    assert clock.is_over


@pytest.mark.parametrize(("code", "fails"), [(0, False), (3, True)])
async def test_what_a_check_tells_meanwhile_comes_as_it_is_told_and_is_none_of_its_last_lines(
    code: int, fails: bool
) -> None:
    program = (
        "import sys; from headrace.preflight import tell_progress; tell_progress('half'); "
        f"print('oh no', file=sys.stderr); print(sys.stdin.read(), end=''); sys.exit({code})"
    )
    started = await OneShot.start([sys.executable, "-c", program], os.environ)
    told = list[str]()
    report = await report_of("some", started, msgspec.json.encode(Report(facts=[("x", "y" * 1_000_000)])), told.append)
    assert report.failed == (["checking some's part failed:\noh no"] if fails else [])
    assert bool(report.facts) != fails
    assert told == ["half"]


def test_a_label_that_is_paid_only_in_a_form_is_told(load_with, tmp_path: Path) -> None:
    report = found(load_with, tmp_path, SUMS, "--label-key", "label", "--rm-type", "deepscaler")
    assert report.refusals == []
    assert ("label as answer", "'4' (train.jsonl, line 1) scores 0 by deepscaler") in report.facts
    assert any(what == "answers in form" and "boxed{4}" in how for what, how in report.facts), report


@pytest.mark.parametrize(
    ("rows", "scorer"),
    [
        ([{"prompt": "6 * 7", "label": {"solution": 42, "checked": True}}], "math"),
        ([{"prompt": "who", "label": {"text": "Ada", "lang": "en"}}], "exact_match"),
        (
            [{"prompt": "6 * 7", "label": "the sum } of"}, {"prompt": "1", "label": "see 3, 4 or 5; then } and {"}],
            "math",
        ),
    ],
)
def test_labels_that_no_answer_can_match_prevent_a_start_unless_the_job_says_otherwise(
    load_with, tmp_path: Path, rows: list[dict[str, Any]], scorer: str
) -> None:
    flags = ("--label-key", "label", "--rm-type", scorer)
    report = found(load_with, tmp_path, rows, *flags)
    assert len(report.refusals) == 1, report
    assert all(said in report.refusals[0] for said in ("train.jsonl, line", "label", "--skip-label-check"))
    allowed = found(load_with, tmp_path, rows, *flags, "--skip-label-check")
    assert allowed.refusals == []
    assert any("train.jsonl, line" in warning for warning in allowed.warnings)


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"label": r"^\d+$"}, ("--rm-type", "regex")),
        ({"label": "assert f(1) == 2"}, ("--rm-type", "code")),
        ({"label": {"hint": "short"}}, ("--custom-rm-path", "{folder}/zero.py:zero")),
    ],
)
def test_a_label_that_is_no_answer_by_design_prevents_nothing(
    load_with, tmp_path: Path, row: dict[str, Any], flags: tuple[str, ...]
) -> None:
    (tmp_path / "zero.py").write_text("def zero(args, sample): return 0.0\n")
    words = [flag.replace("{folder}", str(tmp_path)) for flag in flags]
    report = found(load_with, tmp_path, [{"prompt": "x", **row}], "--label-key", "label", *words)
    assert report.refusals == []


@pytest.mark.parametrize(
    ("label", "key", "scorer", "ending"),
    [
        ({"ground_truth": "3/4", "style": "rule"}, "label", "math", "jsonl"),
        ({"ground_truth": {"target": ["Lyon", "Lugdunum"]}, "style": "rule"}, "label", "exact_match", "jsonl"),
        ({"truth": {"value": "3/4"}}, "label.truth.value", "math", "parquet"),
    ],
)
def test_labels_of_common_data_sets_are_matched_by_their_answers(
    load_with, tmp_path: Path, label: Any, key: str, scorer: str, ending: str
) -> None:
    path, rows = tmp_path / f"train.{ending}", [{"prompt": "?", "label": label}]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows[0]) + "\n")
    job = load_with("--prompt-data", str(path), "--label-key", key, "--rm-type", scorer)
    options = CheckOptions(job, elsewhere=False, fast=True)
    buffer = asyncio.run(check_buffer(options, Prompts))
    assert buffer.refusals == []
    (row,) = buffer.prompts.rows
    text = row.prompt().label
    answer = {"math": r"\boxed{\frac34}", "exact_match": "Lugdunum"}[scorer]
    score = importlib.import_module(f"services.reward.scorers.{scorer}").score(ScoreItem("1", "?", answer, text, {}))
    assert (score["score"] if isinstance(score, dict) else score) == 1.0
    assert asyncio.run(check_reward(options, lambda: buffer.prompts)).refusals == []


def test_a_job_whose_programs_are_run_is_told_in_which_sandbox_and_that_its_tests_can_be_read(
    load_with, tmp_path: Path
) -> None:
    rows = [{"prompt": "add", "metadata": {"tests": ["assert add(1, 2) == 3"]}}]
    report = found(load_with, tmp_path, rows, "--rm-type", "code")
    facts = dict(report.facts)
    assert report.refusals == []
    assert facts["programs"].startswith("of responses run in bubblewrap")
    assert "are read and run" in facts["tests"]
    rows = [{"prompt": "add", "metadata": {"tests": ["add(1, 2)"]}}]
    (refusal,) = found(load_with, tmp_path, rows, "--rm-type", "code").refusals
    assert "a test cannot be read" in refusal


@pytest.mark.parametrize("whose", ["--rm-type code", "metadata.rm_type", "--rm-type beside another"])
def test_without_bubblewrap_a_job_of_programs_is_refused_unless_it_is_insecure(
    whose: str, load_with, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_sandbox("refused", monkeypatch)
    row: dict[str, Any] = {"prompt": "add", "metadata": {"tests": ["assert add(1, 2) == 3"]}}
    flags = ["--rm-type", "code"]
    if whose == "metadata.rm_type":
        row["metadata"]["rm_type"], flags = "code", ["--rm-type", "random"]
    elif whose == "--rm-type beside another":
        row["metadata"]["rm_type"], flags = "code", ["--rm-type", "exact_match", "--label-key", "prompt"]
    refusals = found(load_with, tmp_path, [row], *flags).refusals
    assert [("bubblewrap" in each, "--insecure-sandbox" in each) for each in refusals] == [(True, True)]
    report = found(load_with, tmp_path, [row], *flags, "--insecure-sandbox")
    assert report.refusals == []
    assert "--insecure-sandbox" in dict(report.facts)["programs"]


def test_prompts_that_would_all_be_dropped_are_refused_and_some_are_warned_of(
    load_with, tokenizer: Path, tmp_path: Path
) -> None:
    for limit, refused in (("2", True), ("4", False)):
        job = load_with("--prompt-data", str(prompts_file(tmp_path, SUMS)), "--rollout-max-prompt-len", limit)
        options = CheckOptions(job, elsewhere=False, fast=False)
        prompts = asyncio.run(check_buffer(options, Prompts)).prompts
        report = asyncio.run(check_rollout(options, lambda found=prompts: found))
        assert bool(report.refusals) is refused
        assert any("are longer than" in line for line in (*report.refusals, *report.warnings))


OF_USERS = """
from NAMES import Sample

def finished(sample):
    sample.tokens, sample.response, sample.response_length = [1, 2, 3], "4", 1
    sample.rollout_log_probs, sample.status = [-0.5], Sample.Status.COMPLETED
    return sample

async def works(args, sample, sampling_params):
    assert sample.prompt == "<user>2 + 2 =<assistant>" and sample.label == "4", sample
    return finished(sample)

async def unfinished(args, sample, sampling_params):
    sample.response = "4"
    return sample

async def loops(args, samples, evaluation=False):
    return [finished(sample) for sample in samples for turn in range(args.max_turns)]

async def waits_for_a_server(args, sample, sampling_params):
    raise ConnectionRefusedError("search server 127.0.0.1:8000")
"""


@pytest.mark.parametrize(
    ("flag", "function", "code", "part"),
    [
        ("--custom-generate-function-path", "works", 0, "works makes 1 samples of 1 prompt: 1 response tokens"),
        ("--custom-generate-function-path", "unfinished", 2, "returned a sample that cannot be trained"),
        ("--custom-generate-function-path", "loops", 2, "args.max_turns is None: give the job --max-turns N"),
        ("--custom-generate-function-path", "waits_for_a_server", 0, "start what"),
    ],
)
def test_check_tries_functions_that_make_samples(
    job_file: Path,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    function: str,
    code: int,
    part: str,
) -> None:
    (tmp_path / "own.py").write_text(OF_USERS.replace("NAMES", "headrace.hooks"))
    flags = ["--prompt-data", str(prompts_file(tmp_path, SUMS)), "--label-key", "label", "--rm-type", "exact_match"]
    words = [*flags, "--apply-chat-template", flag, f"{tmp_path / 'own.py'}:{function}"]
    result = main(["check", str(job_file), *words])
    said = " ".join(capsys.readouterr().out.split())
    assert part in said, said
    assert result == code


def test_slime_imports_reach_every_process_that_loads_hooks(
    job_file: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OF_USERS.replace("NAMES", "slime.utils.types"))
    flags = ["--prompt-data", str(prompts_file(tmp_path, SUMS)), "--label-key", "label", "--rm-type", "exact_match"]
    words = ["--custom-generate-function-path", f"{tmp_path / 'own.py'}:works", "--slime-imports"]
    assert main(["check", str(job_file), *flags, "--apply-chat-template", *words]) == 0
    assert "1 samples of 1 prompt" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("prompt", "label", "expression"),
    [
        ([{"role": "user", "content": "7?"}], {"ground_truth": ["7"]}, "sample.label['ground_truth'][0]"),
        ("plain", {"a": {"b": "7"}}, "sample.label['a']['b']"),
    ],
)
def test_the_trial_of_a_label_gives_a_function_what_the_run_gives_it(
    load_with, tokenizer: Path, tmp_path: Path, prompt: Any, label: Any, expression: str
) -> None:
    """A reward as search-r1's: it joins prompt and response, and reads into the label."""
    (tmp_path / "own.py").write_text(
        "async def f(args, sample, **kwargs):\n"
        "    whole = sample.prompt + '|' + sample.response\n"
        f"    assert not whole.startswith('['), whole\n    return float({expression} == '7')\n"
    )
    rows = [{"prompt": prompt, "label": label}]
    words = ["--label-key", "label", "--apply-chat-template", "--custom-rm-path", f"{tmp_path / 'own.py'}:f"]
    report = found(load_with, tmp_path, rows, *words)
    assert report.refusals == []
    assert [how for what, how in report.facts if what == "label as answer" and "scores 1 by" in how]
