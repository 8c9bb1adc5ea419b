"""`headrace init | quickstart`: a job of one's own in an empty folder, and a first run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.cli.arg_types import PATH
from headrace.cli.commands.jobs import train_words
from headrace.cli.view.lines import evaluations, printable
from headrace.disk import write_new
from headrace.models.starter import starter_model
from headrace.run_folder import RunFolder, fields_in, newest_run
from headrace.sample_log import Answer, SampleLog
from headrace.templates import rows

_MODEL = "MODEL"
"""Stands in a template's job.toml where the model's folder or name comes."""


@dataclass(frozen=True, slots=True)
class Template:
    """`rows` are those of train.jsonl and eval.jsonl."""

    help: str
    rows: Callable[[], tuple[Sequence[rows.Row], Sequence[rows.Row]]]


TEMPLATES: Mapping[str, Template] = {
    "sums": Template("sums of digits with a reward of your own: the quickstart", rows.sums),
    "math": Template("word problems, scored by math-verify", rows.problems),
    "tools": Template("a generate function that calls a calculator", rows.products),
    "agent": Template("an agent with the openai package", rows.sums),
    "judge": Template("answers that an LLM grades", rows.questions),
    "sft": Template("supervised fine-tuning on conversations", rows.conversations),
}


@click.command()
@click.argument("folder", type=PATH, default=".", metavar="[FOLDER]")
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    default="sums",
    show_default=True,
    help="; ".join(f"{name}: {each.help}" for name, each in TEMPLATES.items()),
)
@click.option(
    "--model", help="A Hugging Face folder, or a name on the hub. Default: SmolLM2-135M-Instruct, prepared once."
)
def init(folder: Path, template: str, model: str | None) -> int:
    """Writes a job, its functions and its data into an empty folder: job.toml, reward.py, train.jsonl, eval.jsonl."""
    written = write_template(folder, template, model or str(prepared_model()))
    where = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"{folder}: {', '.join(written)}")
    print(f"next: {where}headrace check    what the job will do")
    print(f"      {where}headrace train    run it")
    return 0


@click.command()
@click.argument("folder", type=PATH, default="quickstart", metavar="[FOLDER]")
@click.option("--model", help="As in `headrace init`.")
@click.option("--num-rollout", type=click.IntRange(min=1), help="Steps; the job has 15.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the samples and their order; the job has 1.")
def quickstart(folder: Path, model: str | None, num_rollout: int | None, seed: int | None) -> int:
    """Trains a small model to add digits, and shows what it has learned. On two CPU cores it takes a few minutes.

    The same command continues a run that was interrupted.
    """
    if not (folder / "job.toml").is_file():
        write_template(folder, "sums", model or str(prepared_model()))
    os.chdir(folder)
    words = ["job.toml", "--save-hf", "model"]
    words += ["--num-rollout", str(num_rollout)] if num_rollout else []
    words += ["--seed", str(seed)] if seed is not None else []
    if code := train_words(words):
        return code
    run = newest_run(Path("runs"))
    _show(run, folder)
    return 0


def write_template(folder: Path, template: str, model: str) -> list[str]:
    """Returns the files' names. Raises FailedPrecondition for a folder that has one of them."""
    train, held_out = TEMPLATES[template].rows()
    texts = {
        file.name: file.read_text().replace(f'"{_MODEL}"', json.dumps(_absolute(model)))
        for file in files("headrace.templates").joinpath(template).iterdir()
        if file.is_file()
    }
    texts["train.jsonl"] = _lines(train)
    texts |= {"eval.jsonl": _lines(held_out)} if held_out else {}
    return write_new(folder, texts)


def prepared_model() -> Path:
    """SmolLM2-135M-Instruct in the user's cache; the first call writes it, with progress."""
    return asyncio.run(starter_model(sys.executable, lambda line: print(line, flush=True)))


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def _lines(table: Sequence[rows.Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in table)


def _show(run: RunFolder, folder: Path) -> None:
    console = Console()
    for line in lessons(run):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"""
picture   {folder / run.path}/curves.png
model     {folder}/model, a Hugging Face folder
next      cd {folder}
          headrace samples --eval --worst    what is still wrong
          headrace generate "2 + 2 = 4<|im_end|>\\n7 + 5 ="
          edit reward.py and job.toml, and run `headrace train --run-name mine`""",
        highlight=False,
        markup=False,
    )


_SHOWN = 3
_MAX_CHARACTERS = 40


def lessons(run: RunFolder) -> Iterator[RenderableType]:
    """Nothing for a run without two evaluations."""
    rows = list(fields_in(run.metrics))
    for name in sorted({name for row in rows for name in evaluations(row)}):
        values = {row["step"]: row[name] for row in rows if name in row}
        first, last = min(values), max(values)
        if first != last:
            yield (
                f"{name.removeprefix('eval/')}, prompts that training has not seen: "
                f"{values[first]:.2f} right before, {values[last]:.2f} after {last} steps"
            )
    if pairs := before_and_after(run, _SHOWN):
        yield _table(pairs)


def before_and_after(run: RunFolder, count: int) -> list[tuple[Answer, Answer]]:
    """The first response of the first and of the last evaluation to each prompt, those that changed most first."""
    log = SampleLog(run.samples)
    steps = log.evaluations()
    if len(steps) < 2:
        return []
    before, after = _by_prompt(log, steps[0]), _by_prompt(log, steps[-1])
    pairs = [(before[prompt], after[prompt]) for prompt in before.keys() & after.keys()]
    return sorted(pairs, key=lambda pair: ((pair[0].reward or 0.0) - (pair[1].reward or 0.0), pair[0].group_id))[:count]


def _by_prompt(log: SampleLog, step: int) -> Mapping[str, Answer]:
    return {answer.group_id: answer for answer in log.of_evaluation(step) if answer.index == 0}


def _table(pairs: list[tuple[Answer, Answer]]) -> Table:
    table = Table("prompt", "before", "reward", "after", "reward", box=None, pad_edge=False)
    for before, after in pairs:
        table.add_row(_short(before.prompt.splitlines()[-1]), *_cells(before), *_cells(after))
    return table


def _cells(answer: Answer) -> tuple[Text, Text]:
    reward = "failed" if answer.reward is None else f"{answer.reward:g}"
    return _short(repr(answer.response.strip())), Text(reward, "green" if answer.reward else "red")


def _short(text: str) -> Text:
    return Text(printable(text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"))
