"""Two rewards for one job: a first one that turns out to be too simple, and one that asks another team's scorer."""

from headrace.client.reward import RewardClient
from headrace.score import ScoreError, ScoreItem

SCORER = "127.0.0.1:7010"


async def any_number(args, sample, **kwargs):
    """1 for a number, right or wrong."""
    return float(sample.response.strip().isdigit())


async def of_scorer(args, sample, **kwargs):
    """The score of the service at SCORER. Its error fails the sample."""
    item = ScoreItem(item_id="1", prompt=sample.prompt, response=sample.response, label=sample.label)
    async with RewardClient(SCORER) as client:
        (result,) = await client.score([item], deadline_seconds=10)
    if isinstance(result, ScoreError):
        raise RuntimeError(result.message)
    return result.value
