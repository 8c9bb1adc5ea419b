"""Limits of messages, and checks of them, that both ends of a call share."""
