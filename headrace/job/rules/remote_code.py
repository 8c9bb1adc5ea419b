"""Code that the checkpoint's folder brings for its tokenizer: whether it is trusted, and where it runs."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.models.tokenizer.tokenizer import RemoteCode


def check_remote_code(job: Job, scope: Scope) -> None:
    """Raises ConfigError where the tokenizer needs code that the job does not trust in each process that loads it."""
    if "rollout" not in scope.services:
        return
    code = RemoteCode.of(job.model.hf_checkpoint)
    code.require(trusted=job.model.trust_remote_code)
    if code.is_needed and _starts_engines(job) and not _engines_trust(job):
        raise ConfigError(
            f"{code.folder}: engines load the tokenizer too, which is code of the folder "
            f"({', '.join(code.tokenizer)}): pass --sglang-trust-remote-code as well",
            field="sglang.trust_remote_code",
        )


def where_code_runs(job: Job) -> str | None:
    """A sentence with the files and the processes; None for a folder without code."""
    code = RemoteCode.of(job.model.hf_checkpoint)
    files = list(dict.fromkeys((*code.tokenizer, *code.config)))
    if not files:
        return None
    named = f"{', '.join(files)} of {code.folder}"
    processes = [
        *(["the rollout service, hooks that use headrace.hooks.kit"] if job.model.trust_remote_code else []),
        *(["the engines"] if _starts_engines(job) and _engines_trust(job) else []),
    ]
    if not processes:
        return f"none: {named} are not run"
    return f"{named} may run in {' and in '.join(processes)}; in no buffer, reward service or trainer rank"


def _engines_trust(job: Job) -> bool:
    return bool(job.sglang.get("trust_remote_code") or job.sglang.get("skip_tokenizer_init"))


def _starts_engines(job: Job) -> bool:
    return not job.placement.rollout_external_engine_addrs and job.train.loss_mask_type is None
