"""Tasks of the package `reasoning_gym`, which makes and scores them."""

import reasoning_gym
import verifiers.v1 as vf


class ReasoningData(vf.TaskData):
    entry: dict


class ReasoningTask(vf.Task[ReasoningData]):
    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace) -> float:
        entry = self.data.entry
        scorer = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        return float(scorer(trace.last_reply.strip(), entry))


class ReasoningConfig(vf.TasksetConfig):
    dataset: str = "chain_sum"
    num_tasks: int = 40


class ReasoningTaskset(vf.Taskset[ReasoningTask, ReasoningConfig]):
    def load(self):
        for entry in reasoning_gym.create_dataset(self.config.dataset, size=self.config.num_tasks, seed=1):
            yield ReasoningTask(ReasoningData(prompt=entry["question"], entry=dict(entry)), self.config.task)


__all__ = ["ReasoningTaskset"]
