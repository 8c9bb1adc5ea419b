"""`headrace certs` and `headrace tokens`: how services and callers show who they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from headrace.cli.arg_types import PATH, Group, json_option, print_json
from headrace.errors import ConfigError
from headrace.rpc.access import OF_CLIENTS, Role, add_token, revoke_token, role_named, tokens_in
from headrace.rpc.tls import OPERATOR

_DAYS = 365
_MOST_DAYS = 3650


@click.command()
@click.argument("folder", type=PATH)
@click.option("--client", metavar="NAME", help="A client's certificate, in FOLDER/clients/NAME.")
@click.option(
    "--role",
    help=f"What the client may call: {', '.join(OF_CLIENTS)} (docs/security.md); without one it needs a token.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="A name or address in the services' certificate, for clients that compare it (HTTP); repeatable.",
)
@click.option("--days", type=int, default=_DAYS, show_default=True, help="How long the certificate is valid.")
def certs(folder: Path, client: str | None, role: str | None, hosts: Sequence[str], days: int) -> int:
    """Makes or renews certificates: of the services and of client operator, who is an admin; or with --client of one.

    FOLDER is the authority's; it is made where there is none. Services that run take renewed certificates without a
    restart.
    """
    try:
        from headrace.cli.authority import issue_client, issue_service
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'headrace[certs]'") from error

    if not 0 < days <= _MOST_DAYS:
        raise ConfigError(f"--days {days}: should be 1 to {_MOST_DAYS}")
    if client is None:
        if role:
            raise ConfigError("--role is of a client: name it with --client NAME")
        issued = issue_service(folder, hosts, days)
        operator = issue_client(folder, OPERATOR, Role.ADMIN, days).folder
        who, then = "the services", f"--tls-dir {folder}, and HEADRACE_TLS_DIR={operator} for commands"
    else:
        if hosts:
            raise ConfigError("--host is for the services' certificate: a client's has no host")
        issued = issue_client(folder, client, role_named(role) if role else None, days)
        who = f"client {client} ({role or 'without a role: it needs a token'})"
        then = f"HEADRACE_TLS_DIR={issued.folder} where that client runs"
    print(f"{issued.folder}: ca.pem, cert.pem and key.pem of {who}, until {issued.ends:%Y-%m-%d %H:%M UTC}")
    print(f"use them with {then}; {folder}/ca-key.pem signs for all of them: leave it here")
    return 0


@click.group(cls=Group)
def tokens() -> None:
    """The tokens with which callers show their role, in a job's --tokens-file: it has their digests only.

    Services that run take a change within a second.
    """


@tokens.command()
@click.argument("file", type=PATH)
@click.argument("name")
@click.option("--role", required=True, help=f"{', '.join(Role)} (docs/security.md)")
def add(file: Path, name: str, role: str) -> int:
    """Prints a new token, which is kept nowhere. NAME says in the services' logs whose it is."""
    print(add_token(file, name, role_named(role)))
    return 0


@tokens.command("list")
@click.argument("file", type=PATH)
@json_option
def list_tokens(file: Path, as_json: bool) -> int:
    """Lists the tokens by name and role."""
    listed = tokens_in(file)
    if as_json:
        print_json([{"name": name, "role": entry.role, "added": entry.added} for name, entry in listed.items()])
        return 0
    for name, entry in listed.items():
        print(f"{name}  {entry.role}  since {entry.added}")
    return 0


@tokens.command()
@click.argument("file", type=PATH)
@click.argument("name")
def revoke(file: Path, name: str) -> int:
    """Takes a token out of the file."""
    revoke_token(file, name)
    print(f"{name} is revoked: services that run refuse it within a second; calls that are open go on")
    return 0
