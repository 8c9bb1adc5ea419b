"""The receiving half of weight publication."""
