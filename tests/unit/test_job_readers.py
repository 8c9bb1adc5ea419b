"""A whole job is read where a service is built, checked or started; its parts take the values that they need."""

from __future__ import annotations

import ast

import pytest

from headrace.syntax import syntax_tree
from tools.sizes import ROOT, sources

READERS = {
    "headrace/job/load/": "it makes it",
    "headrace/job/rules/": "rules over several sections",
    "headrace/job/option.py": "all options",
    "headrace/job/schema/batch.py": "it derives sizes of one section from those of another",
    "headrace/cli/commands/check.py": "checks",
    "headrace/cli/commands/evaluate.py": "it derives the job of the services that evaluate",
    "headrace/cli/commands/replay.py": "it derives the job of a replay",
    "headrace/cli/commands/train.py": "starts",
    "headrace/cli/eval_services.py": "it derives the job of the services that evaluate",
    "headrace/cli/job_arguments.py": "a command's job",
    "headrace/cli/view/memory.py": "shows it",
    "headrace/cli/view/plan.py": "shows it",
    "headrace/hooks/args.py": "a hook sees all options",
    "headrace/launch/earlier.py": "compares it with an earlier start's",
    "headrace/launch/gpus.py": "counts of two sections, and what starts here",
    "headrace/launch/launcher.py": "starts",
    "headrace/launch/specs.py": "it says what to start, and where",
    "headrace/preflight/preflight.py": "each service checks its part of it",
    "headrace/preflight/process.py": "each service checks its part of it",
    "headrace/run_folder.py": "job.json",
    "services/buffer/build.py": "builds",
    "services/buffer/__main__.py": "starts",
    "services/reward/check.py": "checks",
    "services/rollout/__main__.py": "starts",
    "services/rollout/agents/build.py": "builds",
    "services/rollout/build.py": "builds",
    "services/rollout/check.py": "checks",
    "services/rollout/rollout_function/build.py": "builds",
    "services/rollout/evaluate_url.py": "builds",
    "services/rollout/one_of_several.py": "it derives the job of one of several services",
    "services/rollout/fleet_build.py": "builds",
    "services/rollout/sampler_build.py": "builds",
    "services/trainer/control/build.py": "builds",
    "services/trainer/export_checkpoint.py": "builds",
    "services/trainer/model/build.py": "builds",
    "services/trainer/rl/build.py": "builds",
    "services/trainer/serving/build.py": "builds",
}
"""A folder or a module, and why it reads a whole job."""


def reads_a_job(source: str) -> bool:
    """Whether the module imports the class, by whatever form of import."""
    imports = [node for node in ast.walk(syntax_tree(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return any(
        alias.name in ("Job", "headrace.job.schema.job")
        or (getattr(node, "module", None) == "headrace.job.schema" and alias.name == "job")
        for node in imports
        for alias in node.names
    )


def test_only_these_read_a_whole_job() -> None:
    readers = [path.relative_to(ROOT).as_posix() for path in sources(ROOT) if reads_a_job(path.read_text())]
    product = [name for name in readers if name.startswith(("headrace/", "services/"))]
    assert [name for name in product if not name.startswith(tuple(READERS))] == []
    assert [place for place in READERS if not any(name.startswith(place) for name in product)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from headrace.job.schema.job import Job",
        "import headrace.job.schema.job",
        "from headrace.job.schema import job",
    ],
)
def test_another_reader_is_seen(line: str) -> None:
    assert reads_a_job(f"def late():\n    {line}\n")
    assert not reads_a_job("from headrace.job.schema.run import PublishSection")
