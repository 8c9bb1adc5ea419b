"""Names of options that Megatron-core, SGLang and slime have, and what headrace does with them: names.toml's tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))

MEGATRON: Mapping[str, Any] = _TABLE["megatron"]
SGLANG: Mapping[str, Any] = _TABLE["sglang"]
SLIME: Mapping[str, Any] = _TABLE["slime"]

EARLIER: Mapping[str, Any] = _TABLE["earlier"]


def reason_of_each(names_by_reason: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: reason for reason, names in names_by_reason.items() for name in names}


PLACED_BY_US: Mapping[str, tuple[Any, str]] = {
    name: (default, each["why"])
    for each in SGLANG["placed_by_us"]
    for name, default in (each.get("defaults", {}) | dict.fromkeys(each.get("without_default", ()))).items()
}
"""SGLang's arguments that would give an engine other processes or GPUs than it is placed on: (default, why not)."""
