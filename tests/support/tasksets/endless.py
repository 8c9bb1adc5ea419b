"""A taskset without an end."""

import itertools

import verifiers.v1 as vf


class EndlessTask(vf.Task[vf.TaskData]):
    pass


class EndlessTaskset(vf.Taskset[EndlessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield EndlessTask(vf.TaskData(prompt=f"{number} + 1?"), self.config.task)


__all__ = ["EndlessTaskset"]
