"""Between the protocol and the ledger's types. Everything that a peer sends is checked here, once.

In: protobuf messages, or their bytes where payloads are large. Out: prompts, samples and commands, and the reverse.
"""
