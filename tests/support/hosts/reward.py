"""A reward that differs among the samples of a group, so that there is something to learn."""

from __future__ import annotations

import random
from typing import Any

from headrace.trajectory import Sample


async def judge(args: Any, sample: Sample, **kwargs: Any) -> float:
    return random.random()
