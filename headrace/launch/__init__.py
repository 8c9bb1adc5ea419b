"""Starts, watches and ends the services of a run. In: a job. Out: processes. It knows no reinforcement learning."""
