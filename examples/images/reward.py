"""1 for the right color, 0.2 for another color."""

COLORS = ("red", "green", "blue")


async def reward(args, sample, **kwargs):
    word = sample.response.strip().lower().rstrip(".")
    return 1.0 if word == sample.label else 0.2 if word in COLORS else 0.0
