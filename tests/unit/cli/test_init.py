"""`headrace init`: what it writes is a job that `check` takes, with data that training and evaluation do not share."""

from __future__ import annotations

import json

import pytest

from headrace.cli.commands.init import TEMPLATES
from headrace.cli.main import main
from headrace.job.load.load import load
from headrace.job.rules.scope import scope_of_check
from tests.support.models.tiny_model import make_tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_job_that_its_rules_take(tmp_path, monkeypatch, model, template):
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--template", template, "--model", str(model)]) == 0
    monkeypatch.chdir(folder)
    job = load(folder / "job.toml", (), {}, lambda job: scope_of_check(job, elsewhere=True))
    assert job.model.hf_checkpoint == model.absolute()
    for file in job.data.prompt_data:
        assert (folder / file).is_file()


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"sft"}))
def test_evaluation_has_no_row_of_training(tmp_path, model, template):
    assert main(["init", str(tmp_path), "--template", template, "--model", str(model)]) == 0
    train, held_out = (
        [json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert held_out
    assert all(prompt not in train for prompt in held_out)


def test_check_alone_takes_the_job_of_its_folder(tmp_path, monkeypatch, model, capsys):
    assert main(["init", str(tmp_path), "--model", str(model)]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--fast"]) == 0
    assert str(model) in capsys.readouterr().out


def test_a_folder_with_a_job_is_left_as_it_is(tmp_path, model, capsys):
    (tmp_path / "job.toml").write_text("mine")
    assert main(["init", str(tmp_path), "--model", str(model)]) == 1
    assert "job.toml" in capsys.readouterr().err
    assert (tmp_path / "job.toml").read_text() == "mine"
