"""JSON logs on stderr, one object a line, with the ids that are bound around the call (run, step, sample, lease)."""

from __future__ import annotations

import logging
import sys

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger()


def configure_logging(service: str, level: str = "INFO") -> None:
    """Once at the start of a process; every line carries `service`."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(sort_keys=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
