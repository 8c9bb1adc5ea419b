"""A taskset that carries its data as a file beside it, with two rewards of different weights."""

import json
from pathlib import Path

import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=0.75)
    async def backwards(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.word[::-1])

    @vf.reward(weight=0.25)
    async def letters(self, trace: vf.Trace) -> float:
        return len(set(trace.last_reply) & set(self.data.word)) / len(set(self.data.word))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for line in Path(__file__).with_suffix(".jsonl").read_text().splitlines():
            word = json.loads(line)["word"]
            yield WordTask(WordData(prompt=f"Write {word} backwards.", word=word), self.config.task)


__all__ = ["WordTaskset"]
