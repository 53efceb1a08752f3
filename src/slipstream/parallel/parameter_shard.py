"""The part of one parameter that a rank's optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from slipstream.parallel.parameter_share import ParameterShare


@dataclass(frozen=True)
class ParameterShard:
    """The rows of one parameter that this rank's optimizer updates: rows of its share, from `first_row` on."""

    name: str
    parameter: nn.Parameter
    share: ParameterShare
    first_row: int
    leads: bool  # of all ranks that hold these very rows, one does

    @property
    def is_whole(self) -> bool:
        """Whether they are all of the parameter."""
        return self.share.is_whole and tuple(self.parameter.shape) == self.share.shape

    @property
    def begins(self) -> bool:
        """Whether they have the parameter's first element."""
        return self.first_row == 0 and self.share.ranges[0][0] == 0
