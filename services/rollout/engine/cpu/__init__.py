"""What engines on a CPU need beside SGLang."""
