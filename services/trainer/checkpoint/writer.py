"""Writes a rank's part of a checkpoint: a file that is durable before rank 0 hears of it, and a note for the manifest.

Nothing here is a collective. The ranks' notes reach rank 0 by `agreement`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from services.trainer.checkpoint.manifest import FileFacts, crc32
from services.trainer.checkpoint.shard_chunk import Place, ShardChunk
from services.trainer.files.agreement import write_tensors
from services.trainer.files.durable import sync


def write_chunks(folder: Path, rank: int, chunks: Sequence[ShardChunk]) -> str:
    """This rank's file is on the disk when it returns; the answer is its note for the manifest."""
    path = folder / f"rank-{rank:05d}.safetensors"
    write_tensors(path, {chunk.key: chunk.values for chunk in chunks})
    sync(path)
    facts = FileFacts(path.stat().st_size, crc32(path))
    places = [asdict(Place.of(chunk, path.name)) for chunk in chunks]
    return json.dumps({"name": path.name, "facts": asdict(facts), "places": places})


def read_notes(notes: Sequence[str]) -> tuple[dict[str, FileFacts], list[Place]]:
    """Every rank's file, and where every chunk is."""
    found = [json.loads(note) for note in notes]
    files = {note["name"]: FileFacts(**note["facts"]) for note in found}
    return files, [Place(**place) for note in found for place in note["places"]]
