"""The mathematics of training as pure functions on tensors: no model, no process group's state, no clock."""
