"""Starts, watches and ends the services of a run. Knows processes, and nothing of reinforcement learning."""
