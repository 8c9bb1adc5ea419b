"""What both ends of a call agree on: limits of what a message may hold, and the checks that hold them."""
