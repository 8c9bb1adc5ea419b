"""Gives a sample that a user's function returns the tokens of the conversation that it came of."""

from __future__ import annotations

from dataclasses import replace

from headrace.hooks.kit.call import Call
from headrace.hooks.kit.completion import Completion, plain_text
from headrace.hooks.sample import Sample
from headrace.trajectory import bounded_turns


def adopted(sample: Sample, call: Call) -> Sample:
    """Returns a copy with plain texts; one without tokens gets those of its conversation, if it has one here.

    What the function has set itself stays: response, mask, status, reward.
    """
    completion, was_cut = _completion_of(sample, call)
    texts = {name: plain_text(getattr(sample, name)) for name in ("prompt", "response", "metadata", "train_metadata")}
    made = replace(sample, **texts)
    if completion is None or sample.tokens:
        return made
    completion.trajectory.write_to(made)
    if was_cut:
        made.status = Sample.Status.TRUNCATED
    if sample.status is not Sample.Status.PENDING:
        made.status = sample.status
    if sample.loss_mask is not None:
        made.loss_mask = sample.loss_mask
    made.response = made.response or completion.whole
    if made.turns is None and not isinstance(completion.seen, str):
        said = {"role": "assistant", "content": completion.whole}
        made.turns = bounded_turns([*plain_text(completion.seen), said])
    return made


def _completion_of(sample: Sample, call: Call) -> tuple[Completion | None, bool]:
    """The second is True for a conversation that the function has left in its midst, at the limit of its turns."""
    response: object = sample.response
    if isinstance(response, Completion):
        return response, False
    latest = call.latest if len(call.samples) == 1 and not response else None
    if id(sample.prompt) in call.completions:
        latest = call.completions[id(sample.prompt)][1]
    return latest, latest is not None and latest.is_open
