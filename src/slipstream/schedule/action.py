"""The actions, as data: an Action is one operation of one stage on one slice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, NamedTuple

from slipstream.errors import SlipstreamError


class ScheduleError(SlipstreamError):
    """An error in a schedule or its text; the message names the action and the rule that it breaks."""


NUMBER = "(0|[1-9][0-9]*)"  # a regular expression


class _Table(type):
    """Lets the class of operations be iterated over, as enumerations are."""

    def __iter__(cls) -> Iterator[Op]:
        return iter(OPS)

    def __len__(cls) -> int:
        return len(OPS)


class Op(str, metaclass=_Table):
    """The operation of an action. The letters are PyTorch's; zero-bubble papers call B, I and W: BW, B and W.

    There is one object of each, also after pickling. `add_operation` adds further ones to the table.
    """

    __slots__ = ()

    F: ClassVar[Op]
    B: ClassVar[Op]  # whole backward
    I: ClassVar[Op]  # noqa: E741  gradient of the input only
    W: ClassVar[Op]  # gradient of the weights, after I
    R: ClassVar[Op]  # recomputation of the tensors that F did not keep
    SEND_F: ClassVar[Op]  # this stage's output, to the next stage
    RECV_F: ClassVar[Op]  # this stage's input, from the stage before
    SEND_B: ClassVar[Op]  # the gradient of this stage's input, to the stage before
    RECV_B: ClassVar[Op]  # the gradient of this stage's output, from the next stage
    SEND_E: ClassVar[Op]  # this rank's part of the first stage's input, to that stage, or its gradient from there
    RECV_E: ClassVar[Op]
    OFFLOAD: ClassVar[Op]
    RELOAD: ClassVar[Op]
    REDUCE_GRAD: ClassVar[Op]
    V: ClassVar[Op]  # this rank's rows of the head: logits, their softmax, and its part of the head's input gradient
    L: ClassVar[Op]  # the loss and the head's whole input gradient, from the V's of all ranks
    VW: ClassVar[Op]  # the weight gradient of this rank's rows of the head, after L
    E: ClassVar[Op]  # this rank's rows of an embedding that is tied to the head: their part of the first stage's input
    EW: ClassVar[Op]  # their gradient, after the first stage's backward

    def __new__(cls, name: str) -> Op:
        """Returns the operation of a name; raises ValueError where there is none."""
        for op in OPS:
            if op == name:
                return op
        raise ValueError(f"{name!r} is no operation; there are {', '.join(OPS)}")

    @property
    def value(self) -> str:
        """The name, as plain text."""
        return str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Lets records that are read from files have operations, by their names."""
        from pydantic_core.core_schema import no_info_after_validator_function, str_schema

        return no_info_after_validator_function(cls, str_schema())


# By these numbers, arrays name ops.
OPS: list[Op] = []
NUMBERS: dict[Op, int] = {}


def named_operation(name: str) -> Op:
    """Returns an operation of this name, which is new or known."""
    if name not in NUMBERS:
        op = str.__new__(Op, name)
        setattr(Op, name, op)
        NUMBERS[op] = len(OPS)
        OPS.append(op)
    return Op(name)


@cache
def _action_text(ops: tuple[Op, ...]) -> re.Pattern[str]:
    """Returns the form of an action's text, with these operations."""
    names = "|".join(sorted(ops, key=len, reverse=True))
    return re.compile(rf"{NUMBER}({names})(?:{NUMBER}(?:\.{NUMBER})?(?:>{NUMBER})?)?")


for _name in Op.__annotations__:
    named_operation(_name)

BACKWARDS = frozenset({Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_E})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_E})
COMMUNICATION = SENDS | RECEIVES
_PAST = frozenset({Op.SEND_E, Op.RECV_E})  # messages past neighbours, always
VOCABULARY = frozenset({Op.V, Op.L, Op.VW, Op.E, Op.EW})

# SEND_F of stage g and RECV_F of stage g+1 are two ends of one message; gradients travel the other way.
_OTHER_END = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
    # These are always between stages that are named.
    Op.SEND_E: (Op.RECV_E, 0),
    Op.RECV_E: (Op.SEND_E, 0),
}


class Action(NamedTuple):
    """One op of one stage on one slice of one microbatch; REDUCE_GRAD concerns the whole stage.

    It is a tuple because planning makes and looks up millions of them.

    Args:
        op: its operation.
        stage: the one that it is of.
        microbatch: of that stage.
        slice: of the microbatch.
        peer: the stage at the other end of a message past neighbours: of a skip, or between the rows of a spread
            vocabulary and the model's ends. -1 for all other actions.
    """

    op: Op
    stage: int
    microbatch: int = 0
    slice: int = 0
    peer: int = -1

    def __str__(self) -> str:
        """Returns `2F0.3` for stage 2, forward, microbatch 0, slice 3; `2REDUCE_GRAD` for a reduction."""
        if self.op is Op.REDUCE_GRAD:
            return f"{self.stage}{self.op}"
        return f"{self.stage}{self.op}{self.microbatch}.{self.slice}" + (f">{self.peer}" if self.peer >= 0 else "")

    def text(self, num_slices: int) -> str:
        """Returns the text form in a schedule of `num_slices` slices: with one slice, `2F0` instead of `2F0.0`."""
        if num_slices > 1:
            return str(self)
        return f"{str(self._replace(peer=-1)).removesuffix('.0')}" + (f">{self.peer}" if self.peer >= 0 else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads either text form; `2F0` is `2F0.0`. Anything before or after the action raises ScheduleError."""
        match = _action_text(tuple(OPS)).fullmatch(text)
        if match is None or (match[2] == Op.REDUCE_GRAD) != (match[3] is None):
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, op, microbatch and slice, as in 2F0.3 "
                "(2F0 with one slice per microbatch, 2REDUCE_GRAD for a stage, 2SEND_F0.3>4 for a message to stage 4). "
                f"Ops: {', '.join(Op)}."
            )
        stage, op, microbatch, index, peer = match.groups()
        action = cls(Op(op), int(stage), int(microbatch or 0), int(index or 0), -1 if peer is None else int(peer))
        if action.op in _PAST if peer is None else action.op not in COMMUNICATION:
            raise ScheduleError(
                f"{text!r} is not an action: a stage is named at the end, as in 2RECV_E0.3>1, of messages."
            )
        return action

    def with_op(self, op: Op) -> Action:
        """Returns another op of the same slice."""
        return Action(op, self.stage, self.microbatch, self.slice)

    @property
    def other_end(self) -> Action:
        """The RECV that takes this SEND's message, or the SEND that fills this RECV."""
        op, step = _OTHER_END[self.op]
        if self.peer >= 0:
            return Action(op, self.peer, self.microbatch, self.slice, self.stage)
        return Action(op, self.stage + step, self.microbatch, self.slice)

    @property
    def send(self) -> Action:
        """The SEND of the message of which this SEND or RECV is an end."""
        return self if self.op in SENDS else self.other_end
