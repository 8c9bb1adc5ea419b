"""The first reward of the job, which turns out to be too simple."""


async def any_number(args, sample, **kwargs):
    """1 for a number, right or wrong."""
    return float(sample.response.strip().isdigit())
