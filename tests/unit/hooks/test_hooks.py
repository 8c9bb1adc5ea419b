"""User functions: found or refused with the way out; both faces of a sample."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError, InvalidArgument
from headrace.hooks import RewardForm, Sample, from_hook, hook_args, load_hook, reward_hook, to_hook
from headrace.hooks.args import default_args
from headrace.hooks.generate import run_generate, takes_group
from headrace.hooks.trial.check import check_hook, recognise
from headrace.hooks.trial.dry_run import dry_run
from headrace.job.schema.job import Job
from headrace.job.schema.run import ModelSection
from headrace.trajectory import PolicyRange

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
def not_a_number(args, sample): return float("nan")
def short(args, samples): return [1.0]
def three(a, b, c, d): pass

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
        ("{dir}/mine.py", r"neither path/file\.py:function nor package\.module\.function"),
        ("nope.mod.fn", r"there is no module nope: .*PYTHONPATH"),
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


def test_the_oldest_of_a_samples_versions_counts_for_all_of_its_response() -> None:
    mine = Sample(tokens=[1, 2, 3], response="r", response_length=2, rollout_log_probs=[-1.0, -2.0])
    mine.status, mine.weight_versions = Sample.Status.TRUNCATED, ["7", "5"]
    wire = from_hook(mine, sample_id="s", group_id="g", index=3)
    assert wire.policy_ranges == (PolicyRange(5, 0, 2),)
    assert to_hook(wire.unpack(wire.pack()), group_index=4).group_index == 4


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


async def tried(path: str, kind: str | None = None) -> str:
    """What `check hook` says of it, without a worker process."""
    kind, *_ = recognise(path, kind)
    return await dry_run(path, kind, default_args())


def test_check_tries_a_hook_in_a_worker(source: str) -> None:
    report = check_hook(f"{source}:generate")
    assert (report.failed, report.kind) == ([], "generate")
    assert str(report.version).startswith("sha256:")
    refused = check_hook(f"{source}:generate_all")
    assert refused.kind == "generate"
    assert "returned a sample that cannot be trained: status is still PENDING" in refused.failed[0]


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("reward_func", None, "scores 4 sample responses"),
        ("group_reward", "group_reward", "[0.0, 1.0, 2.0, 3.0]"),
        ("keeps_differing", "filter", "different and with equal rewards: kept, dropped (no reason given)"),
        ("newest", None, "chooses 2 of 3 groups for a batch of 2, and drops 0"),
        ("newest_of_step", None, "chooses 2 of 3 groups"),
        ("Sums", None, "gives 4 prompts when asked for 4"),
        ("all_seen", None, "takes the samples of two groups"),
        ("rolls_out", None, "returns 1 of 2 groups with their rewards: 2 samples, 2 response tokens"),
    ],
)
async def test_check_tells_what_a_hook_does(source: str, name: str, kind: str | None, told: str) -> None:
    assert told in await tried(f"{source}:{name}", kind)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("not_a_number", None, "returned nan; a reward is a finite number"),
        ("short", None, "returned 1 rewards for 4 samples"),
        ("keeps_maybe", "filter", "returned str; it must return a bool"),
        ("three", "filter", "cannot be called; accepted are:"),
        ("too_many", None, "samples; it must return a list of at most 8 samples"),
        ("rolls_nothing", None, "returned none of 2 groups"),
        ("rolls_more", None, "the trial has 2 groups"),
        ("Texts", None, "returned a list of ['str']; it must hold Samples"),
        ("Endless", None, "returned 5 groups for get_samples(4)"),
        ("Judge", "data_source", "has no get_samples(n)"),
        ("newest", "data_source", "is no class"),
    ],
)
async def test_check_finds_what_is_wrong_with_a_hook(source: str, name: str, kind: str | None, message: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        await tried(f"{source}:{name}", kind)
    assert message in refused.value.message


def test_a_hook_that_imports_slime_is_told_what_to_import_instead(tmp_path: Path) -> None:
    (tmp_path / "of_slime.py").write_text("from slime.utils.types import Sample\ndef f(args, sample): return 1.0\n")
    for path in (
        f"{tmp_path}/of_slime.py:f",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    ):
        with pytest.raises(ConfigError, match=r"headrace\.hooks\.filter\.check_reward_nonzero_std") as refused:
            load_hook(path)
        assert "`from headrace.hooks import Sample, DynamicFilterOutput" in refused.value.message
