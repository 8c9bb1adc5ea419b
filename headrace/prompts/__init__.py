"""Rows of prompt files. In: a line, a value. Out: content and label as every reader has them."""
