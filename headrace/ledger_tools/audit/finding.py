"""One thing that an audit found: its kind, and a sentence with the ids and positions that it is about.

lost, doubled, unaccounted   sample ids: what the ledger and the trainer do not agree about (see `verdict`)
record                       trained.jsonl: a line that is damaged, missing, repeated or out of order
order, digest                a step was fed its batch in another order, or under another digest
damage                       something on the buffer's disk is not as it was written, or contradicts something else
rerun                        a step was fed with other samples before a rewind than after it
history                      events that are missing, unknown, or of a stream that they do not fit
state                        a group that made a step it cannot make, or is not in the state that its events say
batch                        a step whose batch is not whole, or was used in part
epoch, version               a trainer's epoch or the policy's version that went back
count                        numbers of the ledger that do not add up
payload                      a sample whose payload is missing or damaged (only with --deep)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence in `what`, or the sample's id when the kind is lost, doubled or unaccounted."""

    kind: str
    what: str
