"""Nim: two players take one or two in turn, and who takes the last one wins. The policy is both players."""

import random

from openai import AsyncOpenAI

from headrace.hooks import as_role

PLAYERS = ("first", "second")


async def run(args, task, base_url):
    """Plays one game. Each player is a role: its moves are trained on its own reward.

    In an evaluation `second` draws its moves, so the reward says how often the policy wins.
    """
    text, left, player = task.prompt, int(task.label), 0
    draw = random.Random(f"{task.label}/{task.index}")
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        urls = [as_role(base_url, name) for name in PLAYERS]
        while left > 0:
            if task.evaluation and player == 1:
                said = f" {draw.randint(1, min(2, left))}"
            else:
                asked = client.with_options(base_url=urls[player])
                made = await asked.completions.create(model="policy", prompt=text, stop=["\n"])
                said = made.choices[0].text
            if said not in (" 1", " 2") or int(said) > left:
                return rewards(task, loser=player, is_legal=False)
            left -= int(said)
            text, player = f"{text}{said}\n{left}:", 1 - player
    return rewards(task, loser=player, is_legal=True)


def rewards(task, loser, is_legal):
    """1 for a win and 0.3 for a lost game; 0 for a wrong move, and 0.5 for the other player, who did not earn it."""
    won, lost = (1.0, 0.3) if is_legal else (0.5, 0.0)
    if task.evaluation:
        return {"first": float(loser == 1 and is_legal)}
    return {PLAYERS[loser]: lost, PLAYERS[1 - loser]: won}
