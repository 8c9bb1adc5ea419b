"""Checks the fields that a generate function has to set before a sample can be trained.

A sample that lacks one would train nothing, without a warning, so it is refused with the list of all that is missing.
"""

from __future__ import annotations

from headrace.errors import InvalidArgument
from headrace.hooks.sample import Sample

_STATUS = (
    "status is still PENDING: set sample.status to Sample.Status.COMPLETED, TRUNCATED (a length limit ended it), "
    "ABORTED, or FAILED with failure_reason"
)
_RESPONSE = (
    "response_length is 0, and a response's text is never tokenized again: ask the engine with return_logprob, append "
    "the token ids of its answer to sample.tokens behind the prompt's, and set response_length, rollout_log_probs and, "
    "where there are tokens that the policy did not write, loss_mask; or set remove_sample"
)
_PROMPT = "all of tokens are the response: sample.tokens begin with the prompt's token ids"


def require_finished(path: str, sample: Sample) -> None:
    """Raises InvalidArgument, with reason HOOK_INCOMPLETE, for one that cannot be trained as it is."""
    if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
        return
    missing = []
    if sample.status is Sample.Status.PENDING:
        missing.append(_STATUS)
    if not sample.response_length and not sample.remove_sample:
        missing.append(_RESPONSE)
    if sample.response_length and len(sample.tokens) == sample.response_length and sample.prompt:
        missing.append(_PROMPT)
    if missing:
        raise InvalidArgument(
            f"hook {path} returned a sample that cannot be trained: {'; '.join(missing)}", reason="HOOK_INCOMPLETE"
        )
