"""Environments of other projects: their tasks as rows, and their games played against a session's URL."""
