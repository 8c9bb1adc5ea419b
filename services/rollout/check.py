"""Checks the rollout service's part of a job before it starts: hooks, evaluations, and prompts as the model sees them.

Only the tokenizer is loaded, and without torch, which would take longer than all the rest.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError, HeadraceError
from headrace.hooks import hook_args
from headrace.hooks.filter import load_all_samples, load_filter, load_sample_hook
from headrace.job.eval_sets import eval_dataset, eval_sets
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit
from headrace.models.tokenizer.tokenizer import end_tokens
from headrace.preflight import LOAD_SECONDS, CheckOptions, Prompts, ReadPrompts, Report, hook_pool, serve_check
from headrace.process.workers import WorkerError, WorkerPool, WorkerRaised, WorkerTimeout
from services.rollout.build import prompt_encoder
from services.rollout.evaluation.dataset import EvalFiles, read_plan
from services.rollout.production.hooks import sample_for_hook
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import SampleRequest, job_params
from services.rollout.production.supervised import supervised_parts

_SHOWN = 400
_OF_NETWORKS = ("Connect", "Timeout", "Unavailable")
"""Parts of the names of exceptions that clients raise where nobody answers."""
_IMAGE_SECONDS = 20.0


async def check(options: CheckOptions, read_prompts: ReadPrompts) -> Report:
    """Checks everything that is known without an engine. Hooks load in processes of their own, beside the tokenizer."""
    hooks, (report, first) = await asyncio.gather(_hooks(options), asyncio.to_thread(_data, options, read_prompts))
    if options.tries and not hooks.refusals and not report.refusals:
        await _try_functions(options, first, hooks)
    hooks.join(report)
    return hooks


async def _try_functions(options: CheckOptions, first: SampleRequest | None, report: Report) -> None:
    """Calls what makes samples with the job's first prompt; an engine stands in for the real one."""
    from headrace.hooks.trial.check import tried_in

    rollout, args = options.job.rollout, hook_args(options.job)
    functions: list[tuple[str | None, str]] = [
        (rollout.custom_generate_function_path, "generate"),
        *((each.custom_generate_function_path, "generate") for each in eval_sets(options.job.eval)),
        (rollout.rollout_function_path, "rollout"),
        (None if rollout.agent_hosts or rollout.agent_command else rollout.agent_function_path, "agent"),
    ]
    for path, kind in dict.fromkeys(functions):
        if path is None:
            continue
        pool = WorkerPool(1)
        try:
            prompts = [sample_for_hook(first, args)] if first else None
            said = await tried_in(pool, path, kind, args, prompts)
            report.facts.append(("tried", f"{path} {said}"))
        except WorkerError as error:
            _not_tried(error, path, options, report)
        finally:
            await pool.close()


def _not_tried(error: WorkerError, path: str, options: CheckOptions, report: Report) -> None:
    """A function that waits for a server of its own may find it when the job runs."""
    sentence = f"tried with a first prompt and a stand-in for the engine: {error.message}"
    if isinstance(error, WorkerTimeout):
        report.unchecked.append(sentence)
    elif isinstance(error, WorkerRaised) and any(word in error.kind for word in _OF_NETWORKS):
        report.warnings.append(f"{sentence}: start what {path} asks before the job")
    else:
        report.refuse(ConfigError(sentence), elsewhere=options.elsewhere)


def _data(options: CheckOptions, read_prompts: ReadPrompts) -> tuple[Report, SampleRequest | None]:
    """Also returns the request for the first prompt, where it can be encoded here."""
    report, first = Report(), None
    _evaluations(options.job, report)
    if options.fast:
        report.unchecked.append("prompts as the model sees them, and their lengths: --fast leaves out the tokenizer")
    elif not _has_tokenizer(options.job.model.hf_checkpoint):
        report.unchecked.append("prompts as the model sees them, and their lengths: the tokenizer is not here")
    else:
        loading = Report()
        encoder = _encoder(options.job, loading)  # while the buffer's check reads
        if (prompts := read_prompts()).rows and encoder:
            _tokenize(options.job, encoder, prompts, report)
            first = _first_request(options.job, encoder, prompts)
        elif prompts.rows:
            report.join(loading)
    return report, first


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("tokenizer*"))


