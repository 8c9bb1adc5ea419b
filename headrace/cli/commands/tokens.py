"""`headrace tokens add | list | revoke FILE`: the tokens with which callers show their role."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.rpc.access import add_token, revoke_token, tokens_in
from headrace.rpc.roles import Role, role_named


def tokens(argv: Sequence[str]) -> int:
    """Services that run take a change within a second. A new token is printed, and kept nowhere."""
    args = _parser().parse_args(argv)
    if args.action == "list":
        for name, entry in tokens_in(args.file).items():
            print(f"{name}  {entry.role}  since {entry.added}")
        return 0
    if args.name is None:
        raise ConfigError(f"headrace tokens {args.action} {args.file} needs the NAME of a token")
    if args.action == "revoke":
        revoke_token(args.file, args.name)
        print(f"{args.name} is revoked: services that run refuse it within a second; calls that are open go on")
        return 0
    if args.role is None:
        raise ConfigError(f"headrace tokens add {args.file} {args.name} needs a --role: one of {', '.join(Role)}")
    print(add_token(args.file, args.name, role_named(args.role)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "headrace tokens",
        description="Tokens of a job's --tokens-file. It has their digests only: `add` prints the token, once.",
    )
    parser.add_argument("action", choices=("add", "list", "revoke"))
    parser.add_argument("file", type=Path, metavar="FILE", help="the tokens file")
    parser.add_argument("name", nargs="?", metavar="NAME", help="whose token it is, for the services' logs")
    parser.add_argument("--role", help=f"of a new token: {', '.join(Role)} (docs/security.md)")
    return parser
