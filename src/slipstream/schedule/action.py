"""The actions, as data: an Action is one operation of one stage on one slice."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from slipstream.errors import SlipstreamError


class ScheduleError(SlipstreamError):
    """An error in a schedule or its text; the message names the action and the rule that it breaks."""


class Op(StrEnum):
    """The operation of an action. The letters are PyTorch's; zero-bubble papers call B, I and W: BW, B and W."""

    F = "F"
    B = "B"  # whole backward
    I = "I"  # noqa: E741  gradient of the input only
    W = "W"  # gradient of the weights, after I
    R = "R"  # recompute the tensors that F did not keep
    SEND_F = "SEND_F"  # this stage's output, to the next stage
    RECV_F = "RECV_F"  # this stage's input, from the stage before
    SEND_B = "SEND_B"  # the gradient of this stage's input, to the stage before
    RECV_B = "RECV_B"  # the gradient of this stage's output, from the next stage
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    REDUCE_GRAD = "REDUCE_GRAD"
    V = "V"  # this rank's rows of the head: logits, their softmax, and its part of the head's input gradient
    L = "L"  # the loss and the head's whole input gradient, from the V's of all ranks
    VW = "VW"  # the weight gradient of this rank's rows of the head, after L
    E = "E"  # this rank's rows of an embedding that is tied to the head: their part of the first stage's input
    EW = "EW"  # their gradient, after the first stage's backward


BACKWARDS = frozenset({Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
COMMUNICATION = SENDS | RECEIVES
VOCABULARY = frozenset({Op.V, Op.L, Op.VW, Op.E, Op.EW})

# By these numbers, arrays name ops.
OPS = tuple(Op)
NUMBERS = {op: number for number, op in enumerate(OPS)}

# SEND_F of stage g and RECV_F of stage g+1 are two ends of one message; gradients travel the other way.
_OTHER_END = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}

NUMBER = "(0|[1-9][0-9]*)"  # as a regular expression
_OPS = "|".join(sorted(Op, key=len, reverse=True))
_ACTION = re.compile(rf"{NUMBER}({_OPS})(?:{NUMBER}(?:\.{NUMBER})?)?")


class Action(NamedTuple):
    """One op of one stage on one slice of one microbatch; REDUCE_GRAD concerns the whole stage.

    It is a tuple because planning makes and looks up millions of them.
    """

    op: Op
    stage: int
    microbatch: int = 0
    slice: int = 0

    def __str__(self) -> str:
        """Returns `2F0.3` for stage 2, forward, microbatch 0, slice 3; `2REDUCE_GRAD` for a reduction."""
        if self.op is Op.REDUCE_GRAD:
            return f"{self.stage}{self.op}"
        return f"{self.stage}{self.op}{self.microbatch}.{self.slice}"

    def text(self, num_slices: int) -> str:
        """Returns the text form in a schedule of `num_slices` slices: with one slice, `2F0` instead of `2F0.0`."""
        return str(self) if num_slices > 1 else str(self).removesuffix(".0")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads either text form; `2F0` is `2F0.0`. Anything before or after the action raises ScheduleError."""
        match = _ACTION.fullmatch(text)
        if match is None or (match[2] == Op.REDUCE_GRAD) != (match[3] is None):
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, op, microbatch and slice, as in 2F0.3 "
                f"(2F0 with one slice per microbatch, 2REDUCE_GRAD for a stage). Ops: {', '.join(Op)}."
            )
        stage, op, microbatch, index = match.groups(default="0")
        return cls(Op(op), int(stage), int(microbatch), int(index))

    def with_op(self, op: Op) -> Action:
        """Returns another op of the same slice."""
        return Action(op, self.stage, self.microbatch, self.slice)

    @property
    def other_end(self) -> Action:
        """The RECV that takes this SEND's message, or the SEND that fills this RECV."""
        op, step = _OTHER_END[self.op]
        return Action(op, self.stage + step, self.microbatch, self.slice)

    @property
    def send(self) -> Action:
        """The SEND of the message of which this SEND or RECV is an end."""
        return self if self.op in SENDS else self.other_end
