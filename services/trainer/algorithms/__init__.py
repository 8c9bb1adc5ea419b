"""The mathematics of training: pure functions on tensors and on light facts, float32, one formula a file."""
