"""A word game: the policy guesses, the environment marks the letters, until the word is found or the turns are over."""

from headrace.hooks.kit import generate_single

WORDS = (
    "bat",
    "bear",
    "cat",
    "cow",
    "crab",
    "deer",
    "dog",
    "fox",
    "goat",
    "hen",
    "horse",
    "lion",
    "mouse",
    "owl",
    "pig",
    "swan",
)


def marks(guess, secret):
    """`guess` with the letters that are in their place: "cow" for "cat" is "c--"."""
    return "".join(letter if secret[i : i + 1] == letter else "-" for i, letter in enumerate(guess))


async def generate(args, sample, sampling_params, evaluation=False):
    """Ends at the right guess, at anything that is no word of the game, or after --max-turns guesses."""
    text, guesses = sample.prompt, []
    for _ in range(args.max_turns):
        sample.response = await generate_single(text, sampling_params={"stop": ["\n"]})
        guesses.append(sample.response.strip())
        if guesses[-1] == sample.label or guesses[-1] not in WORDS or not sample.response.endswith("\n"):
            break
        text += f"{sample.response}Marks: {marks(guesses[-1], sample.label)}\nGuess:"
    sample.metadata["guesses"] = guesses
    return sample


async def reward(args, sample, **kwargs):
    """1 for the word at once and 0.1 less for each further guess; 0.05 for each new word of the game if it was lost."""
    guesses = sample.metadata.get("guesses", [])
    if sample.label in guesses:
        return 1.0 - 0.1 * (len(guesses) - 1)
    return 0.05 * len(set(guesses) & set(WORDS))
