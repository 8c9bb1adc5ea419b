"""What sections of a job are made of: values that have a shape of their own."""
