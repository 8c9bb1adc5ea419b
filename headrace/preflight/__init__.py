"""What can be known of a run before it starts: each service's own check, run side by side in processes of their own."""
