"""Python's cyclic collector, kept away from a ledger's rows.

Loading makes a million objects that stay: the collector would walk them again and again while they are made, and later
stop the server at every full collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived() -> Iterator[None]:
    """Switches the cyclic collector off inside, and exempts all that exists at the end from it for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
