"""TeraPipe's Figure 3 from profiles of our own: how long a layer takes for slices of different lengths.

    python -m benchmarks.papers.figure3 profile.json     # of `slipstream profile`; writes docs/images/slice-times.png

The paper's point: below some length a slice takes as long as one of that length, so shorter slices waste the device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.harness import destination
from slipstream.cost import Profile, load_profile
from slipstream.schedule import Op

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "slice-times.png"


def layer_seconds(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Returns slice lengths, and the seconds of the first kind of layer, forward and backward, without context."""
    times = [profile.part_time(profile.kind_names[0], op) for op in (Op.F, Op.B)]
    lengths = np.array([length for length, _ in profile.stages[0].activation_bytes])
    known = [time for time in times if time is not None]
    return lengths, sum(np.asarray(time(lengths, 0 * lengths)) for time in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="+")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for path in parser.parse_args().profiles:
        profile = load_profile(path)
        lengths, seconds = layer_seconds(profile)
        left.plot(lengths, 1e3 * seconds, marker=".", label=path.stem)
        right.plot(lengths, lengths / seconds / 1e3, marker=".", label=path.stem)
    left.set(xlabel="tokens of the slice", ylabel="milliseconds", ylim=0)
    left.set_title("forward and backward of a layer", fontsize=10)
    right.set(xlabel="tokens of the slice", ylabel="thousand tokens a second", ylim=0)
    right.set_title("throughput of a layer", fontsize=10)
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(destination(PICTURE), dpi=150)
    print(f"wrote {destination(PICTURE)}")


if __name__ == "__main__":
    main()
