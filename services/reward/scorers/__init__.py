"""The scorers that come with headrace, one a file. Each is a plain function of an item, run in a worker process."""
