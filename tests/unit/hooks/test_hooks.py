"""User functions: found or refused with the way out; both faces of a sample."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks import RewardForm, Sample, from_hook, hook_args, load_hook, reward_hook, to_hook
from headrace.hooks.generate import run_generate, takes_group
from headrace.hooks.trial.check import check_hook
from headrace.job.schema.job import Job
from headrace.job.schema.run import ModelSection
from headrace.trajectory import PolicyRange, Status

SOURCE = '''
from headrace.hooks import Sample

async def reward_func(args, sample, **kw):
    """Judges by length."""
    return {"length": float(len(sample.response)), "kept": args.rollout_temperature}

def group_reward(args, samples): return [float(i) for i, _ in enumerate(samples)]

class Judge:
    def __init__(self, model_path): self.model_path = model_path
    def compute_reward(self, prompts, responses): return [1.0 for _ in responses]

async def generate(args, sample, sampling_params, evaluation=False):
    sample.tokens = [1, 2, 3]
    sample.response, sample.response_length = "x", 1
    sample.rollout_log_probs = [-0.5]
    sample.status = Sample.Status.COMPLETED
    sample.metadata["evaluation"] = evaluation
    return [sample, sample]

async def generate_all(args, samples, evaluation=False): return samples

async def returns_none(args, samples, evaluation=False): pass
def nothing(args, sample): return None
def not_a_number(args, sample): return float("nan")
def text(args, sample): return "1.0"
def short(args, samples): return [1.0]
def three(a, b, c, d): pass
constant = 7

def keeps_differing(args, samples, **kwargs): return len({s.reward for s in samples}) > 1
def keeps_maybe(args, samples): return "yes"
def newest(args, buffer, num_samples): return [buffer.pop() for _ in range(num_samples)]
def newest_of_step(args, rollout_id, buffer, num_samples): return buffer[-num_samples:]
def too_many(args, buffer, num_samples): return buffer
class Sums:
    def __init__(self, args): self.next = 0
    def get_samples(self, n): return [[Sample(prompt=f"{i} + 1?", label=str(i + 1))] for i in range(n)]
    def save(self, number): raise AssertionError("a check saves nothing")
    def load(self, number): pass
def all_seen(args, all_samples, data_source):
    assert [len(group) for group in all_samples] == [4, 4]

def rolls_out(args, rollout_id, data_source, evaluation=False):
    first, second = data_source.get_samples(args.rollout_batch_size)
    data_source.add_samples([second])
    for sample in first:
        sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-0.5]
        sample.reward, sample.status = 1.0, sample.Status.COMPLETED
    return [first]

def rolls_nothing(args, rollout_id, data_source): return []
def rolls_more(args, rollout_id, data_source):
    return data_source.get_samples(2) + data_source.get_samples(1)

class Texts:
    def __init__(self, args): pass
    def get_samples(self, n): return ["text"] * n
class Endless:
    def __init__(self, args): pass
    def get_samples(self, n): return [Sample()] * (n + 1)
'''


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return str(file)


@pytest.fixture
def args():
    return hook_args(Job(model=ModelSection(hf_checkpoint=Path("model")), sglang={"log_level": "error"}))


def test_a_function_is_found_in_a_file_and_in_a_module(source: str) -> None:
    assert load_hook(f"{source}:reward_func").target.__name__ == "reward_func"
    assert load_hook("json.dumps").target(1) == "1"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{dir}/mien.py:f", r"no file .*/mien\.py; did you mean 'mine\.py'\?"),
        ("{dir}/mine.py:reward_fun", r"has no 'reward_fun'; did you mean 'reward_func'\?"),
        ("{dir}/mine.py:constant", r"constant is a int, not a function"),
        ("{dir}/mine.py", r"neither path/file\.py:function nor package\.module\.function"),
        ("nope.mod.fn", r"there is no module nope: .*PYTHONPATH"),
        ("json.dmups", r"json has no 'dmups'; did you mean 'dumps'\?"),
        ("{dir}/broken.py:f", r"loading it raised ZeroDivisionError: division by zero \(.*broken\.py:1\)"),
        ("{dir}/syntax.py:f", r"loading it raised SyntaxError.*syntax\.py:2\)"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_way_out(source: str, path: str, message: str) -> None:
    folder = Path(source).parent
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "syntax.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=message):
        load_hook(path.format(dir=folder))


def test_the_version_changes_with_the_file(tmp_path: Path) -> None:
    versions = set()
    for name, body in (("a", "return 1.0"), ("b", "return 2.0"), ("c", "return 1.0")):
        (tmp_path / f"{name}.py").write_text(f"def f(args, sample): {body}\n")
        versions.add(load_hook(f"{tmp_path}/{name}.py:f").version)
    assert len(versions) == 2


def test_the_forms_are_recognised(source: str) -> None:
    assert reward_hook(f"{source}:reward_func").form is RewardForm.SAMPLE
    assert reward_hook(f"{source}:reward_func").is_async
    assert reward_hook(f"{source}:reward_func").description == "Judges by length."
    assert reward_hook(f"{source}:group_reward", group_rm=True).form is RewardForm.GROUP
    assert reward_hook(f"{source}:Judge").form is RewardForm.BATCH
    assert takes_group(load_hook(f"{source}:generate_all"))
    assert not takes_group(load_hook(f"{source}:generate"))


def test_a_wrong_signature_shows_the_right_ones(source: str) -> None:
    with pytest.raises(ConfigError, match=r"three\(a, b, c, d\) cannot be called; accepted are:\n.*args, sample"):
        reward_hook(f"{source}:three")
    with pytest.raises(ConfigError, match="add --group-rm"):
        reward_hook(f"{source}:group_reward")
    with pytest.raises(ConfigError, match="leave --group-rm out"):
        reward_hook(f"{source}:reward_func", group_rm=True)


def test_args_hold_every_option_and_are_read_only(args) -> None:
    assert (args.rollout_temperature, args.hf_checkpoint, args.sglang_log_level) == (1.0, "model", "error")
    with pytest.raises(AttributeError, match="did you mean 'rollout_temperature'"):
        _ = args.rollout_temprature
    with pytest.raises(AttributeError, match="read-only"):
        args.seed = 1
    assert pickle.loads(pickle.dumps(args)).seed == args.seed


async def test_generate_hooks_run_in_both_forms(source: str, args) -> None:
    made = await run_generate(f"{source}:generate", args, [Sample(index=0)], {"temperature": 1.0}, True)
    assert [len(fan_out) for fan_out in made] == [2]
    assert made[0][0].metadata == {"evaluation": True}
    both = [Sample(index=0), Sample(index=1)]
    assert await run_generate(f"{source}:generate_all", args, both, {}, False) == [[both[0]], [both[1]]]
    with pytest.raises(InvalidArgument, match="returned NoneType; it must return Sample"):
        await run_generate(f"{source}:returns_none", args, both, {}, False)


def test_a_sample_survives_the_way_to_the_wire_and_back() -> None:
    mine = Sample(prompt="p", tokens=[1, 2, 3], response="r", response_length=2, rollout_log_probs=[-1.0, -2.0])
    mine.status, mine.weight_versions, mine.label = Sample.Status.TRUNCATED, ["7", "5"], "l"
    mine.teacher_log_probs = [-3.0, -4.0]
    wire = from_hook(mine, sample_id="s", group_id="g", index=3)
    assert wire.status is Status.TRUNCATED
    assert wire.loss_mask.tolist() == [1, 1]
    assert wire.policy_ranges == (PolicyRange(5, 0, 2),)
    back = to_hook(wire.unpack(wire.pack()), group_index=4)
    assert (back.tokens, back.loss_mask, back.rollout_log_probs) == ([1, 2, 3], [1, 1], [-1.0, -2.0])
    assert (back.teacher_log_probs, back.label, back.status, back.index) == ([-3.0, -4.0], "l", mine.status, 3)
    mine.remove_sample = True
    assert not np.any(from_hook(mine, sample_id="s", group_id="g", index=0).loss_mask)
    mine.status, mine.failure_reason = Sample.Status.FAILED, "tool down"
    assert from_hook(mine, sample_id="s", group_id="g", index=0).failure.message == "tool down"


def test_missing_log_probs_are_refused_not_invented() -> None:
    mine = Sample(tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)
    with pytest.raises(InvalidArgument, match=r"rollout_log_probs is None for 1 response tokens.*return_logprob"):
        from_hook(mine, sample_id="s", group_id="g", index=0)


def test_the_engines_answer_is_taken_over(args) -> None:
    mine = Sample()
    info = {"weight_version": "3", "finish_reason": {"type": "length"}, "prompt_tokens": 8, "cached_tokens": 4}
    mine.update_from_meta_info(args, info)
    assert (mine.status, mine.weight_versions) == (Sample.Status.TRUNCATED, ["3"])
    assert mine.prefix_cache_info.prefix_cache_hit_rate == 0.5
    drafts = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 8, "spec_verify_ct": 4, "completion_tokens": 10}
    mine.update_from_meta_info(args, info | drafts)
    mine.update_from_meta_info(args, info | {"spec_accept_token_num": 1, "spec_draft_token_num": 4})
    assert mine.spec_info == Sample.SpecInfo(7, 12, 4, 10)
    assert mine.spec_info.spec_accept_length == 2.5
    assert Sample.from_dict(mine.to_dict()) == mine


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("reward_func", "reward"),
        ("group_reward", "group_reward"),
        ("generate", "generate"),
    ],
)
def test_check_recognises_and_tries_a_hook(source: str, name: str, kind: str) -> None:
    report = check_hook(f"{source}:{name}", kind)
    assert report.ok, report.failed
    assert report.kind == kind
    assert report.version.startswith("sha256:")


def test_a_generate_function_that_makes_nothing_is_recognised_and_refused(source: str) -> None:
    report = check_hook(f"{source}:generate_all")
    assert report.kind == "generate"
    assert "returned a sample that cannot be trained: status is still PENDING" in report.failed[0]


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("keeps_differing", "filter", "different and with equal rewards: kept, dropped (no reason given)"),
        ("newest", None, "chooses 2 of 3 groups for a batch of 2, and drops 0"),
        ("newest_of_step", None, "chooses 2 of 3 groups"),
        ("Sums", None, "gives 4 prompts when asked for 4"),
        ("all_seen", None, "takes the samples of two groups"),
        ("rolls_out", None, "returns 1 of 2 groups with their rewards: 2 samples, 2 response tokens"),
    ],
)
def test_check_tries_the_ledgers_hooks(source: str, name: str, kind: str | None, told: str) -> None:
    report = check_hook(f"{source}:{name}", kind)
    assert report.ok, report.failed
    assert told in report.passed[1]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("keeps_maybe", "filter", "returned str; it must return a bool"),
        ("three", "filter", "cannot be called; accepted are:"),
        ("too_many", None, "samples; it must return a list of at most 8 samples"),
        ("three", "buffer_filter", "returned NoneType; it must return a list"),
        ("rolls_nothing", None, "returned none of 2 groups"),
        ("rolls_more", None, "the trial has 2 groups"),
        ("Texts", None, "returned a list of ['str']; it must hold Samples"),
        ("Endless", None, "returned 5 groups for get_samples(4)"),
        ("Judge", "data_source", "has no get_samples(n)"),
        ("newest", "data_source", "is no class"),
    ],
)
def test_check_finds_what_is_wrong_with_the_ledgers_hooks(
    source: str, name: str, kind: str | None, message: str
) -> None:
    report = check_hook(f"{source}:{name}", kind)
    assert not report.ok
    assert message in report.failed[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "returned None; a reward is a finite number"),
        ("not_a_number", "returned nan"),
        ("text", "returned '1.0'"),
        ("short", "returned 1 rewards for 4 samples"),
    ],
)
def test_check_finds_wrong_returns(source: str, name: str, message: str) -> None:
    report = check_hook(f"{source}:{name}")
    assert not report.ok
    assert message in report.failed[0]


@pytest.mark.parametrize("line", ["import slime", "from slime.utils.types import Sample"])
def test_a_hook_that_imports_slime_is_told_what_to_import_instead(tmp_path: Path, line: str) -> None:
    (tmp_path / "of_slime.py").write_text(f"{line}\ndef f(args, sample): return 1.0\n")
    with pytest.raises(ConfigError) as refused:
        load_hook(f"{tmp_path}/of_slime.py:f")
    assert "No module named 'slime" in refused.value.message
    assert "`from headrace.hooks import Sample, DynamicFilterOutput" in refused.value.message


def test_a_hook_of_slimes_own_is_told_what_is_here_in_its_place() -> None:
    with pytest.raises(ConfigError, match=r"headrace\.hooks\.filter\.check_reward_nonzero_std"):
        load_hook("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std")


def test_what_slimes_hint_names_is_there() -> None:
    from headrace.hooks import DynamicFilterOutput, Sample
    from headrace.hooks.filter import check_reward_nonzero_std

    assert all(map(callable, (Sample, DynamicFilterOutput, check_reward_nonzero_std)))
