"""The ledger's state machine: pure, without gRPC, clock, disk or threads.

In: one command of a producer, the trainer or an operator, and the time as a number. Out: the answer and a transaction.
`ledger` is the way in; `indexed_stream` has a stream's groups; commands change them through a `work`, `queues` hold
them in order.
"""
