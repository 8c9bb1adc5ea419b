"""Checks a run before it starts: each service's own check, run side by side in separate processes."""
