"""Agents that speak OpenAI's protocol: the endpoint, what a session records, and the samples that come of it."""
