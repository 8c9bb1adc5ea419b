"""The pinned sets: parts of cpu.txt for services without torch, and hash-checked ones for CUDA."""

from __future__ import annotations

import re

import pytest

from tools.requirements import CUDA, FOLDER, PARTS, needed, part, pins

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(\[[a-z,_-]+\])?==(\S+)( ; [^\\]+)? \\$")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_all_that_the_service_needs_in_the_versions_of_cpu_txt(name: str) -> None:
    assert (FOLDER / f"{name}.txt").read_text() == part(name)
    assert {"grpcio", "protobuf", "pydantic"} <= set(needed(PARTS[name])) <= pins().keys()


@pytest.mark.parametrize("name", PARTS)
def test_buffer_and_reward_are_installed_without_torch(name: str) -> None:
    assert not {"torch", "sglang", "megatron-core", "transformers"} & set(needed(PARTS[name]))


@pytest.mark.parametrize("name", CUDA)
def test_every_package_of_a_cuda_set_is_pinned_with_hashes(name: str) -> None:
    text = (FOLDER / f"cuda-{name}.txt").read_text()
    stanzas = re.split(r"\n(?=\S)", text.strip())
    for stanza in stanzas:
        first, *hashes = stanza.splitlines()
        assert _PINNED.match(first), first
        assert hashes, first
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), first
    assert len(stanzas) > 60
    assert "://" not in text


def test_each_cuda_set_has_what_only_its_service_needs() -> None:
    found = {
        name: {
            match[1]: match[3]
            for line in (FOLDER / f"cuda-{name}.txt").read_text().splitlines()
            if (match := _PINNED.match(line))
        }
        for name in CUDA
    }
    assert found["rollout"]["sglang"] == "0.5.23"
    assert "megatron-core" not in found["rollout"]
    assert "megatron-core" in found["trainer"]
    assert "sglang" not in found["trainer"]
    assert found["rollout"]["transformers"] == found["trainer"]["transformers"]
