"""What each command does to a stream's groups, by who gives it: producers, the trainer, operators.

In: the arguments of a command and the books that it may change. Out: an answer, and the changes as one transaction.
"""
