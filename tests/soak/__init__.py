"""A job for hours, and whether any of its processes grows: `make soak`."""
