"""Starts services without the C library's caches of small blocks, one a thread, that outlive a flood of calls.

A block in a cache is in use to glibc: after a flood each holds a page that could go back to the machine. Without them
no slower: samples are large, and Python has an allocator of its own for what is small.
"""

from __future__ import annotations

import os
from typing import Final

_VARIABLE: Final = "GLIBC_TUNABLES"
_NONE: Final = "glibc.malloc.tcache_count=0"


def without_thread_caches() -> dict[str, str]:
    """The variable to add to a service's environment; none where the caller has set it. Other C libraries ignore it."""
    return {} if _VARIABLE in os.environ else {_VARIABLE: _NONE}


def with_thread_caches() -> dict[str, str]:
    """The variable to add to what such a service starts and what is not its own: an engine has glibc's usual ones."""
    return {_VARIABLE: ""} if os.environ.get(_VARIABLE) == _NONE else {}
