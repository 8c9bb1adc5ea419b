"""`headrace check JOB.toml [flags]` and `headrace check hook PATH`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from headrace.cli.job_arguments import flags_help, load_job, wants_help
from headrace.cli.view.plan import plan, print_report, too_little_memory
from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope, scope_of_check
from headrace.job.schema.job import Job
from headrace.launch.previous_run import require_shards
from headrace.preflight import READ_SECONDS, Report, preflight
from headrace.run_folder import RunFolder

_USAGE = """usage: headrace check [JOB.toml] [--fast] [--elsewhere] [flags]
       headrace check hook PATH [--kind KIND] [--job JOB.toml]

  --fast       skips what needs the tokenizer (the first prompt as the model sees it, lengths, a trial of generate
               functions and agents) and reads prompts for 2 s at most instead of 20 s
  --elsewhere  the job is for another machine: missing files and GPUs are listed, and do not refuse the job
"""
_REFUSED_EXIT_CODE = 2
_FAILED_EXIT_CODE = 1
_FAST_READ_SECONDS = 2.0


def check(argv: Sequence[str]) -> int:
    """Prints the plan and what every service found.

    Returns 2 when a service refuses the job, with its sentence, and 1 when a service's check itself failed.
    """
    if argv and argv[0] == "hook":
        from headrace.cli.check_hook import check_hook  # only here are hooks' kinds needed

        return check_hook(argv[1:])
    if not argv or wants_help(argv):
        print(_USAGE, flags_help(argv))
        return 0
    fast, elsewhere = "--fast" in argv, "--elsewhere" in argv
    scopes: list[Scope] = []

    def scope_of(job: Job) -> Scope:
        scopes.append(scope_of_check(job, elsewhere=elsewhere))
        return scopes[-1]

    job = load_job([word for word in argv if word not in ("--fast", "--elsewhere")], scope_of)
    read_seconds = _FAST_READ_SECONDS if fast else READ_SECONDS
    report = preflight(job, scopes[0], fast=fast, read_seconds=read_seconds, tries=not fast, tell=_tell)
    if "buffer" in scopes[0].services:
        _check_ledger(job, report, scopes[0])
    report.warnings += too_little_memory(job, scopes[0])
    print_report(Console(), plan(job, scopes[0]), report, scopes[0])
    return _REFUSED_EXIT_CODE if report.refusals else _FAILED_EXIT_CODE if report.failed else 0


def _check_ledger(job: Job, report: Report, scope: Scope) -> None:
    """Compares the job with the ledger that the run's folder has already."""
    try:
        require_shards(RunFolder.of(job), job.buffer)
    except ConfigError as error:
        report.refuse(error, elsewhere=scope.elsewhere is not None)


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)