def _first_request(job: Job, encoder: PromptEncoder, prompts: Prompts) -> SampleRequest | None:
    prompt = prompts.rows[0].prompt()
    try:
        encoded = encoder.encode(prompt)
    except HeadraceError:
        return None
    return SampleRequest.of(prompt, encoded, job_params(job.rollout), sample_id="check/0", group_id="check", index=0)


async def _hooks(options: CheckOptions) -> Report:
    from headrace.hooks.agent import require_agent
    from headrace.hooks.agent_command import of_commands
    from headrace.hooks.generate import generate_form
    from headrace.hooks.kit.sandbox import allow_insecure_sandbox, sandbox_used_by

    report, rollout = Report(), options.job.rollout
    allow_insecure_sandbox(options.job.reward.insecure_sandbox)
    async with hook_pool(options, report) as pool:
        if path := rollout.custom_generate_function_path:
            form = await pool.run(generate_form, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
            report.facts.append(("generate", f"{path}, called with {form}"))
            sandbox = await pool.run(sandbox_used_by, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
            if sandbox is not None:
                report.facts.append(("programs", f"of {path} run in {sandbox}"))
        for each in eval_sets(options.job.eval):
            if path := each.custom_generate_function_path:
                form = await pool.run(generate_form, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
                report.facts.append((f"evaluation {each.name}", f"{path}, called with {form}"))
        await _of_steps(options.job, pool, report)
        if rollout.agent_hosts:
            report.facts.append(("agent", f"{rollout.agent_function_path} is played by `headrace agent`, elsewhere"))
        elif rollout.agent_command:
            of_commands(None, rollout.agent_command, rollout.agent_reward_command)
            report.facts.append(
                ("agent", f"{rollout.agent_command} plays each sample in a session and folder of its own")
            )
        elif path := rollout.agent_function_path:
            await pool.run(require_agent, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
            report.facts.append(("agent", f"{path} plays each sample in a session of its own"))
        for path in rollout.rollout_sample_hook_path:
            await pool.run(load_sample_hook, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
            report.facts.append(("sample hook", f"{path} sees each sample before it is scored"))
        if path := rollout.dynamic_sampling_filter_path:
            await pool.run(load_filter, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
            report.facts.append(("filter", f"{path} keeps or drops each group"))
    return report


async def _of_steps(job: Job, pool: WorkerPool, report: Report) -> None:
    """Functions that are called for whole steps, or for whole evaluations."""
    from headrace.hooks.rollout.function import load_rollout

    rollout = job.rollout
    if path := rollout.rollout_function_path:
        evaluates = await pool.run(load_rollout, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
        report.facts.append(("rollout", f"{path} makes the groups of a step{', and evaluates' * evaluates}"))
    if path := job.eval.eval_function_path:
        if not await pool.run(load_rollout, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}"):
            report.refusals.append(f"eval_function_path {path} takes no argument `evaluation`: give it one")
        report.facts.append(("evaluations", f"{path} makes them"))
    if path := rollout.rollout_all_samples_process_path:
        await pool.run(load_all_samples, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
        report.facts.append(("all samples", f"{path} is shown each step's, of dropped groups too"))


def _evaluations(job: Job, report: Report) -> None:
    files = EvalFiles.of(job.eval, job.buffer.prompt_root)
    for each in eval_sets(job.eval):
        if not each.prompts.path.is_file():
            continue  # the job's own rules have said so
        asked = eval_dataset(each, job.eval, job.rollout, job.data)
        try:
            rows = read_plan(asked, files, job_params(job.rollout)).rows
        except HeadraceError as error:
            report.refusals.append(f"eval_prompt_data {each.name}: {error.message}")
        else:
            report.facts.append((f"evaluation {each.name}", f"{len(rows):,} prompts of {each.path}"))
            if asked.label_key and not any(row.HasField("label") for row in rows):
                report.refusals.append(f"eval_prompt_data {each.name}: no row of {each.path} has a {asked.label_key!r}")


def _encoder(job: Job, report: Report) -> PromptEncoder | None:
    try:
        encoder = _made(job)
        encoder.load()
        end_tokens(job.model.hf_checkpoint)
        return encoder
    except HeadraceError as error:
        report.refuse(error)
    except Exception as error:  # noqa: BLE001  # what lies in a model's folder may make its tokenizer raise anything
        report.refusals.append(
            f"hf_checkpoint {job.model.hf_checkpoint}: its tokenizer cannot be loaded: {type(error).__name__}: {error}"
        )
    return None


def _made(job: Job) -> PromptEncoder:
    model, variables = job.model, job.data.apply_chat_template_kwargs
    trusts = model.trust_remote_code
    supervised = supervised_parts(job.train, model.hf_checkpoint, variables, trust_remote_code=trusts)
    return supervised.encoder if supervised else prompt_encoder(job)


def _tokenize(job: Job, encoder: PromptEncoder, prompts: Prompts, report: Report) -> None:
    lengths: list[int] = []
    num_images, begun = 0, time.monotonic()
    for number, row in enumerate(prompts.rows):
        if num_images and time.monotonic() - begun > _IMAGE_SECONDS:
            report.unchecked.append(f"the images of {len(prompts.rows) - number:,} of {len(prompts.rows):,} prompts")
            break
        try:
            encoded = encoder.encode(row.prompt())
        except HeadraceError as error:
            if not lengths:
                report.refusals.append(f"{row.where}: {error.message}")
                return
            report.warnings.append(f"{row.where}: {error.message}")
            continue
        if not lengths:
            report.facts.append(
                ("first prompt", f"{row.where}, {len(encoded.tokens):,} tokens:\n{_shown(encoded.text)}")
            )
            if encoded.trained:
                trained = sum(len(stretch) for stretch in encoded.trained)
                report.facts.append(("trained", f"{trained:,} of its tokens"))
        lengths.append(len(encoded.tokens))
        num_images += len(encoded.images.data) if encoded.images else 0
    if num_images:
        report.facts.append(("images read", f"{num_images:,} of {len(lengths):,} prompts, by the model's processor"))
    if not lengths:
        return
    report.facts.append(("prompt lengths", _spread(lengths)))
    _too_long(job, lengths, report)


def _spread(lengths: Sequence[int]) -> str:
    middle = round(statistics.median(lengths))
    return f"{min(lengths):,} to {max(lengths):,} tokens, half of them at most {middle:,} ({len(lengths):,} prompts)"


def _too_long(job: Job, lengths: Sequence[int], report: Report) -> None:
    """Reports prompts that the service would drop."""
    rollout = job.rollout
    for name, limit in (
        ("rollout_max_prompt_len", rollout.rollout_max_prompt_len),
        ("rollout_max_context_len", rollout.rollout_max_context_len and rollout.rollout_max_context_len - 1),
        ("the model's context", _context(job)),
    ):
        if limit is None:
            continue
        beyond = sum(length > limit for length in lengths)
        sentence = f"{beyond:,} of {len(lengths):,} prompts are longer than {limit:,} tokens, {name}"
        if beyond == len(lengths):
            report.refusals.append(f"{sentence}: none would be left to train on")
        elif beyond:
            report.warnings.append(f"{sentence}: they are dropped")


def _context(job: Job) -> int | None:
    from headrace.models.registry import read_architecture

    if not (job.model.hf_checkpoint / "config.json").is_file():
        return None
    found = read_architecture(job.model.hf_checkpoint)
    return ContextLimit.of_engines(job.sglang, found, job.placement.engine_groups).tokens - 1


def _shown(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN // 2]} … {len(text) - _SHOWN:,} characters … {text[-_SHOWN // 2 :]}"


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then loads its tokenizers alone
    serve_check(check)
