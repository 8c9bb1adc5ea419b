"""The pinned sets: parts of cpu.txt for services without torch, and hash-checked ones for CUDA."""

from __future__ import annotations

import pytest

from tools.requirements import FOLDER, PARTS, needed, part, pins


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_all_that_the_service_needs_in_the_versions_of_cpu_txt(name: str) -> None:
    assert (FOLDER / f"{name}.txt").read_text() == part(name)
    assert {"grpcio", "protobuf", "pydantic"} <= set(needed(PARTS[name])) <= pins().keys()


@pytest.mark.parametrize("name", PARTS)
def test_buffer_and_reward_are_installed_without_torch(name: str) -> None:
    assert not {"torch", "sglang", "megatron-core", "transformers"} & set(needed(PARTS[name]))
