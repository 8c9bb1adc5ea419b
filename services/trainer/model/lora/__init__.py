"""LoRA: adapters beside the frozen linear layers of a rank's stages.

In: the stages with their weights, and what adapters begin with. Out: parameters to train, and what a
weight becomes with them.
"""
