"""Checks the reward service's part of a job before it starts: who scores each prompt, and what its label would get."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, HeadraceError, InvalidArgument
from headrace.hooks import RewardForm, RewardHook, hook_args
from headrace.hooks.args import HookArgs
from headrace.hooks.kit.conversation import renderer_of
from headrace.hooks.kit.sandbox import allow_insecure_sandbox, require_sandbox, sandbox_said, sandbox_used_by
from headrace.job.eval_sets import eval_sets, own_rewards
from headrace.job.schema.job import Job
from headrace.job.schema.section import PromptPath
from headrace.limits import MAX_EVAL_FILE_BYTES, from_json
from headrace.preflight import (
    LOAD_SECONDS,
    CheckOptions,
    PromptRow,
    Prompts,
    ReadPrompts,
    Report,
    Scorers,
    count_scorer,
    hook_pool,
    scorer_name,
    serve_check,
)
from headrace.process.workers import WorkerError, WorkerPool
from headrace.prompts import parse_row, rows_of, value_at
from headrace.score import SCORER_UNAVAILABLE, Score, ScoreError, ScoreItem, ScoreResult
from services.reward.registry import BOXED, COMPOSED, CUSTOM, Registry
from services.reward.scorers.answers import example
from services.reward.scoring import BatchScorer, RewardMetrics
from services.reward.server import describe, describe_each, registry_of, worker_pool


def scorers_of(prompts: PromptPath, metadata_key: str | None) -> dict[str, Scorers]:
    """Counts the scorers by rm_type ("" where a row names none). Bad rows are left to the rollout service's check."""
    path, found = prompts.path, dict[str, Scorers]()
    if not path.is_file() or path.stat().st_size > MAX_EVAL_FILE_BYTES:
        return found
    with path.open("rb") as file:
        for number, row in rows_of(file, path, prompts.first_row, prompts.end_row):
            count_scorer(found, _scorer_of_line(row, metadata_key), f"{path.name}, line {number}")
    return found


def _scorer_of_line(line: Any, metadata_key: str | None) -> str:
    try:
        row = parse_row(line)
    except InvalidArgument:
        return ""
    metadata = value_at(row, metadata_key) if metadata_key else None
    return scorer_name(metadata) if isinstance(metadata, dict) else ""


_TRIED_LABELS = 4
_SHOWN = 60
_RENDER_SECONDS = 120.0
_WAY = "pass --rm-type or --custom-rm-path, or give each row a metadata.rm_type"
_WITHOUT_LABEL = ("reasoning_gym", "code", "gpqa", "judge", "random", "remote_rm", "nemo_gym", COMPOSED)
_COMPARE = ("math", "dapo", "deepscaler", "exact_match", "f1", "gpqa")
"""The scorers to which a label is a right answer. To others it is tests, a pattern, or a hint for a judge."""
_FORMS = ("\\boxed{{{}}}", "</think>\n\\boxed{{{}}}", "Answer: {}")
"""The forms of answers of models that reason."""


async def check(options: CheckOptions, read_prompts: ReadPrompts) -> Report:
    """Loads the job's reward as the service will, and scores labels with it."""
    report, job = Report(), options.job
    allow_insecure_sandbox(job.reward.insecure_sandbox)
    if job.train.loss_mask_type is not None:
        report.facts.append(("reward", "none: conversations are given, nothing is scored"))
        return report
    try:
        hook = await describe(job.reward)
        of_evaluations = await describe_each(own_rewards(eval_sets(job.eval)))
        registry = await registry_of(job.reward, hook, of_evaluations)
    except HeadraceError as error:
        is_of_machine = job.reward.custom_rm_path is not None or (
            isinstance(error, ConfigError) and error.field == "insecure_sandbox"
        )
        report.refuse(error, elsewhere=options.elsewhere and is_of_machine)
        return report
    report.facts.append(("reward", _named(job, hook)))
    prompts = read_prompts()
    await _programs(options, hook, registry, prompts, report)
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


async def _programs(
    options: CheckOptions, hook: RewardHook | None, registry: Registry, prompts: Prompts, report: Report
) -> None:
    """Says what the policy's programs run in, and refuses them where that is nothing."""
    if hook is not None:
        async with hook_pool(options, report) as pool:
            said = await pool.run(sandbox_used_by, hook.path, timeout_seconds=LOAD_SECONDS, name=f"hook {hook.path}")
            if said is not None:
                report.facts.append(("programs", f"of {hook.path} run in {said}"))
    elif "code" in (registry.default, *(name.removeprefix(BOXED) for name in prompts.rm_types)):
        try:
            await asyncio.to_thread(require_sandbox, "scorer code")
        except HeadraceError as error:
            report.refuse(error, elsewhere=options.elsewhere)
        report.facts.append(("programs", f"of responses run in {await asyncio.to_thread(sandbox_said)}"))


def _named(job: Job, hook: RewardHook | None) -> str:
    if hook is None:
        if job.reward.reward_parts:
            return f"the {job.reward.reward_combine} of {', '.join(each.scorer for each in job.reward.reward_parts)}"
        return job.reward.rm_type or "by each prompt's metadata.rm_type"
    return f"{hook.path}, called with {hook.form.value}" + (", async" if hook.is_async else "")


