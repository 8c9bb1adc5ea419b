"""`headrace …`: what a person types."""
