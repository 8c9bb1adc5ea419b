"""Callers and what they may call: roles, the table of RPCs, certificates and tokens."""
