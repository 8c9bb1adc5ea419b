"""What the benches compare with: programs that headrace has no part in."""
