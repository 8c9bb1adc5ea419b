"""Translates between the protocol and the ledger's types, and checks everything that a peer sends, once.

In: protobuf messages, or their bytes where payloads are large. Out: prompts, samples and commands, and the reverse.
"""
