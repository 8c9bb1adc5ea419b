"""The arguments of every service's process that say where it listens, and how callers are met there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.rpc.access.tokens import Tokens
from headrace.rpc.tls import VARIABLE, TlsFolder, use_tls


@dataclass(frozen=True, slots=True)
class Listen:
    """Addresses are `host:port`. `insecure`: without `tls`, too, they may be ones that other machines reach.

    With `tls` or `tokens` callers have roles.
    """

    address: str
    metrics_address: str | None = None
    insecure: bool = False
    tls: TlsFolder | None = None
    tokens: Tokens | None = None


def add_listen_arguments(parser: argparse.ArgumentParser, *, address: str | None = None) -> None:
    """`address` is where the service listens when the argument is absent."""
    parser.add_argument("--address", default=address, required=address is None, help="host:port to listen on")
    parser.add_argument("--metrics-address", help="host:port of Prometheus' /metrics")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(VARIABLE),
        help=f"folder of ca.pem, cert.pem and key.pem (default: ${VARIABLE})",
    )
    parser.add_argument("--tokens-file", type=Path, help="tokens of callers, and their roles (`headrace tokens`)")
    parser.add_argument("--insecure", action="store_true", help="listen where other machines can reach, unencrypted")


def listen_of(given: Mapping[str, Any]) -> Listen:
    """The parsed arguments. This process's own calls use the same certificate from now on.

    Raises ConfigError for a tokens file that cannot be used.
    """
    folder = use_tls(given["tls_dir"])
    tokens = Tokens(given["tokens_file"]) if given["tokens_file"] else None
    return Listen(given["address"], given["metrics_address"], given["insecure"], folder, tokens)
