"""What the product did before it was rebuilt, and the script that compares today's tree with it."""
