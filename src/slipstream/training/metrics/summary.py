"""The words in which a terminal shows a step's figures and the time that training takes."""

from __future__ import annotations

from slipstream.training.metrics.flops import TrainingTime
from slipstream.training.metrics.records import StepRecord

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def describe_step(step: StepRecord) -> str:
    """What stands beside the bar: loss, speed, use of the devices, and the memory of the fullest rank."""
    parts = [f"loss {step.loss:.3f}", f"{step.tokens_per_second:,.0f} tokens/s"]
    if step.figures is not None:
        parts += [f"{step.figures.tflops_per_device:.3g} TFLOP/s a device", f"MFU {step.figures.mfu:.1%}"]
    parts += [f"idle {step.idle_fraction:.0%}", f"{max(step.peak_memory) / 2**20:,.0f} MiB"]
    return "  ".join(parts)


def describe_time(tokens: int, time: TrainingTime) -> str:
    """How long training on so many tokens takes, as measured and by the paper's rule."""
    return f"{tokens:,} tokens take {duration(time.measured)} at this rate (8TP/(nX): {duration(time.ptdp)})"


def duration(seconds: float) -> str:
    """In the largest unit of which there are two: 34 days, 3.5 hours, 0.2 seconds."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 2 * size), _UNITS[-1])
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"
