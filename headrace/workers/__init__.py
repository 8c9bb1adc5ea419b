"""User code and fragile libraries, run in processes that can be killed."""

from headrace.workers.errors import WorkerBroken, WorkerCrashed, WorkerError, WorkerRaised, WorkerTimeout
from headrace.workers.pool import WorkerPool

__all__ = ["WorkerBroken", "WorkerCrashed", "WorkerError", "WorkerPool", "WorkerRaised", "WorkerTimeout"]
