"""Search-R1: the policy asks in <search>, the environment appends what a local index finds, the policy answers."""

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

from headrace.hooks.kit import generate_single

PASSAGES = Path(__file__).with_name("passages.jsonl")


def words(text):
    return re.findall(r"\w+", text.lower())


class Index:
    """Passages, ranked by the words that they share with a query: rare words count more (TF-IDF)."""

    def __init__(self, passages):
        self.passages = passages
        self.bags = [Counter(words(passage)) for passage in passages]
        found_in = Counter(word for bag in self.bags for word in bag)
        self.weight = {word: math.log(1 + len(passages) / number) for word, number in found_in.items()}

    def best(self, query):
        scores = [sum(self.weight[word] for word in set(words(query)) if word in bag) for bag in self.bags]
        return self.passages[scores.index(max(scores))] if max(scores) else "nothing"


@cache
def index():
    return Index([json.loads(line)["text"] for line in PASSAGES.read_text().splitlines()])


async def generate(args, sample, sampling_params, evaluation=False):
    """Found text goes into the context and is not trained. At most --max-turns responses."""
    text, found = sample.prompt, []
    for _ in range(args.max_turns):
        sample.response = await generate_single(text, sampling_params={"stop": ["</search>", "</answer>"]})
        query = re.search(r"<search>(.*?)</search>", sample.response)
        if query is None:
            break
        found.append(index().best(query[1]))
        text += f"{sample.response}\n<found>{found[-1]}</found>\n"
    sample.metadata["found"] = found
    return sample


async def reward(args, sample, **kwargs):
    """1 for the right answer; without it 0.2 for a search that found it, and 0.1 for one that found something else."""
    answer = re.search(r"<answer>(.*?)</answer>", sample.response)
    if answer and answer[1].strip() == sample.label:
        return 1.0
    found = sample.metadata.get("found", [])
    return 0.2 if any(sample.label in passage for passage in found) else 0.1 if found else 0.0
