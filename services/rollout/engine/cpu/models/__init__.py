"""What SGLang is told is a plugin's package of models: SGLang's own one that the engine serves."""

CHECKPOINT = "HEADRACE_ENGINE_CHECKPOINT"
"""The environment variable with the checkpoint's folder, for `served`."""
