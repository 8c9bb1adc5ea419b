"""Several files in one stream: each has its cursor, and its share of what is trained whatever becomes of its groups."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from services.buffer.ledger.produce import PutOutcome
from services.buffer.ledger.queues import fair_order
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put
from tests.support.ledgers.ledger_under_test import complete, without_samples
from tests.support.ledgers.mixed_ledger import WEIGHTS, Mixed
from tests.support.processes.buffer_server import served_buffer


def shares(num_groups: int, weights: Mapping[str, float] = WEIGHTS) -> Counter[str]:
    """What the weights promise for so many groups; these come out even."""
    total = sum(weights.values())
    return Counter({name: int(num_groups * weight / total) for name, weight in weights.items()})


def test_the_order_is_as_close_to_the_weights_as_whole_groups_allow_at_every_moment() -> None:
    weights = [3.0, 1.0, 2.5]
    order = fair_order(weights, [0, 0, 0], [1000] * 3, 650)
    for n in range(1, 651):
        for source, weight in enumerate(weights):
            assert abs(order[:n].count(source) - n * weight / 6.5) < 1.5
    assert order[100:] == fair_order(weights, [order[:100].count(i) for i in range(3)], [1000] * 3, 550)


def test_a_source_without_room_leaves_its_share_to_the_others() -> None:
    assert fair_order([3.0, 1.0], [0, 0], [2, 100], 6) == [0, 0, 1, 1, 1, 1]
    assert fair_order([3.0, 1.0], [0, 0], [1, 1], 6) == [0, 1]


def test_batches_have_their_shares_although_a_filter_drops_most_of_one_source() -> None:
    it, chance = Mixed(), random.Random(5)
    it.create_mixed()
    epoch, made = it.rewind(), Counter[str]()
    for step in range(20):
        while (batch := it.batch(epoch, step)) is None:
            for group in it.lease(3):
                name = group.prompt.prompt_id.split(".")[0]
                made[name] += 1
                is_dropped = name == "math" and chance.random() < 0.75
                put = without_samples(group, PutOutcome.DROPPED) if is_dropped else complete(group)
                it.do(it.ledger.put(it.now, [put]))
        assert it.of(batch.groups) == shares(8)
        it.consume(epoch, step)
        it.serve(epoch, step + 1)
    assert made["math"] > 3 * 5 * 20
    assert it.ledger.stream("train").state.taken == (100, 40, 20)


def test_submitted_prompts_come_first_and_take_no_share() -> None:
    it = Mixed()
    it.create_mixed()
    epoch = it.rewind()
    it.submit("outside1", "outside2")
    batch = it.train_step(epoch, 0)
    assert it.of(batch.groups) == Counter(outside1=1, outside2=1) + Counter(math=5, code=1)
    assert it.of(it.train_step(epoch, 1).groups) == Counter(math=5, code=2, chat=1)


async def test_each_file_has_its_cursor_and_its_counts_and_keeps_them_over_a_restart(tmp_path: Path) -> None:
    for name in ("math", "code"):
        rows = [json.dumps({"prompt": f"{name} {i}"}) for i in range(100 if name == "math" else 4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files = [
        pb.FileSource(path=str(tmp_path / f"{name}.jsonl"), input_key="prompt", weight=weight, num_epochs=1)
        for name, weight in (("math", 3.0), ("code", 1.0))
    ]
    config = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=4, files=files)
    for step in range(6):
        async with (
            served_buffer(SqliteStore(tmp_path / "ledger"), prompt_root=tmp_path) as (_, server),
            BufferClient(server.address) as client,
        ):
            await client.create_stream(config)
            epoch = (await client.rewind("train", step)).epoch
            leases = (await client.lease_groups("train", "p", 4)).leases
            await client.put_groups([complete_put(lease) for lease in leases])
            batch = await client.lease_batch("train", epoch, step)
            await client.consume("train", epoch, step, batch.digest)
            math, code = (await client.stats("train")).sources
    assert (math.name, math.weight, math.prompts_read, math.batched, math.ended) == ("math.jsonl", 3.0, 20, 20, False)
    assert (code.name, code.weight, code.prompts_read, code.batched, code.ended) == ("code.jsonl", 1.0, 4, 4, True)
