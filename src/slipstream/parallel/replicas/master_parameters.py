"""The tensors that a rank's optimizer updates: parameters, float32 copies of them, or a replica's rows of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.replicas.buckets import (
    BUCKET_BYTES,
    NamedParameter,
    add_gradient,
    gather_rows,
    in_buckets,
    rows_of,
    take_rows,
)


class MasterParameters:
    """Every parameter's master, which the optimizer updates; after its step `publish` updates the parameters.

    Without sharding and another dtype the masters are the parameters. With a wider `dtype` they are copies, which keep
    updates that are too small for the parameters' dtype (Micikevicius et al. 2018, "Mixed Precision Training", section
    3.1). Sharded (ZeRO-1: Rajbhandari et al. 2020, "ZeRO", P_os), a replica's masters are its rows (dim 0) of each:
    views of the parameters, or copies where the dtype differs, so that the optimizer's state is spread over replicas
    too. A parameter of fewer rows than replicas has no master on some. Frozen parameters are always their own masters.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        data: RankGroup,
        shard: bool = False,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`parameters` are the rank's, each once; `data` its replicas; a collective exchanges about `bucket_bytes`.

        Raises SlipstreamError where `dtype` can't hold a parameter's values.
        """
        self._data, self._dtype, self.bucket_bytes = data, dtype, bucket_bytes
        self.is_sharded = shard and data.size > 1
        self._owner = (data.rank, data.size) if self.is_sharded else (0, 1)
        self._parameters = dict(parameters)
        self._trained = {name for name, parameter in parameters if parameter.requires_grad}
        made = {name: self._make(name, parameter) for name, parameter in parameters}
        self._masters = {name: master for name, master in made.items() if master is not None}
        trained = [named for named in parameters if named[1].requires_grad]
        self._buckets = in_buckets(trained, lambda parameter: parameter.dtype, bucket_bytes)

    def named_parameters(self) -> Iterator[NamedParameter]:
        """Yields what the optimizer updates, under the parameters' names and with their number of dimensions."""
        return iter(self._masters.items())

    def rows(self, name: str) -> range:
        """Returns the rows (dim 0; a scalar is one) of the rank's parameter that this replica updates."""
        return rows_of(self._parameters[name], *(self._owner if name in self._trained else (0, 1)))

    def is_spread(self, name: str) -> bool:
        """Returns whether each replica has different rows of it, as of parameters that aren't frozen."""
        return self.is_sharded and name in self._trained

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of the parameter's master, and so of its gradients."""
        return self._dtype or parameter.dtype

    def updates(self, name: str, parameter: nn.Parameter) -> bool:
        """Returns whether the optimizer updates this parameter itself."""
        return self._masters.get(name) is parameter

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of this replica's `rows` to the master's `.grad`; it takes the tensor over."""
        if name in self._masters:
            add_gradient(self._masters[name], gradient)

    def add_whole(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of all rows like `add`."""
        if self.is_sharded:
            gradient = take_rows(gradient, self.rows(name)).clone()  # a copy, so that the other rows' memory is freed
        self.add(name, gradient)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters to the parameters after an optimizer's step. Collective over the replicas when sharded."""
        if self.is_sharded:
            for bucket in self._buckets:
                for name, parameter in bucket:
                    if name in self._masters:
                        take_rows(parameter, self.rows(name)).copy_(self._masters[name])
                gather_rows([parameter for _, parameter in bucket], self._data)
        else:
            for name in self._trained:
                if not self.updates(name, self._parameters[name]):
                    self._parameters[name].copy_(self._masters[name])

    def check_trained(self) -> None:
        """Raises SlipstreamError where parameters were frozen or unfrozen since the masters were made."""
        for name, parameter in self._parameters.items():
            master = self._masters.get(name, parameter)
            is_made = self.is_sharded or self.dtype_of(parameter) != parameter.dtype
            if is_made and {parameter.requires_grad, master.requires_grad} != {name in self._trained}:
                raise SlipstreamError(
                    f"requires_grad of {name} was changed. With a sharded optimizer or masters of another dtype, "
                    "freeze parameters of the model before the Pipeline is made of it."
                )

    def _make(self, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        dtype = self.dtype_of(parameter)
        if not parameter.requires_grad or (dtype == parameter.dtype and not self.is_sharded):
            return parameter
        if torch.promote_types(parameter.dtype, dtype) != dtype:
            raise SlipstreamError(
                f"the masters' dtype {dtype} can't hold the values of {name}, which is {parameter.dtype}. "
                "Give torch.float32, or none: then the optimizer updates the parameters themselves."
            )
        rows = rows_of(parameter, *self._owner)
        # Its separate version counter lets a save that reads the master see changes: `publish` makes none, though it
        # writes to the parameter.
        return nn.Parameter(take_rows(parameter.data, rows).to(dtype)) if rows else None
