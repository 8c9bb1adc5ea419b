"""Parts of scorer `math`: how answers are found, read, and compared."""
