"""The signals by which ranks are asked to end in order."""

from __future__ import annotations

import signal

FORWARDED = signal.SIGUSR1
"""srun passes it on to its tasks. A SIGTERM it takes for itself, and kills them."""

ENDING = (signal.SIGTERM, FORWARDED)
