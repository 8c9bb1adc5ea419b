"""Limits of what one peer may have of a server at once: calls, bytes, connections."""
