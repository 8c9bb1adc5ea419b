"""Clients of a run whose services are restarted: each goes on until it is told to end, and no call of it may fail."""
