"""What `headrace init` writes: a folder for each template, copied as it is, and its data."""
