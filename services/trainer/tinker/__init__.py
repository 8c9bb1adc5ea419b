"""Tinker's API in front of the trainer: models of LoRA that share one base, trained by HTTP clients."""
