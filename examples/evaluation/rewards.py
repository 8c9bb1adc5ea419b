"""How the two data sets are scored."""


async def same(args, sample, **kwargs):
    return float(sample.response.strip() == sample.label)


async def begins(args, sample, **kwargs):
    """1 if the response begins with the right word: the model may go on."""
    return float(sample.response.strip().lower().startswith(sample.label))
