"""One rank's share of the policy, and of the models beside it: reference, critic, teacher, old policies.

In: the micro-batches of a step. Out: log-probs, gradients, optimizer steps, and the tensors to publish or save.
"""
