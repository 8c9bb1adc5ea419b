"""A package in the place of Transformer Engine, with its signatures and in plain torch, for Megatron-core's wrappers.

It must come first on PYTHONPATH, in a process of its own. No kernel, no FP8, no attention.
"""

from types import SimpleNamespace

from transformer_engine import pytorch

__all__ = ["common", "pytorch"]
__version__ = "1.12.0"
common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {})))
