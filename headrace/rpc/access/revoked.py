"""Certificates that no longer count, although the authority vouches for them: a file beside the authority's own.

It has client names and times. A certificate is refused when it is valid from its name's time on, or from an earlier
one: that is every certificate of the name which was made until the name was revoked, also those that nobody kept a copy
of. A certificate that is made afterwards is valid from a later time, and is good.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from headrace.disk import WatchedFile, atomic_write, file_lock
from headrace.errors import ConfigError
from headrace.rpc.access.caller import Peer
from headrace.rpc.access.certificate import valid_from
from headrace.rpc.log import log

FILE = "revoked.json"
_MAX_FILE_BYTES = 1 << 20
_Names = Mapping[Annotated[str, Field(min_length=1, max_length=64)], AwareDatetime]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    revoked: _Names


class Revoked:
    """A TLS folder's revoked clients as they are now: neither a change nor the first one needs a restart.

    While the file is damaged, or gone after it was there, those that were read last are refused, and the log says so.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a file that is there and cannot be used."""
        self._file = WatchedFile(folder / FILE, read)
        self._last: _Names = {}
        self._told = ""

    def includes(self, peer: Peer) -> bool:
        """True when the certificate that a connection shows is revoked. `peer` is gRPC's auth context."""
        known = self._known()
        names = (name.decode(errors="replace") for name in peer.get("x509_common_name", ()))
        until = max((known[name] for name in names if name in known), default=None)
        return until is not None and any(valid_from(pem) <= until for pem in peer.get("x509_pem_cert", ()))

    def _known(self) -> _Names:
        problem = ""
        try:
            found = self._file.content()
            if found is not None:
                self._last = found
            elif self._last:
                problem = f"{self._file.path} is gone: put it back, so that it counts after a restart, too"
        except ConfigError as error:
            problem = error.message
        if problem and problem != self._told:
            log.warning("revoked_not_read", error=problem)
        self._told = problem
        return self._last


def read(path: Path) -> _Names | None:
    """Returns the entries by client name; None where there is no file. Raises ConfigError for a malformed one."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES} bytes: make an authority in a new folder")
        return _File.model_validate_json(path.read_bytes()).revoked
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: let the service's user read it", field="tls_dir") from error
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])[:160]
        raise ConfigError(
            f"{path} is not one that `headrace certs --revoke` wrote: {where or 'it'} is wrong: mend it, or copy it "
            "from the authority's folder",
            field="tls_dir",
        ) from None


def add(folder: Path, name: str, until: datetime.datetime) -> None:
    """Refuses certificates of that name that are valid from `until` or earlier. Raises ConfigError for a bad file."""
    with file_lock(folder / FILE):
        names = read(folder / FILE) or {}
        names = {**names, name: max(until, names.get(name, until))}
        with atomic_write(folder / FILE) as draft:
            draft.write_text(_File(revoked=names).model_dump_json(indent=2) + "\n")
