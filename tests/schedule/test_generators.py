"""Generators: the pictures beside them, and PyTorch's own orders at one slice."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from slipstream.cost import UnitCost
from slipstream.schedule import GENERATORS, Schedule, ScheduleError, gpipe, one_f_one_b, validate
from slipstream.simulator import simulate


def picture(function: Callable[..., Any]) -> str:
    """The lines of the docstring that begin with `rank`."""
    lines = [line for line in inspect.getdoc(function).splitlines() if line.startswith("    rank ")]
    return textwrap.dedent("\n".join(lines))


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_the_docstrings_picture_is_the_timeline(generator: Callable[..., Schedule]) -> None:
    assert picture(generator) == simulate(generator(2, 2, 2), UnitCost(backward=1)).to_text()


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_every_schedule_is_valid(generator: Callable[..., Schedule]) -> None:
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 5):
            for num_slices in range(1, 5):
                validate(generator(num_stages, num_microbatches, num_slices))


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, -2)])
def test_counts_below_one_are_refused(generator: Callable[..., Schedule], counts: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match=r"needs at least 1 of (stages|microbatches|slices), not (0|-2)"):
        generator(*counts)


class RecordingStage:
    """Stands in for a PipelineStage and writes down what the schedule has it compute."""

    def __init__(self, stage: int) -> None:
        self.stage_index, self.has_backward, self.order = stage, True, []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.order.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.order.append(f"{self.stage_index}B{microbatch}")

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def torch_order(schedule_class: type, stage: int, num_stages: int, num_microbatches: int) -> list[str]:
    """The compute actions that PyTorch's schedule really runs on one rank, without models and processes."""

    class Recorded(schedule_class):
        def __init__(self) -> None:
            self._stage, self._num_stages, self._n_microbatches = (
                RecordingStage(stage),
                num_stages,
                num_microbatches,
            )
            self.scale_grads = False

        def _check_inputs(self, *args: Any) -> Any:
            return [()] * num_microbatches, [{}] * num_microbatches

        def _nothing(self, *args: Any) -> None:
            pass

        _initialize_stage = _maybe_compute_loss = _maybe_get_loss = _update_losses = _nothing

    recorded = Recorded()
    recorded._step_microbatches()
    return recorded._stage.order


@pytest.mark.parametrize(("generator", "oracle"), [(gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)])
def test_one_slice_is_pytorchs_schedule(generator: Callable[..., Schedule], oracle: type) -> None:
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 9):
            schedule = generator(num_stages, num_microbatches)
            for stage, row in enumerate(schedule.actions):
                expected = torch_order(oracle, stage, num_stages, num_microbatches)
                assert [schedule.text(action) for action in row] == expected
