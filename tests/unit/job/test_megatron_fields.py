"""The committed table of Megatron-core's fields against the version that is installed here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from headrace.job.megatron import (
    ARCHITECTURAL,
    GPU_ONLY,
    ONLY_IN,
    RESERVED,
    VERSIONS,
    MegatronArgs,
    MegatronFields,
)
from tools.megatron_fields import Row, both, rows

COMMITTED = Path(__file__).parents[3] / "headrace" / "job" / "megatron_fields.json"


@pytest.fixture(scope="module")
def installed() -> dict[str, Row]:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return rows(_version(), Path(spec.submodule_search_locations[0]))


def test_the_table_has_exactly_the_fields_of_the_installed_version(installed: dict[str, Row]) -> None:
    committed = {name for name in MegatronFields.model_fields if _version() in ONLY_IN.get(name, VERSIONS)}
    assert committed == installed.keys()


def test_the_table_takes_what_the_installed_version_takes(installed: dict[str, Row]) -> None:
    fields = json.loads(COMMITTED.read_text())["fields"]
    for name, row in installed.items():
        committed = fields[name]["type"]
        if row.type is None:
            assert name in RESERVED, f"{name} is an object, and not refused"
        else:
            assert both(committed, row.type) == committed, name


def test_every_field_that_headrace_treats_by_name_is_one() -> None:
    assert ARCHITECTURAL | GPU_ONLY | RESERVED.keys() <= MegatronArgs.model_fields.keys()
    assert not ARCHITECTURAL & RESERVED.keys()


def _version() -> str:
    return ".".join(importlib.metadata.version("megatron-core").split(".")[:2])
