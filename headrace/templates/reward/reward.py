"""Called for each sample: prompt, response, label, metadata. Its own reward service runs it."""


async def reward(args, sample, **kwargs):
    """1 for the label. 0.1 for any other number."""
    answer = sample.response.strip()
    if answer == sample.label:
        return 1.0
    return 0.1 if answer.lstrip("-").isdigit() else 0.0
