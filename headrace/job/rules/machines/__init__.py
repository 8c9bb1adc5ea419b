"""Rules of the machines of a job: how many, what devices they have, and who uses them."""
