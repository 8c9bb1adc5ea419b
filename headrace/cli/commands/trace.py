"""`headrace trace [RUN] [SAMPLE]`: the run's spans for Perfetto and Chrome."""

from __future__ import annotations

import json

import click

from headrace.cli.arg_types import TEXT, run_argument
from headrace.cli.runs import find_run
from headrace.errors import NotFound
from headrace.traces import GROUP, by_trace, chrome, of_sample, read_spans


@click.command()
@run_argument
@click.argument("sample", required=False, type=TEXT, metavar="[SAMPLE]")
def trace(run: str | None, sample: str | None) -> int:
    """Prints what a run has traced, as Chrome's trace events: open them at ui.perfetto.dev or in chrome://tracing.

    SAMPLE is an id that `headrace samples` shows, or a group's: its life over all services, all attempts, and the
    steps that trained it. A run traces nothing without --trace-sample-ratio.
    """
    folder = find_run(run)
    spans = read_spans(folder)
    if sample is not None and not (spans := of_sample(by_trace(every := spans), folder.job().run.run_name, sample)):
        groups = sorted({str(group) for span in every if (group := span.attributes.get(GROUP))})
        there = f"traced groups are {', '.join(groups[:5])} …" if groups else "no sample was traced"
        raise NotFound(f"no span of {sample[:80]}: {there}; a higher --trace-sample-ratio traces more")
    print(json.dumps(chrome(spans, flows=sample is not None), ensure_ascii=False))
    return 0
