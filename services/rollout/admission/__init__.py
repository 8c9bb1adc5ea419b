"""Limits what is asked of the engines at once: shares of training, evaluations and clients, and the limit of groups.

Comes in: who wants to ask, and what engines say about their load. Goes out: who may ask now.
"""
