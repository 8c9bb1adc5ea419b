"""A taskset of the package `verifiers`: additions, each behind two that are solved."""

import random

import verifiers.v1 as vf

SHOWN = ((2, 5), (8, 4))


class AdditionData(vf.TaskData):
    answer: str


class AdditionTask(vf.Task[AdditionData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class AdditionConfig(vf.TasksetConfig):
    num_tasks: int = 400
    largest: int = 9


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self):
        draw = random.Random(1)
        for number in range(self.config.num_tasks):
            a, b = draw.randint(0, self.config.largest), draw.randint(0, self.config.largest)
            messages = []
            for first, second in SHOWN:
                messages.append({"role": "user", "content": f"{first} + {second} ="})
                messages.append({"role": "assistant", "content": str(first + second)})
            messages.append({"role": "user", "content": f"{a} + {b} ="})
            yield AdditionTask(
                AdditionData(name=f"addition-{number}", prompt=messages, answer=str(a + b)), self.config.task
            )


__all__ = ["AdditionTaskset"]
