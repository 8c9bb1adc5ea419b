"""SGLang's class for the checkpoint that is served, found without importing its models of all other architectures.

SGLang imports this from its registry of models. An architecture that is not found here it looks for among all of them.
"""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.rollout.engine.cpu.models import CHECKPOINT
from services.rollout.engine.cpu.without_kernels import use_torch

_PACKAGE = "sglang.srt.models"
_ENTRIES = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


def served_models(checkpoint: Path) -> list[Any]:
    """The classes of the checkpoint's architectures; empty where SGLang has none by that name."""
    config = checkpoint / "config.json"
    names = json.loads(config.read_text()).get("architectures") or [] if config.is_file() else []
    return [found for name in names if (found := _model(name)) is not None]


def _model(name: str) -> Any:
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations or [] if spec else []
    for file in sorted(file for folder in folders for file in Path(folder).glob("*.py")):
        entries = _ENTRIES.search(file.read_text())
        if entries and re.search(rf"\b{re.escape(name)}\b", entries[1]):
            return getattr(import_module(f"{_PACKAGE}.{file.stem}"), name)
    return None


EntryClass = served_models(Path(os.environ.get(CHECKPOINT, "")))
if EntryClass:
    use_torch()
