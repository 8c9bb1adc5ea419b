"""The files of Tinker's models: checkpoints with names, adapters of samplers, and states that a restart begins with.

checkpoints/MODEL/weights/NAME/           state.safetensors: matrices and Adam's state
checkpoints/MODEL/sampler_weights/NAME/   the adapter as peft has it
states/MODEL/SEQ.safetensors              the model after its request SEQ
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headrace.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound
from services.trainer.durable import make_folder, remove
from services.trainer.tinker.work import LoraSpec, TinkerPath

_ABOUT = "checkpoint.json"


class About(msgspec.Struct, frozen=True):
    path: str
    request_id: str
    """The request that made it"""
    session: str
    spec: LoraSpec
    created: float
    is_kept: bool
    """False: it ends with its session."""
    expires: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)


class Checkpoints:
    """Folders below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root / "checkpoints"
        self._states = root / "states"

    def folder(self, path: TinkerPath) -> Path:
        return self._root / path.model_id / path.kind / path.name

    def room(self, path: TinkerPath, *, overwrite: bool) -> Path:
        """The folder for a new checkpoint. Raises AlreadyExists."""
        folder = self.folder(path)
        if folder.exists():
            if not overwrite and (folder / _ABOUT).exists():
                raise AlreadyExists(f"{path} exists: choose another name, or pass overwrite")
            remove(folder)
        make_folder(folder.parent if path.kind == "sampler_weights" else folder)
        return folder

    def describe(self, path: TinkerPath, about: About) -> None:
        draft = self.folder(path) / f".{_ABOUT}"
        draft.write_bytes(msgspec.json.encode(about))
        draft.rename(self.folder(path) / _ABOUT)

    def is_made_by(self, path: TinkerPath, request_id: str) -> bool:
        return (self.folder(path) / _ABOUT).exists() and self.about(path).request_id == request_id

    def about(self, path: TinkerPath) -> About:
        """Raises NotFound, and DataLoss for what cannot be read."""
        file = self.folder(path) / _ABOUT
        try:
            return msgspec.json.decode(file.read_bytes(), type=About)
        except FileNotFoundError:
            raise NotFound(f"there is no checkpoint {path}") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise DataLoss(f"{file} cannot be read: {error}") from error

    def trained(self, path: TinkerPath) -> tuple[LoraSpec, Path]:
        """What a model is made of. Raises NotFound, and InvalidArgument for an adapter of a sampler."""
        if path.kind != "weights":
            raise InvalidArgument(f"{path} is for sampling: name one of save_state", field="path")
        return self.about(path).spec, self.folder(path) / "state.safetensors"

    def adapter(self, path: TinkerPath) -> Path:
        """What a sampler is given. Raises NotFound, and InvalidArgument for a checkpoint with Adam's state."""
        if path.kind != "sampler_weights":
            raise InvalidArgument(f"{path} is for training: name one of save_weights_for_sampler", field="model_path")
        self.about(path)
        return self.folder(path)

    def state(self, model_id: str, seq: int) -> Path:
        """The file of a model after its request `seq`."""
        make_folder(self._states / model_id)
        return self._states / model_id / f"{seq}.safetensors"

    def remove_states(self, model_id: str, but: int | None = None) -> None:
        for file in (self._states / model_id).glob("*.safetensors"):
            if file.stem != str(but):
                file.unlink(missing_ok=True)

    def of_model(self, model_id: str) -> list[About]:
        return [each for each in self.all() if TinkerPath.parse(each.path).model_id == model_id]

    def all(self) -> list[About]:
        """Those that have names, the oldest first."""
        return sorted((each for each in self._abouts() if each.is_kept), key=lambda each: each.created)

    def remove(self, path: TinkerPath) -> None:
        """Raises NotFound."""
        self.about(path)
        remove(self.folder(path))

    def remove_expired(self) -> None:
        now = time.time()
        for each in list(self._abouts()):
            if each.expires is not None and each.expires < now:
                remove(self.folder(TinkerPath.parse(each.path)))

    def end_session(self, session: str) -> None:
        """Removes what only the session can use."""
        for folder in self._states.glob(f"{session}:*"):
            remove(folder)
        paths = [TinkerPath.parse(each.path) for each in self._abouts() if each.session == session and not each.is_kept]
        for path in paths:
            remove(self.folder(path))

    def _abouts(self) -> Iterator[About]:
        for file in self._root.glob(f"*/*/*/{_ABOUT}"):
            yield msgspec.json.decode(file.read_bytes(), type=About)
