"""Keys and tokens are their user's alone, whatever the umask; certificates are everybody's."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.authority import issue_client, issue_service
from headrace.rpc.access import add_token
from headrace.rpc.roles import Role
from tests.support.modes import umask

SECRETS = {"ca-key.pem", "key.pem", "tokens.json"}


def test_a_umask_that_closes_nothing_leaves_secrets_closed_from_the_start(tmp_path: Path) -> None:
    with umask(0):
        issue_service(tmp_path, [], 1)
        issue_client(tmp_path, "bob", Role.VIEWER, 1)
        add_token(tmp_path / "tokens.json", "eve", Role.VIEWER)
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    secret = {path: mode for path, mode in modes.items() if path.name in SECRETS}
    assert len(secret) == 4
    assert set(secret.values()) == {0o600}
    assert {mode & 0o444 for path, mode in modes.items() if path not in secret} == {0o444}
