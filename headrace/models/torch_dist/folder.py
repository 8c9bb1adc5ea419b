"""Finds the folder of an iteration, and refuses one that is incomplete or of another format."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

from headrace.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
METADATA, COMMON, CONFIG = ".metadata", "common.pt", "metadata.json"
RELEASE = "release"
FORMAT = "torch_dist"
_MAX_TEXT_BYTES = 1 << 16
_ITERATION = re.compile(r"iter_\d{7,}")


def is_torch_dist(folder: Path) -> bool:
    """True for a folder that Megatron wrote, whole or not, or for the folder of one of its iterations."""
    names = (folder / TRACKER, folder / CONFIG, folder / METADATA)
    return any(path.exists() for path in names) or any(_ITERATION.fullmatch(path.name) for path in _inside(folder))


def iteration_folder(folder: Path) -> Path:
    """The iteration that the folder's tracker names, or the folder itself. Raises ConfigError unless it is complete."""
    chosen = folder if (folder / CONFIG).exists() or (folder / METADATA).exists() else folder / _latest(folder)
    missing = [name for name in (CONFIG, METADATA, COMMON) if not _is_file(chosen / name)]
    if missing:
        raise ConfigError(
            f"{chosen} has no {', no '.join(missing)}: Megatron writes them last, so the checkpoint is not whole: "
            "copy it again, or name the folder of another iteration"
        )
    _require_format(chosen / CONFIG)
    return chosen


def _latest(folder: Path) -> str:
    path = folder / TRACKER
    if not _is_file(path):
        there = ", ".join(sorted(each.name for each in _inside(folder) if _ITERATION.fullmatch(each.name))[:5])
        raise ConfigError(
            f"{folder} has no {TRACKER}"
            + (
                f" but {there}: name one of these folders"
                if there
                else ": write it, with the number of the iteration or the word release"
            )
        )
    text = path.read_bytes()[:_MAX_TEXT_BYTES].decode(errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{path} says {text[:50]!r}: it has to be the number of an iteration, or {RELEASE}")
    return f"iter_{int(text):07d}"


def _require_format(path: Path) -> None:
    try:
        found = json.loads(path.read_bytes()[:_MAX_TEXT_BYTES])
        backend = found["sharded_backend"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is no checkpoint's {CONFIG}: {str(error)[:100]}: copy it again") from error
    if backend != FORMAT:
        raise ConfigError(
            f"{path} says sharded_backend {str(backend)[:50]!r}, and headrace reads {FORMAT}: convert it with Megatron "
            f"(--ckpt-format {FORMAT})"
        )


def _is_file(path: Path) -> bool:
    return path.exists() and stat.S_ISREG(path.stat().st_mode)


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
