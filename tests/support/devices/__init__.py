"""Devices that trainer and engines share, for tests: a counter of memory, and what reports to it."""
