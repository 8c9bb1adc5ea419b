"""The ledger's commands, by who gives them: producers, the trainer, operators.

In: the arguments of a command and the streams that it may change. Out: an answer, and the changes as one transaction.
"""
