"""Containers of the four services, started as deploy/compose.yaml says."""
