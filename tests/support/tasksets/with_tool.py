"""A taskset whose tasks bring a tool."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b


class ToolTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ToolTask(vf.Task[vf.TaskData, vf.State, ToolTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.tools)]

    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        return 1.0


class ToolConfig(vf.TasksetConfig):
    task: ToolTaskConfig = ToolTaskConfig()


class ToolTaskset(vf.Taskset[ToolTask, ToolConfig]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt=[vf.UserMessage(content="12 * 34?")]), self.config.task)


__all__ = ["ToolTaskset"]

if __name__ == "__main__":  # verifiers starts a tool server as `python -m` its module
    Calculator.run()
