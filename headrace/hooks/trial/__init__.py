"""Tries a user's hook on sample data before a job starts, in a worker process: an engine stands in for the real one."""
