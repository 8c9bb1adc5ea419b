"""The rollout service: SGLang engines, the production of samples, and the receiving half of a weight publication.

In: leased prompts, rewards, weights, and requests for text. Out: groups of samples with the versions of their tokens.
"""
