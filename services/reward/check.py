"""Checks the reward service's part of a job before it starts: who scores each prompt, and what its label would get."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.errors import HeadraceError
from headrace.hooks import RewardForm, RewardHook, hook_args
from headrace.hooks.kit.sandbox import sandbox_said
from headrace.hooks.trial.rendered import plain_conversation, rendered_prompts
from headrace.job.eval_sets import eval_sets, own_rewards
from headrace.job.schema.job import Job
from headrace.preflight.hooks import hook_pool
from headrace.preflight.process import CheckOptions, ReadPrompts, serve_check
from headrace.preflight.report import PromptRow, Prompts, Report, Scorers
from headrace.process.workers import WorkerError, WorkerPool
from headrace.score import Score, ScoreError, ScoreItem, ScoreResult
from headrace.wire.json_text import from_json
from services.reward.evaluations import scorers_of
from services.reward.metrics import RewardMetrics
from services.reward.registry import CUSTOM, Registry
from services.reward.scoring import BatchScorer
from services.reward.service import describe, describe_each, worker_pool

_TRIED_LABELS = 4
_SHOWN = 60
_RENDER_SECONDS = 120.0
_WAY = "pass --rm-type or --custom-rm-path, or give each row a metadata.rm_type"
_WITHOUT_LABEL = ("reasoning_gym", "code", "gpqa", "judge", "random", "remote_rm")
_TRIES_NO_ANSWER = ("code", "random")
"""A label of tests is no program, and chance knows no answer."""
_FORMS = ("\\boxed{{{}}}", "</think>\n\\boxed{{{}}}", "Answer: {}")
"""The forms of answers of models that reason."""


async def check(options: CheckOptions, read_prompts: ReadPrompts) -> Report:
    """Loads the job's reward as the service will, and scores labels with it."""
    report, job = Report(), options.job
    if job.train.loss_mask_type is not None:
        report.facts.append(("reward", "none: conversations are given, nothing is scored"))
        return report
    try:
        hook = await describe(job.reward)
        of_evaluations = await describe_each(own_rewards(eval_sets(job.eval)))
        registry = Registry.of(job.reward.rm_type, hook, of_evaluations)
    except HeadraceError as error:
        report.refuse(error, elsewhere=options.elsewhere and job.reward.custom_rm_path is not None)
        return report
    report.facts.append(("reward", _named(job, hook)))
    prompts = read_prompts()
    if hook is None and "code" in (registry.default, *prompts.rm_types):
        report.facts.append(("programs", f"of responses run in {await asyncio.to_thread(sandbox_said)}"))
    if registry.default is None and not prompts.rm_types:
        report.warnings.append(f"no reward: only prompts that have a metadata.rm_type will be scored; else {_WAY}")
    _everyone_has_a_scorer(job, registry, prompts.rm_types, prompts.num_rows, report)
    for own in of_evaluations:
        report.facts.append(("evaluation's reward", f"{own.path}, called with {own.form.value}"))
    for each in eval_sets(job.eval):
        if each.custom_rm_path is not None:
            continue
        rm_types = await asyncio.to_thread(scorers_of, each.prompts, each.metadata_key or job.data.metadata_key)
        if each.rm_type and "" in rm_types:
            rm_types[each.rm_type] = rm_types.pop("")
        _everyone_has_a_scorer(job, registry, rm_types, sum(found.count for found in rm_types.values()), report)
    if not report.refusals:
        await _try_labels(options, hook, registry, prompts, report)
    return report


def _named(job: Job, hook: RewardHook | None) -> str:
    if hook is None:
        return job.reward.rm_type or "by each prompt's metadata.rm_type"
    return f"{hook.path}, called with {hook.form.value}" + (", async" if hook.is_async else "")


def _everyone_has_a_scorer(
    job: Job, registry: Registry, rm_types: Mapping[str, Scorers], num_rows: int, report: Report
) -> None:
    """Refuses rows whose scorer is missing: they could never be rewarded."""
    if registry.default == CUSTOM:
        return
    generate = job.rollout.user_function
    for name, scorers in rm_types.items():
        chosen = registry.choose(ScoreItem("", "", "", metadata={"rm_type": name} if name else {}), None)
        if isinstance(chosen, ScoreError):
            whose = f"{scorers.count:,} of {num_rows:,} prompts ({scorers.where})"
            if name:
                report.refusals.append(f"{whose}: {chosen.message}")
            elif generate:
                report.warnings.append(
                    f"{whose}: nothing scores them but {generate}, which must give them their reward"
                )
            else:
                report.refusals.append(f"{whose}: no reward scores them: {_WAY}")


