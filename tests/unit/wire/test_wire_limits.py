"""The limits of the protocol: each check at its limit and one beyond it, and the table that shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import limits
from headrace.errors import InvalidArgument

LIMITS = {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}


def test_the_protocols_page_shows_every_limit_with_its_value() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    shown = dict(re.findall(r"^\| `(MAX_\w+)` \| ([\d,.]+) \|", page, re.MULTILINE))
    assert {name: float(value.replace(",", "")) for name, value in shown.items()} == LIMITS


@pytest.mark.parametrize(
    ("check", "most"), [(limits.require_id, 512), (limits.require_name, 128), (limits.require_path, 4_096)]
)
def test_a_name_has_a_length_and_no_control_characters(check: Callable[[str, str], str], most: int) -> None:
    assert check("a" * most, "f") == "a" * most
    assert check("train/0#1.é 漢字", "f") == "train/0#1.é 漢字"
    for bad in ("", "a" * (most + 1), "a\0b", "a\nb", "\x1b[31m", "\x7f", "a\x85"):
        with pytest.raises(InvalidArgument) as caught:
            check(bad, "the_field")
        assert caught.value.field == "the_field"
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("number", [-1, 2**53 + 1, 2**63 - 1, -(2**63)])
def test_a_step_is_a_number_that_every_language_holds_exactly(number: int) -> None:
    assert limits.require_counter(2**53, "step") == 2**53
    with pytest.raises(InvalidArgument, match="must be 0 to 9007199254740992"):
        limits.require_counter(number, "step")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1e-9, 11.0])
def test_a_float_is_finite_and_in_its_range(number: float) -> None:
    assert limits.require_finite(10.0, "seconds", most=10.0) == 10.0
    with pytest.raises(InvalidArgument, match="must be 0 to 10"):
        limits.require_finite(number, "seconds", most=10.0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_float_without_an_upper_bound_is_finite_all_the_same(number: float) -> None:
    assert limits.require_finite(1e300, "seconds") == 1e300
    with pytest.raises(InvalidArgument, match="must be 0 or more"):
        limits.require_finite(number, "seconds")


def test_a_list_has_some_entries_and_not_too_many_and_bytes_have_an_end() -> None:
    limits.require_some(1, "ids")
    limits.require_at_most(5, 5, "ids")
    limits.require_bytes(5, 5, "data")
    for refused in (
        lambda: limits.require_some(0, "ids"),
        lambda: limits.require_at_most(6, 5, "ids"),
        lambda: limits.require_bytes(6, 5, "data"),
    ):
        with pytest.raises(InvalidArgument):
            refused()


def test_json_is_an_object_of_a_size_and_a_depth() -> None:
    deepest = '{"a":' * 64 + "1" + "}" * 64
    assert limits.require_json_object("", "f") == {}
    assert limits.require_json_object(deepest, "f")
    for bad in (
        '{"a":' * 65 + "1" + "}" * 65,
        '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"a":"' + "x" * limits.MAX_JSON_BYTES + '"}',
        '{"a":NaN}',
        '{"a":' + "9" * 5_000 + "}",
        "[1]",
        "nothing",
    ):
        with pytest.raises(InvalidArgument) as caught:
            limits.require_json_object(bad, "f")
        assert len(caught.value.message) < 400


@pytest.mark.parametrize("bad", ['{"a":1}', '"text"', "null", "[", "nothing"])
def test_a_json_array_is_one(bad: str) -> None:
    assert limits.require_json_array("", "f") == []
    assert limits.require_json_array('[1, {"a": 2}]', "f") == [1, {"a": 2}]
    with pytest.raises(InvalidArgument):
        limits.require_json_array(bad, "f")


def test_a_message_for_people_is_cut_and_a_value_in_an_error_is_too() -> None:
    assert limits.cut_text("a" * 2_048) == "a" * 2_048
    assert len(limits.cut_text("a" * 100_000)) == 2_048
    assert len(limits.shown("a\n" * 100_000)) < 100
    assert len(limits.shown(b"a" * 100_000)) < 100
