"""Tiny random models of every family, with real tokenizers and chat templates."""
