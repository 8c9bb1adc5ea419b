"""Runs inside an engine's process: SGLang's server, started as this project needs it."""
