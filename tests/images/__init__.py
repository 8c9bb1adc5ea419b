"""The images of deploy/Containerfile, built and run as containers."""
