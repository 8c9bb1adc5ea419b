"""The reward of a sample: 1 for the right number and nothing else, 0 for all other responses."""


async def reward(args, sample, **kwargs):
    """`sample` has prompt, response, label, and metadata of its row. An exception fails the sample alone."""
    return float(sample.response.strip() == sample.label)