def _everyone_has_a_scorer(
    job: Job, registry: Registry, rm_types: Mapping[str, Scorers], num_rows: int, report: Report
) -> None:
    """Refuses rows whose scorer is missing: they could never be rewarded."""
    if registry.default in (CUSTOM, COMPOSED):
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
    pool = worker_pool(job.reward, registry)
    batch_scorer = BatchScorer(
        registry,
        pool,
        pool,
        hook_args(job),
        RewardMetrics(),
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
            await _other_forms(batch_scorer, labelled, results, report, allows_zero=job.reward.skip_label_check)


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
    """Scores the label's answer as the response to `text`; a group's function gets an empty one beside it."""
    prompt = row.prompt()
    label = prompt.label if prompt.HasField("label") else None
    item = ScoreItem(
        item_id=row.where,
        prompt=plain_conversation(prompt) if text is None else text,
        response="",
        label=label,
        metadata=from_json(prompt.metadata_json),
        group_id="check",
        response_tokens=1,
        hook_fields=from_json(prompt.hook_json),
    )
    item = replace(item, response=form.format(_answer(batch_scorer.registry, item)))
    items = [item]
    if hook is not None and hook.form is RewardForm.GROUP:
        items.append(replace(item, item_id="empty", response="", response_tokens=0))
    return (await batch_scorer.score(items))[0]


def _answer(registry: Registry, item: ScoreItem) -> str:
    """The label, or where a scorer compares with it, the answer that it holds."""
    scorer = registry.choose(item, None)
    if item.label is None or isinstance(scorer, ScoreError) or scorer.hook or not _compares(scorer.name):
        return item.label or ""
    return example(scorer.name, item.label)


def _compares(scorer: str) -> bool:
    return scorer.removeprefix(BOXED) in _COMPARE


def _say(rows: Sequence[PromptRow], results: Sequence[ScoreResult], options: CheckOptions, report: Report) -> None:
    scored = [(row, result) for row, result in zip(rows, results, strict=True) if isinstance(result, Score)]
    failed = [(row, result) for row, result in zip(rows, results, strict=True) if isinstance(result, ScoreError)]
    for row, error in failed[:1]:
        sentence = f"{row.where}: the label as its own answer cannot be scored: {error.message}"
        # Samples wait for a server that is away, and a judge may be an engine of this very run.
        goes_on = scored or options.job.reward.skip_label_check or error.reason == SCORER_UNAVAILABLE
        whose = report.warnings if goes_on else report.refusals
        if not goes_on:
            sentence += " (--skip-label-check starts all the same)"
        (report.unchecked if options.elsewhere else whose).append(sentence)
    for row, score in scored[:1]:
        if score.scorer == "code":
            report.facts.append(("tests", f"of {row.where} are read and run: an empty program scores {score.value:g}"))
            continue
        answer = row.prompt().label[:_SHOWN] if row.prompt().HasField("label") else ""
        report.facts.append(("label as answer", f"{answer!r} ({row.where}) scores {score.value:g} by {score.scorer}"))


async def _other_forms(
    batch_scorer: BatchScorer,
    rows: Sequence[PromptRow],
    results: Sequence[ScoreResult],
    report: Report,
    *,
    allows_zero: bool,
) -> None:
    """Finds forms of the answer that score 1 where the label alone does not.

    Refuses labels that score nothing in any form, where none of the scorer's other labels does better.
    """
    best: dict[str, list[tuple[PromptRow, float]]] = defaultdict(list)
    is_told = False
    for row, result in zip(rows, results, strict=True):
        if not isinstance(result, Score) or not _compares(result.scorer):
            continue
        highest = result.value
        for form in _FORMS if highest < 1 else ():
            other = await _scored(batch_scorer, None, row, form)
            if isinstance(other, Score) and other.value > highest:
                highest = other.value
                if highest >= 1 and not is_told:
                    is_told = True
                    answer = example(result.scorer.removeprefix(BOXED), row.prompt().label)
                    shown = form.format(answer[:_SHOWN])
                    report.facts.append(("answers in form", f"{shown!r} scores {highest:g}"))
        best[result.scorer].append((row, highest))
    for scorer, tried in best.items():
        row, highest = min(tried, key=lambda pair: pair[1])
        if highest >= 1:
            continue
        said = f"{row.where}: the label {row.prompt().label[:_SHOWN]!r} as the answer scores {highest:g} by {scorer}"
        if max(value for _, value in tried) > 0:
            report.warnings.append(f"{said}, in every form: no answer may ever get the full reward")
        elif allows_zero:
            report.warnings.append(f"{said}, and --skip-label-check is set: no answer may ever get a reward")
        else:
            report.refusals.append(
                f"{said}, in every form, so no answer could get a reward: name the key of the answer itself with "
                "--label-key (KEY.INNER for an object's inner key), choose another scorer, or pass --skip-label-check "
                "to start all the same"
            )


# The text of prompts as a run gives it to rewards: the conversation in the model's chat template.


def rendered_prompts(args: HookArgs, prompts: Sequence[bytes]) -> list[str]:
    """Returns a text for each serialized prompt. Runs in a worker. Raises ConfigError without a tokenizer."""
    return [_text(args, sample_pb2.Prompt.FromString(prompt)) for prompt in prompts]


def plain_conversation(prompt: sample_pb2.Prompt) -> str:
    """The same without a model: ChatML, where the prompt is messages."""
    if prompt.WhichOneof("content") == "text":
        return prompt.text
    turns = [f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in prompt.messages.messages]
    return "".join([*turns, "<|im_start|>assistant\n"])


def _text(args: HookArgs, prompt: sample_pb2.Prompt) -> str:
    messages = [
        {"role": turn.role, "content": turn.content, **from_json(turn.extra_json)} for turn in prompt.messages.messages
    ]
    if prompt.WhichOneof("content") == "text":
        if not args.get("apply_chat_template"):
            return prompt.text
        messages = [{"role": "user", "content": prompt.text}]
    try:
        return renderer_of(args).render(messages, None)
    except InvalidArgument:  # the rollout service's check names it
        return plain_conversation(prompt)


if __name__ == "__main__":
    serve_check(check)
