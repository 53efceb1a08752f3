"""The words in which a terminal shows a step's figures and the time that training takes."""

from __future__ import annotations

from slipstream.training.metrics.flops import TrainingTime
from slipstream.training.metrics.records import StepRecord
from slipstream.units import bytes_text, long_duration_text


def describe_step(step: StepRecord) -> str:
    """Returns what is shown next to the bar: loss, speed, utilisation, and the memory of the fullest rank."""
    parts = [f"loss {step.loss:.3f}", f"{step.tokens_per_second:,.0f} tokens/s"]
    if step.figures is not None:
        parts += [f"{step.figures.tflops_per_device:.3g} TFLOP/s a device", f"MFU {step.figures.mfu:.1%}"]
    parts += [f"idle {step.idle_fraction:.0%}", bytes_text(max(step.peak_memory))]
    return "  ".join(parts)


def describe_time(tokens: int, time: TrainingTime) -> str:
    """Returns a line that says how long training on `tokens` takes, as measured and by the rule of PTD-P."""
    measured, by_rule = long_duration_text(time.measured), long_duration_text(time.ptdp)
    return f"{tokens:,} tokens take {measured} at this rate (8TP/(nX): {by_rule})"
