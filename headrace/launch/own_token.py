"""The token with which services of a run without certificates show each other that they are its services."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.schema.services import ServicesSection
from headrace.rpc.access import Tokens
from headrace.rpc.client import token_of
from headrace.rpc.roles import Role


def require_services_token(services: ServicesSection) -> None:
    """Raises ConfigError for a tokens file that cannot be used.

    And where services without certificates would start without a token: they could not call each other.
    """
    if services.tokens_file is None:
        return
    tokens = Tokens(services.tokens_file)
    if services.tls_dir is not None:
        return
    own = token_of()
    caller = tokens.caller_of(own()) if own else None
    if caller is None or caller.roles != (Role.SERVICE,):
        raise ConfigError(
            f"tokens_file {services.tokens_file}: without tls_dir the services call each other with a token, and "
            f"{f'{caller.name} has the role {caller.role}' if caller else 'the environment has none of the file'}: "
            f"`headrace tokens add {services.tokens_file} services --role service` prints one; write it to a file, and "
            "start with HEADRACE_TOKEN_FILE=that file",
            field="tokens_file",
        )
