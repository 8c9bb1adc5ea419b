"""Rules of the files and folders that a job names: they exist, and hold what they should."""
