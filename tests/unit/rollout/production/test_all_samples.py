"""A user's function is shown all samples of a step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.support.rollout_functions import GROUPS, SAMPLES, SYNC, WRITES, producing

SHOWS = """
import json

def shown(args, all_samples, data_source):
    with open("{folder}/shown.jsonl", "a") as file:
        file.write(json.dumps([[s.reward for s in group] for group in all_samples]) + chr(10))
    raise KeyError("it costs no sample")

def keep(args, samples, **kwargs):
    return samples[0].reward > 0
"""


async def test_rollout_all_samples_process_path_sees_the_groups_of_a_step_and_those_that_were_dropped(
    tmp_path: Path,
) -> None:
    code = (
        WRITES
        + SHOWS.replace("{folder}", str(tmp_path))
        + SYNC.replace(WRITES, "").replace(
            "written(group) for", "written(group, 0.0 if 'prompt 0' in group[0].prompt else 1.0) for"
        )
    )
    hook = f"{tmp_path / 'hook.py'}"
    paths: dict[str, Any] = {
        "rollout_all_samples_process_path": f"{hook}:shown",
        "dynamic_sampling_filter_path": f"{hook}:keep",
    }
    async with producing(tmp_path, code, **paths) as made:
        assert len(await made.batch()) == GROUPS * SAMPLES
        async with asyncio.timeout(60):
            while not (tmp_path / "shown.jsonl").exists():  # another process writes it
                await asyncio.sleep(0.02)
            while not (text := (tmp_path / "shown.jsonl").read_text()).endswith("\n"):
                await asyncio.sleep(0.02)
    (groups,) = map(json.loads, text.splitlines())
    assert sorted(groups) == [[0.0, 0.0], *[[1.0, 1.0]] * GROUPS]
