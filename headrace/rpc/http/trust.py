"""Has programs that know nothing of headrace trust the run's authority: agents, whose URL is https.

OpenSSL, httpx, aiohttp and requests read the authorities that they trust from files that variables name.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.rpc.tls import TlsFolder

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def trust_authority(folder: TlsFolder) -> None:
    """Makes processes that this one starts from now on trust it, besides the authorities that they trusted before."""
    trusted = [path.read_bytes() for path in (*_trusted_before(), folder.authority)]
    descriptor, name = tempfile.mkstemp(prefix="headrace-trusted-", suffix=".pem")
    with os.fdopen(descriptor, "wb") as out:
        out.write(b"\n".join(trusted))
    atexit.register(_delete, name)
    os.environ.update(dict.fromkeys(VARIABLES, name))


def _trusted_before() -> Sequence[Path]:
    """The files that the environment names, else certifi's, which httpx and requests use, else the system's."""
    if named := dict.fromkeys(os.environ[each] for each in VARIABLES if os.environ.get(each)):
        return [Path(each) for each in named]
    certifi = importlib.util.find_spec("certifi")
    if certifi is not None and certifi.origin is not None:
        return [Path(certifi.origin).with_name("cacert.pem")]
    system = ssl.get_default_verify_paths().cafile
    return [Path(system)] if system else []


def _delete(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)
