"""The promises of RewardService."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1 import reward_pb2_grpc
from headrace.conformance.checks import Check, ask, refused, require, require_serving
from headrace.errors import NotFound
from headrace.limits import MAX_SCORE_ITEMS_PER_CALL

SERVICE = pb.DESCRIPTOR.services_by_name["RewardService"].full_name
_REASONS = frozenset(
    (
        "SCORER_TIMEOUT",
        "SCORER_RAISED",
        "SCORER_CRASHED",
        "SCORER_NOT_FINITE",
        "SCORER_ABSTAINED",
        "SCORER_UNKNOWN",
        "SCORER_UNAVAILABLE",
        "ITEM_INVALID",
    )
)
_BATCH = 256


@dataclass(frozen=True)
class RewardSubject:
    """The service, the scorer that is asked (empty: its default), and items that it can score."""

    channel: Any
    scorer: str
    items: Sequence[pb.ScoreItem]

    async def score(self, items: Sequence[pb.ScoreItem], scorer: str | None = None) -> Sequence[pb.ScoreResult]:
        stub = reward_pb2_grpc.RewardServiceStub(self.channel)
        request = pb.ScoreRequest(items=items, scorer=self.scorer if scorer is None else scorer)
        results: Sequence[pb.ScoreResult] = (await ask(stub.Score, request)).results
        return results

    async def scorers(self) -> Sequence[pb.Scorer]:
        stub = reward_pb2_grpc.RewardServiceStub(self.channel)
        scorers: Sequence[pb.Scorer] = (await ask(stub.ListScorers, pb.ListScorersRequest())).scorers
        return scorers

    def batch(self, number: int) -> list[pb.ScoreItem]:
        """So many items, each with an id of its own."""
        made = []
        for index in range(number):
            item = pb.ScoreItem()
            item.CopyFrom(self.items[index % len(self.items)])
            item.item_id = f"item-{index}"
            made.append(item)
        return made


async def serves(subject: RewardSubject) -> None:
    """Its health is SERVING, under the name of the service."""
    await require_serving(subject.channel, SERVICE)


async def lists_its_scorers(subject: RewardSubject) -> None:
    """ListScorers names each scorer once, sorted, with a version; at most one is the default."""
    scorers = await subject.scorers()
    names = [scorer.name for scorer in scorers]
    require(names, "no scorer is listed")
    require(names == sorted(set(names)), f"the names are not sorted, or not different: {', '.join(names)}")
    unversioned = [scorer.name for scorer in scorers if not scorer.version]
    require(not unversioned, f"without a version: {', '.join(unversioned)}")
    defaults = [scorer.name for scorer in scorers if scorer.is_default]
    require(len(defaults) <= 1, f"several are the default: {', '.join(defaults)}")
    require(subject.scorer or defaults, "none is the default, and no --scorer is named")


async def scores_an_item(subject: RewardSubject) -> None:
    """An item that can be scored gets a finite reward that names its scorer and the scorer's version."""
    for item in subject.batch(len(subject.items)):
        (result,) = await subject.score([item])
        require(result.item_id == item.item_id, f"the result of {item.item_id} is for {result.item_id!r}")
        kind = result.WhichOneof("result")
        require(kind == "score", f"item {item.item_id} has {_error(result) if kind else 'neither score nor error'}")
        score = result.score
        require(math.isfinite(score.value), f"the reward is {score.value}")
        require(score.scorer and score.scorer_version, f"scorer {score.scorer!r}, version {score.scorer_version!r}")
        require(all(math.isfinite(part) for part in score.parts.values()), f"parts {dict(score.parts)}")


async def answers_in_order(subject: RewardSubject) -> None:
    """Of 256 items each has one result, in the order of the request."""
    items = subject.batch(_BATCH)
    results = await subject.score(items)
    require(len(results) == _BATCH, f"{len(results)} results for {_BATCH} items")
    require([each.item_id for each in results] == [each.item_id for each in items], "the results are in another order")


async def scores_the_same_again(subject: RewardSubject) -> None:
    """A request that is made twice has the same rewards: a caller may retry it."""
    first, second = [[_value(each) for each in await subject.score(subject.batch(8))] for _ in range(2)]
    require(first == second, f"{first}, and then {second}")


