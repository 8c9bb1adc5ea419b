"""The trainer service: Megatron-core ranks that train on the buffer's batches and publish weights to engines.

`loop` is the training loop and the file to read first. Rank 0 runs it and serves gRPC; every rank runs its commands.
In: batches of samples. Out: consumed and committed steps, weights, checkpoints and metrics.
"""