async def _try_labels(
    options: CheckOptions, hook: RewardHook | None, registry: Registry, prompts: Prompts, report: Report
) -> None:
    job = options.job
    rows = _one_of_each_scorer(prompts)
    if not rows:
        return
    labelled = [row for row in rows if row.prompt().HasField("label")]
    if hook is None and registry.default is None and rows[0].where in _unscored(prompts):
        return
    if not labelled and hook is None and registry.default not in _WITHOUT_LABEL:
        where = "--label-key names their key" if job.data.label_key is None else "their label is empty"
        report.refusals.append(f"{rows[0].where} has no label, which the scorer compares with: {where}")
        return
    pool = worker_pool(job.reward, registry, hook)
    batch_scorer = BatchScorer(
        *(registry, pool, pool, hook_args(job), RewardMetrics()),
        reward_key=job.reward.reward_key,
        timeout_seconds=job.reward.reward_timeout_seconds,
    )
    async with hook_pool(options, report, pool):
        await pool.start()
        tried = labelled or rows
        texts = await _rendered(pool, options, tried) if hook else [None] * len(tried)
        pairs = zip(tried, texts, strict=True)
        results = [await _scored(batch_scorer, hook, row, text=text) for row, text in pairs]
        _say(tried, results, options, report)
        if hook is None and labelled:
            await _other_forms(batch_scorer, labelled, results, report)


def _unscored(prompts: Prompts) -> list[str]:
    return [scorers.where for name, scorers in prompts.rm_types.items() if not name]


def _one_of_each_scorer(prompts: Prompts) -> list[PromptRow]:
    firsts = {scorers.where for scorers in prompts.rm_types.values()}
    chosen = [row for row in prompts.rows if row.where in firsts]
    return [*chosen, *(row for row in prompts.rows if row.where not in firsts)][: max(_TRIED_LABELS, len(chosen))]


async def _rendered(pool: WorkerPool, options: CheckOptions, rows: Sequence[PromptRow]) -> Sequence[str | None]:
    """The prompts as the run gives them to a user's function; None where the model's template is not to be had."""
    if options.fast or not any(options.job.model.hf_checkpoint.glob("tokenizer*")):
        return [None] * len(rows)
    try:
        work = (rendered_prompts, hook_args(options.job), [row.body for row in rows])
        texts: list[str] = await pool.run(*work, timeout_seconds=_RENDER_SECONDS)
    except WorkerError:  # the rollout service's check names what is wrong with the tokenizer
        return [None] * len(rows)
    return texts


async def _scored(
    batch_scorer: BatchScorer,
    hook: RewardHook | None,
    row: PromptRow,
    form: str = "{}",
    text: str | None = None,
) -> ScoreResult:
    """Scores the label as the response to the prompt's `text`; a group's function gets an empty one beside it."""
    prompt = row.prompt()
    label = prompt.label if prompt.HasField("label") else None
    item = ScoreItem(
        item_id=row.where,
        prompt=plain_conversation(prompt) if text is None else text,
        response=form.format(label or ""),
        label=label,
        metadata=from_json(prompt.metadata_json),
        group_id="check",
        response_tokens=1,
        hook_fields=from_json(prompt.hook_json),
    )
    items = [item]
    if hook is not None and hook.form is RewardForm.GROUP:
        items.append(replace(item, item_id="empty", response="", response_tokens=0))
    return (await batch_scorer.score(items))[0]


def _say(rows: Sequence[PromptRow], results: Sequence[ScoreResult], options: CheckOptions, report: Report) -> None:
    scored = [(row, result) for row, result in zip(rows, results, strict=True) if isinstance(result, Score)]
    failed = [(row, result) for row, result in zip(rows, results, strict=True) if isinstance(result, ScoreError)]
    for row, error in failed[:1]:
        sentence = f"{row.where}: the label as its own answer cannot be scored: {error.message}"
        whose = report.warnings if scored else report.refusals
        (report.unchecked if options.elsewhere else whose).append(sentence)
    for row, score in scored[:1]:
        if score.scorer == "code":
            report.facts.append(("tests", f"of {row.where} are read and run: an empty program scores {score.value:g}"))
            continue
        answer = row.prompt().label[:_SHOWN] if row.prompt().HasField("label") else ""
        report.facts.append(("label as answer", f"{answer!r} ({row.where}) scores {score.value:g} by {score.scorer}"))


async def _other_forms(
    batch_scorer: BatchScorer, rows: Sequence[PromptRow], results: Sequence[ScoreResult], report: Report
) -> None:
    """Finds forms of the answer that score 1 where the label alone does not."""
    for row, result in zip(rows, results, strict=True):
        if not isinstance(result, Score) or result.value >= 1 or result.scorer in _TRIES_NO_ANSWER:
            continue
        label = row.prompt().label[:_SHOWN]
        for form in _FORMS:
            other = await _scored(batch_scorer, None, row, form)
            if isinstance(other, Score) and other.value >= 1:
                report.facts.append(("answers in form", f"{form.format(label)!r} scores {other.value:g}"))
                break
        else:
            report.warnings.append(
                f"{row.where}: the label {label!r} as the answer scores {result.value:g} by {result.scorer}, and "
                f"{_FORMS[0].format(label)!r} no more: no answer may ever get the full reward"
            )
        return


if __name__ == "__main__":
    serve_check(check)
