"""A taskset with an environment of its own: a number is found over several turns."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        won = False
        async with agents.player.interaction(task) as interaction:
            turn = await interaction.turn()
            while not turn.terminated and turn.last_reply.strip().isdigit():
                guess = int(turn.last_reply)
                if won := guess == task.data.number:
                    break
                turn = await interaction.turn("higher" if guess < task.data.number else "lower")
        interaction.trace.record_reward("won", float(won), 1.0)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        shown = (("Find a number from 1 to 9.", "5"), ("higher", "8"))
        for number in range(1, 10):
            messages = [
                {"role": role, "content": text}
                for pair in shown
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            messages.append({"role": "user", "content": "right. Find a number from 1 to 9."})
            yield GuessTask(GuessData(prompt=messages, number=number), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
