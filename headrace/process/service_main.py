"""The body of a service's `__main__`: an expected error becomes one line to a person and one of `exit_status`.

Any other exception is a defect: it ends the process with its traceback and exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pydantic import ValidationError

from headrace.errors import HeadraceError
from headrace.process.exit_status import NOT_WORTH_RESTARTING, exit_code
from headrace.rpc.log import log


def run_service(
    name: str,
    body: Callable[[], None],
    *,
    peers_errors: tuple[type[HeadraceError], ...] = (),
    alone: bool = False,
    ended: Callable[[int, str], None] = lambda code, message: None,
) -> int:
    """Runs the body. Returns 0 when it returns; otherwise the exit code, after one line to a person that says why.

    `peers_errors` mean that another service is away. `alone`: a person started it; otherwise a launcher reads its log,
    and an event NAME_failed with the reason and the error comes before that line. `ended` is told the exit code and
    the message.
    """
    try:
        body()
    except (HeadraceError, ValidationError, OSError) as error:
        code, message = exit_code(error, peers_errors), str(error)
        if not alone:
            log.error(f"{name}_failed", reason=_reason(error, code), error=message)
        print(f"{'headrace ' if alone else ''}{name}: {message}", file=sys.stderr)  # noqa: T201  # one line to a person
        ended(code, message)
        return code
    return 0


def _reason(error: Exception, code: int) -> str:
    if isinstance(error, HeadraceError):
        return error.reason
    return "CONFIG_ERROR" if code == NOT_WORTH_RESTARTING else type(error).__name__
