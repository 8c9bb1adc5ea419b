"""Runs user code and fragile libraries in processes that can be killed."""

from headrace.process.workers.errors import WorkerBroken, WorkerCrashed, WorkerError, WorkerRaised, WorkerTimeout
from headrace.process.workers.pool import WorkerPool

__all__ = ["WorkerBroken", "WorkerCrashed", "WorkerError", "WorkerPool", "WorkerRaised", "WorkerTimeout"]
