"""What counts as a number in a text, and what of it reaches people and services."""

from __future__ import annotations

import pytest

from headrace.client.shards import shard_of_group
from headrace.errors import HeadraceError
from headrace.job.rules.machines import meeting_of
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.section import PromptPath
from headrace.limits import whole_number
from headrace.rpc.net import Address
from services.buffer.conversion.wire import page_token_from_proto

NO_NUMBERS = ("", "²", "٣", "1²", "-1", "+1", " 1", "1_0", "1.0", "0x1", "9" * 5000, "1\n")


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_other_text_is_no_number(text: str) -> None:
    assert whole_number(text, 1 << 53) is None


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("65535", 65535), ("00080", 80), ("65536", None), ("000080", None)]
)
def test_a_number_is_at_most_what_is_allowed(text: str, number: int | None) -> None:
    assert whole_number(text, 65535) == number


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_whoever_writes_one_is_told_in_words(text: str) -> None:
    one_machine_of_two = PlacementSection(actor_num_nodes=2, master_addr="127.0.0.1")
    for refuses in (
        lambda: Address.parse(f"127.0.0.1:{text}"),
        lambda: PromptPath.parse(f"prompts.jsonl@[{text}:x]"),
        lambda: meeting_of(one_machine_of_two, {"NODE_RANK": text}),
        lambda: shard_of_group(f"train/{text}", 2),
        lambda: page_token_from_proto(text or "-"),
    ):
        with pytest.raises(HeadraceError) as refused:
            refuses()
        assert len(refused.value.message) < 6000
