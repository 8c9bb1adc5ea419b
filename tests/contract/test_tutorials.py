"""The tutorials' blocks do what the pages say: files are written, hooks answer, jobs pass their check, commands parse.

A page is played in a folder of its own with a tiny model. `make examples` runs each page whole with the small one.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest
import yaml
from helm_python import Chart

from headrace.cli import main as command_line
from headrace.hooks.slime_names import SLIME_IMPORTS
from headrace.hooks.trial.check import check_hook
from headrace.job.load.load import load, read
from headrace.job.rules.scope import scope_of_check
from tests.support.deployments import DEPLOY
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.tutorials import PAGES, ROOT, Block, blocks, run

WITHOUT_A_RUN = ("from_slime", "from_trl")
"""Pages that start no engine: they run whole here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITHOUT_A_RUN])
def test_the_commands_of_a_page_work_in_its_order(
    page: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    has_trained = False
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text)
        for words in commands(block):
            match words:
                case ["cd", folder]:
                    monkeypatch.chdir(folder)
                case ["mkdir", folder]:
                    Path(folder).mkdir()
                case ["python", file] if not has_trained and not is_server(file, page):  # later ones read a run
                    subprocess.run([sys.executable, file], check=True, timeout=60)
                case ["headrace", *rest]:
                    has_trained |= rest[0] == "train"
                    assert is_taken(rest, model) != block.fails, words
                case ["sbatch", _, _, "deploy/slurm/train.sbatch", *rest]:
                    assert is_taken(["train", *rest], model), words


@pytest.mark.parametrize("page", PAGES)
def test_every_function_of_a_page_answers_with_an_engine_that_stands_in(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGES[page].read_text()
    if "from slime" in text:
        monkeypatch.setenv(SLIME_IMPORTS, "true")
    files = [block for block in blocks(page) if block.file]
    for block in files:
        Path(block.file or "").write_text(block.text)
    with ExitStack() as servers:
        for block in files:
            if is_server(block.file or "", page):
                servers.enter_context(served(block.file or ""))
        hooks_answer(page, files)


def hooks_answer(page: str, files: Sequence[Block]) -> None:
    text = PAGES[page].read_text()
    for block in files:
        if block.language != "python" or not block.file:
            continue
        compile(block.text, block.file, "exec")
        stem = block.file.removesuffix(".py")
        is_run = f"python {block.file}" in text or f"migrate trl {block.file}" in text
        hooks = set(re.findall(rf"\b{stem}(?:\.py:|\.)(\w+)", text)) & set(re.findall(r"def (\w+)\(", block.text))
        assert is_run or hooks, f"{page}: nothing uses {block.file}"
        for hook in sorted(hooks if not is_run else ()):
            if f"check hook {block.file}:{hook}" in text:  # the test above, or the whole page
                continue
            report = check_hook(f"{block.file}:{hook}")
            assert report.ok, report.failed


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_a_page_is_a_job_or_a_part_of_one(page: str, model: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page)):
        if block.language == "toml":
            (tmp_path / f"{number}.toml").write_text(block.text)
            assert tomllib.loads(block.text)
            read(tmp_path / f"{number}.toml", ["--hf-checkpoint", str(model)], {})


@pytest.mark.parametrize("page", PAGES)
def test_every_yaml_of_a_page_has_values_that_the_chart_takes(page: str) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            values = {"job": '[run]\nrun_name = "r"\n', **yaml.safe_load(block.text)}
            with Chart.load(DEPLOY / "helm" / "headrace") as chart:
                assert chart.render(values, name="run", namespace="default")


def test_the_page_about_flat_rewards_names_metrics_that_exist() -> None:
    known = set(re.findall(r"`([\w/@]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    text = PAGES["why_reward_does_not_rise"].read_text()
    named = set(re.findall(r"`([a-z_]+/[\w/]+)`|·+ ([a-z_]+/\w+)", text))
    found = {re.sub(r"lag_\d+", "lag_LAG", first or second) for first, second in named}
    assert len(found) > 15
    assert found - known == set()


@pytest.mark.parametrize("page", WITHOUT_A_RUN)
def test_a_page_without_a_run_runs_whole(page: str, tmp_path: Path) -> None:
    assert run(page, tmp_path) == 0


def is_server(file: str, page: str) -> bool:
    """Whether the page leaves the program running while it goes on."""
    return f"python {file} &" in PAGES[page].read_text()


@contextmanager
def served(file: str) -> Iterator[None]:
    """Runs a page's server until the block ends."""
    server = subprocess.Popen([sys.executable, "-u", file], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline()  # it says so when it listens
        yield
    finally:
        server.terminate()
        server.wait(timeout=30)


def commands(block: Block) -> Iterator[Sequence[str]]:
    """Each command's words, without what a shell does with its output."""
    for line in block.commands:
        if line.startswith(("headrace ", "python ", "cd ", "mkdir ", "sbatch ")):
            command = re.split(r"\s(?:\||\|\|)\s", line)[0]
            yield shlex.split(re.sub(r"\s(?:2?>>?\s*\S+|&)(?=\s|$)", "", command), comments=True)


def is_taken(words: Sequence[str], model: Path) -> bool:
    """Runs the command where that starts no service; of one that does it checks the job, of any other the words."""
    match words:
        case ["init", *_]:
            return command_line.main([*words, "--model", str(model)]) == 0
        case ["check", "hook", *_] | ["migrate", *_]:
            return command_line.main(words) == 0
        case ["check", *_]:
            return command_line.main([*words, "--hf-checkpoint", str(model), "--elsewhere", "--fast"]) == 0
        case ["train", *rest] | ["up", _, "--config", *rest]:
            job, *flags = rest if rest and not rest[0].startswith("-") else ["job.toml", *rest]
            load(
                Path(job), [*flags, "--hf-checkpoint", str(model)], {}, lambda job: scope_of_check(job, elsewhere=True)
            )
            return True
    name, *rest = words
    command: click.Command = command_line._COMMANDS[name].load()
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, list(rest))  # raises for what the command does not take
    return True
