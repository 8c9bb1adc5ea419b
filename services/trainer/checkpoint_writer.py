"""Writing a checkpoint without the other ranks' attention: files in a folder that all ranks see, no collectives.

Each rank writes its pieces, makes them durable and then leaves a note. Rank 0 waits for all notes, makes the manifest
of them and gives the folder its name. Nothing is durable before that rename, everything is after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from headrace.errors import DataLoss, DeadlineExceeded
from services.trainer.manifest import FileFacts, Manifest, crc32, sync
from services.trainer.piece import Piece, Place

_ASK_AGAIN_SECONDS = 0.02
_NOTES_SECONDS = 1800.0


def write_pieces(folder: Path, rank: int, pieces: Sequence[Piece]) -> None:
    """This rank's file and its note. A failure leaves a note too, for rank 0, and is raised."""
    name = f"rank-{rank:05d}.safetensors"
    try:
        save_file({piece.key: piece.values for piece in pieces}, str(folder / name))
        sync(folder / name)
        note: dict[str, Any] = {
            "name": name,
            "facts": asdict(FileFacts((folder / name).stat().st_size, crc32(folder / name))),
            "places": [asdict(Place.of(piece, name)) for piece in pieces],
        }
    except BaseException as error:
        _leave(folder, rank, {"failed": f"{type(error).__name__}: {error}"})
        raise
    _leave(folder, rank, note)


def gather(folder: Path, world_size: int, manifest: Callable[[dict[str, FileFacts], list[Place]], Manifest]) -> None:
    """On rank 0: waits for every rank's note, then writes the manifest. Raises DataLoss when a rank could not write."""
    deadline = time.monotonic() + _NOTES_SECONDS
    files: dict[str, FileFacts] = {}
    places: list[Place] = []
    for rank in range(world_size):
        note = _read(folder, rank, deadline)
        if "failed" in note:
            raise DataLoss(f"rank {rank} could not write its part of {folder}: {note['failed']}")
        files[note["name"]] = FileFacts(**note["facts"])
        places += [Place(**place) for place in note["places"]]
    manifest(files, places).write(folder)
    for rank in range(world_size):
        _note(folder, rank).unlink()


def _leave(folder: Path, rank: int, note: dict[str, Any]) -> None:
    draft = folder / f".rank-{rank:05d}.note"
    draft.write_text(json.dumps(note))
    draft.rename(_note(folder, rank))


def _read(folder: Path, rank: int, deadline: float) -> dict[str, Any]:
    path = _note(folder, rank)
    while not path.is_file():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"rank {rank} has not written its part of {folder} after {_NOTES_SECONDS:.0f} s")
        time.sleep(_ASK_AGAIN_SECONDS)
    note: dict[str, Any] = json.loads(path.read_text())
    return note


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.note"
