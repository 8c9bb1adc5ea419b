"""Writes a Hugging Face folder again in another form: block FP8 for engines, or bfloat16."""
