"""User code and fragile libraries, run in processes that can be killed."""

from headrace.workers.errors import WorkerCrashed, WorkerError, WorkerRaised, WorkerTimeout
from headrace.workers.pool import WorkerPool

__all__ = ["WorkerCrashed", "WorkerError", "WorkerPool", "WorkerRaised", "WorkerTimeout"]
