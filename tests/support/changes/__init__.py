"""Ways to change a model before a Pipeline takes it, and what each must be in each use: exact, or refused by name.

`docs/own-models.md` shows them. A change is made to a model as it was built, in place, or returns another one.
"""

from __future__ import annotations

from support.changes import forwards, hooks, layers, mixing, modules, weights
from support.changes.change import ALL, EITHER, EXACT, GROUPS, REFUSED, SLICES, USES, Change, scaled
from support.changes.weights import save_untied

# In the order of the groups, whatever module was imported first.
CHANGES = {each.name: each for group in GROUPS.values() for each in ALL if each.group == group}