async def knows_no_other_scorer(subject: RewardSubject) -> None:
    """A scorer that does not exist is NOT_FOUND, or an error of each item: SCORER_UNKNOWN. It is never a reward."""
    unknown = f"no-such-scorer-{uuid.uuid4().hex[:8]}"
    try:
        results = await subject.score(subject.batch(2), unknown)
    except NotFound:
        return
    for result in results:
        reason = result.error.reason if result.WhichOneof("result") == "error" else "a reward"
        require(reason == "SCORER_UNKNOWN", f"an item of the scorer {unknown} has {reason}")


async def refuses_an_empty_request(subject: RewardSubject) -> None:
    """A request without items is INVALID_ARGUMENT."""
    with refused("a request without items", "INVALID_ARGUMENT"):
        await subject.score([])


async def refuses_equal_ids(subject: RewardSubject) -> None:
    """Two items with one id are INVALID_ARGUMENT, because their results could not be told apart."""
    items = subject.batch(2)
    items[1].item_id = items[0].item_id
    with refused("two items with one id", "INVALID_ARGUMENT"):
        await subject.score(items)


async def refuses_too_many_items(subject: RewardSubject) -> None:
    """More than 4,096 items are INVALID_ARGUMENT."""
    with refused("a request with too many items", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):
        await subject.score(subject.batch(MAX_SCORE_ITEMS_PER_CALL + 1))


async def a_bad_item_fails_alone(subject: RewardSubject) -> None:
    """An item whose metadata are no JSON object has an error of its own, and the others are scored."""
    for wrong in ("{", "[1, 2]", '"text"'):
        items = subject.batch(3)
        items[1].metadata_json = wrong
        first, bad, last = await subject.score(items)
        kind = bad.WhichOneof("result")
        require(kind == "error", f"metadata {wrong} have {kind or 'no result'}, not an error")
        require(bad.error.reason in _REASONS, f"the reason is {bad.error.reason!r}, not one of reward.proto's")
        require(bad.error.message, "the error has no message")
        others = {each.WhichOneof("result") for each in (first, last)}
        require(others == {"score"}, f"beside an item with metadata {wrong} the others have {others}")


async def any_text_has_a_result(subject: RewardSubject) -> None:
    """Empty, long and odd responses, and each status, have a reward or an error: nothing breaks the call."""
    texts = ("", " ", "\x00", "x" * 100_000, "\\boxed{", "</think>" * 50, "\u202e7", "🦄" * 1000, "-0", "1e999", "NaN")
    statuses = ("", "completed", "truncated", "aborted")
    items = subject.batch(len(texts) + len(statuses))
    for item, text in zip(items, texts, strict=False):
        item.response = text
    for item, status in zip(items[len(texts) :], statuses, strict=True):
        item.status = status
    for item, result in zip(items, await subject.score(items), strict=True):
        kind = result.WhichOneof("result")
        require(kind, f"the response {item.response[:20]!r} ({item.status}) has neither a score nor an error")
        require(kind == "error" or math.isfinite(result.score.value), f"a reward is {result.score.value}")


async def a_missing_label_is_no_crash(subject: RewardSubject) -> None:
    """An item without a label has a reward or an error of its own."""
    items = subject.batch(2)
    items[0].ClearField("label")
    for result in await subject.score(items):
        require(result.WhichOneof("result"), "an item has neither a score nor an error")


async def groups_come_back_whole(subject: RewardSubject) -> None:
    """Items of two groups, mixed in one call, each have a result."""
    items = subject.batch(8)
    for index, item in enumerate(items):
        item.group_id, item.index = f"group-{index % 2}", index // 2
    results = await subject.score(items)
    require({each.item_id for each in results} == {each.item_id for each in items}, "an item has no result")


CHECKS: Sequence[Check[RewardSubject]] = (
    serves,
    lists_its_scorers,
    scores_an_item,
    answers_in_order,
    scores_the_same_again,
    knows_no_other_scorer,
    refuses_an_empty_request,
    refuses_equal_ids,
    refuses_too_many_items,
    a_bad_item_fails_alone,
    any_text_has_a_result,
    a_missing_label_is_no_crash,
    groups_come_back_whole,
)


def _value(result: pb.ScoreResult) -> float | str:
    return float(result.score.value) if result.WhichOneof("result") == "score" else str(result.error.reason)


def _error(result: pb.ScoreResult) -> str:
    return f"the error {result.error.reason}: {result.error.message}"
