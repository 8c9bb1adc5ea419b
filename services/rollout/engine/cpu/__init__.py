"""The model that the engine serves, one of SGLang's own: SGLang is told that it is a plugin's package of models."""

CHECKPOINT = "HEADRACE_ENGINE_CHECKPOINT"
"""The environment variable with the checkpoint's folder, for `served`."""
