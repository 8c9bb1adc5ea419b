"""User functions: how they are found, what they see, and how they are tried before a job starts.

The services' hooks run in worker processes (`headrace.process.workers`): `await pool.run(run_generate, path, args, …)`;
the trainer's run in its ranks, which hold the tensors that they see.
"""

from headrace.hooks.agent import as_role
from headrace.hooks.args import HookArgs, hook_args, section_args
from headrace.hooks.convert import from_hook, to_hook
from headrace.hooks.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from headrace.hooks.filter import DynamicFilterOutput
from headrace.hooks.generate import run_generate
from headrace.hooks.load import Hook, load_hook
from headrace.hooks.reward import NoReward, Reward, RewardForm, RewardHook, prepare_reward, reward_hook, run_reward
from headrace.hooks.sample import Sample
from headrace.hooks.slime_state import GenerateState, get, get_model_url, post

__all__ = [
    "DynamicFilterOutput",
    "GenerateState",
    "Hook",
    "HookArgs",
    "NoReward",
    "Reward",
    "RewardForm",
    "RewardHook",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "Sample",
    "as_role",
    "from_hook",
    "get",
    "get_model_url",
    "hook_args",
    "load_hook",
    "post",
    "prepare_reward",
    "reward_hook",
    "run_generate",
    "run_reward",
    "section_args",
    "to_hook",
]
