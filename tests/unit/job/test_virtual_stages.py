"""How many virtual stages a pipeline rank gets, and which cuts of the layers are refused."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import virtual_stages
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from tests.support.models.tiny_families import make_tiny


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    return read_architecture(make_tiny(tmp_path_factory.mktemp("model"), "llama", num_layers=8))


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ({}, 1),
        ({"virtual_pipeline_model_parallel_size": 1}, 1),
        ({"virtual_pipeline_model_parallel_size": 4}, 4),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 2),
        ({"num_layers_per_virtual_pipeline_stage": 4}, 1),
        ({"virtual_pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}, 2),
    ],
)
def test_a_rank_has_as_many_as_the_job_says(eight_layers: Architecture, flags: dict[str, int], stages: int) -> None:
    assert virtual_stages(eight_layers, MegatronArgs(pipeline_model_parallel_size=2, **flags)) == stages


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 3}, r"3 x .* does not divide num_layers 8: choose a divisor of 4"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
            r"set the same thing: give only one",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2},
            r"with num_layers_in_last_pipeline_stage: .* pass --num-virtual-stages-per-pipeline-rank",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
            r"2 virtual stages on one pipeline rank have no effect: pass --pipeline-model-parallel-size 2 or more",
        ),
    ],
)
def test_a_wrong_cut_is_refused(eight_layers: Architecture, flags: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        virtual_stages(eight_layers, MegatronArgs(**{"pipeline_model_parallel_size": 2, **flags}))
