"""headrace: reinforcement-learning post-training of language models as four services."""

__version__ = "0.3.0.dev0"
