"""A release's data, job and clients with today's services, and today's with the release's."""
