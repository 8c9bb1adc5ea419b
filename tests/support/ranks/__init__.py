"""Trainer ranks for tests: how they are started, what each does, and how their results are compared."""
