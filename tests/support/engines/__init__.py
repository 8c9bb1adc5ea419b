"""What engines, real and fake ones, are held to, and what a fake one answers."""
