"""A reward as a user writes it: 0.3 for a bare integer, 0.7 more when the last integer is right."""

from __future__ import annotations

import re
from typing import Any


async def bare_and_right(args: Any, sample: Any, **kwargs: Any) -> float:
    """The form is learned first, and gives the model a foothold for the sum."""
    response = sample.response.strip()
    integers = re.findall(r"-?\d+", response)
    bare = re.fullmatch(r"-?\d+", response) is not None
    right = bool(integers) and integers[-1] == sample.label
    return 0.3 * bare + 0.7 * right
