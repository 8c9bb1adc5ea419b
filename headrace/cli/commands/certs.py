"""`headrace certs FOLDER`: makes or renews the certificates that services and clients show each other."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.rpc.roles import OF_CLIENTS, Role, role_named
from headrace.rpc.tls import OPERATOR

_DAYS = 365
_MOST_DAYS = 3650


def certs(argv: Sequence[str]) -> int:
    """Makes an authority in the folder where there is none, then the services' and the operator's, or a client's."""
    try:
        from headrace.cli.authority import issue_client, issue_service
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'headrace[certs]'") from error

    args = _parser().parse_args(argv)
    if not 0 < args.days <= _MOST_DAYS:
        raise ConfigError(f"--days {args.days}: should be 1 to {_MOST_DAYS}")
    if args.client is None:
        if args.role:
            raise ConfigError("--role is of a client: name it with --client NAME")
        issued = issue_service(args.folder, args.hosts, args.days)
        operator = issue_client(args.folder, OPERATOR, Role.ADMIN, args.days).folder
        who, then = "the services", f"--tls-dir {args.folder}, and HEADRACE_TLS_DIR={operator} for commands"
    else:
        if args.hosts:
            raise ConfigError("--host is for the services' certificate: a client's has no host")
        issued = issue_client(args.folder, args.client, role_named(args.role) if args.role else None, args.days)
        who = f"client {args.client} ({args.role or 'without a role: it needs a token'})"
        then = f"HEADRACE_TLS_DIR={issued.folder} where that client runs"
    print(f"{issued.folder}: ca.pem, cert.pem and key.pem of {who}, until {_day(issued.ends)}")
    print(f"use them with {then}; {args.folder}/ca-key.pem signs for all of them: leave it here")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "headrace certs",
        description="Makes or renews certificates: of the services and of client operator, who is an admin; or with "
        "--client of a client. Services that run take renewed ones without a restart.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the authority's folder")
    parser.add_argument("--client", metavar="NAME", help="a client's certificate, in FOLDER/clients/NAME")
    parser.add_argument(
        "--role",
        help=f"what the client may call: {', '.join(OF_CLIENTS)} (docs/security.md); without one it needs a token",
    )
    parser.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address in the services' certificate, for clients that compare it (HTTP); repeatable",
    )
    parser.add_argument("--days", type=int, default=_DAYS, help=f"how long the certificate is valid (default: {_DAYS})")
    return parser


def _day(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC")
