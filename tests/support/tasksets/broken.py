"""A taskset whose scorer raises."""

import verifiers.v1 as vf


class BrokenTask(vf.Task[vf.TaskData]):
    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        raise ValueError("the scorer is broken")


class BrokenTaskset(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    def load(self):
        yield BrokenTask(vf.TaskData(prompt="2 + 2?"), self.config.task)


__all__ = ["BrokenTaskset"]
