"""What a run has learned: the first and the last evaluation, and the same questions before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headrace.cli.view.lines import evaluations, printable
from headrace.run_folder import RunFolder, fields_in
from headrace.sample_log import Answer, SampleLog

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
