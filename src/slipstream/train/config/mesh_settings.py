"""The settings that are sizes of the mesh, by the names of its axes."""

from __future__ import annotations

from slipstream.options import SHARED_WORK

# The sizes of the mesh, as they are typed, and the settings that they are
MESH_SETTINGS = {"pp": ("pipeline", "num_ranks"), "dp": ("parallel", "data")}
MESH_SETTINGS |= {each.axis: ("parallel", each.degree) for each in SHARED_WORK}
# In the order of ranks, those whose product is the number of processes
AXES = ["pp", "dp", *(each.axis for each in SHARED_WORK if each.has_axis)]
