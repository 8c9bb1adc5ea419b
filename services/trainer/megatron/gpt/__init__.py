"""Model families as Megatron-core modules, with attention and norms for layers without Transformer Engine.

In: an architecture. Out: this rank's part of a GPTModel, which answers with hidden states.
"""
