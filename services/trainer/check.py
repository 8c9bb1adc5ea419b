"""The trainer's part of a job, before it starts: its hooks can be loaded."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.hooks.trainer import load_trainer_hook
from headrace.job.hook_files import TRAINER_FORMS
from headrace.preflight import LOAD_SECONDS, CheckOptions, ReadPrompts, Report, hook_pool, refused_in, serve_check
from headrace.rpc import tracing


async def check(options: CheckOptions, _: ReadPrompts) -> Report:
    """Each in a worker, so that what it imports is not our concern."""
    report = Report()
    try:
        tracing.require_usable(options.job.tracking.trace_sample_ratio)
    except ConfigError as error:
        report.refuse(error, elsewhere=options.elsewhere)
    async with hook_pool(options, report) as pool:
        for kind, form in TRAINER_FORMS.items():
            path = getattr(options.job.hooks, form.option)
            if path is None:
                continue
            with refused_in(report, options):
                name = f"hook {path}"
                await pool.run(load_trainer_hook, path, kind, timeout_seconds=LOAD_SECONDS, name=name)
                report.facts.append((kind.replace("_", " "), path))
    return report


if __name__ == "__main__":
    serve_check(check)
