"""The report of a rank that has waited too long: its action, which rank it waits for, and what is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from slipstream.schedule.action import RECEIVES, SENDS, Action
from slipstream.schedule.dependencies import predecessors
from slipstream.schedule.schedule import Schedule

_SHOWN = 6  # missing actions named per rank


def report_wait(schedule: Schedule, rank: int, action: Action) -> str:
    """Explains why `rank` can't run `action`, from what it knows: all its earlier actions ran, and what they needed.

    Everything that `action` needs, directly or not, is either known to be done or listed as missing under its rank, in
    that rank's order: the first of them is the cause of the wait, or where that rank itself waits.
    """
    text, place, row = schedule.text, schedule.positions[action][1], schedule.actions[rank]
    done = _with_predecessors((each for each in row[:place] if each.op not in RECEIVES), schedule)
    wanted = _with_predecessors([action], schedule) - done - {action}
    missing: defaultdict[int, list[Action]] = defaultdict(list)
    for each in sorted(wanted, key=schedule.positions.__getitem__):
        if each.op not in RECEIVES:  # its SEND says the same
            missing[schedule.placement[each.stage]].append(each)
    awaited = [each for each in predecessors(action, schedule) if each in wanted]
    sources = [each.send if each.op in RECEIVES else each for each in awaited]
    if action.op in SENDS:  # held up by those before it on its channel
        sources = [action.other_end]
    named = ", ".join(f"{text(each)} of rank {schedule.placement[each.stage]}" for each in sources) or "nothing"
    lines = [f"rank {rank} waits at {text(action)} (action {place + 1} of {len(row)}) for {named}."]
    for other, actions in sorted(missing.items()):
        more = f", and {len(actions) - _SHOWN} more" if len(actions) > _SHOWN else ""
        lines.append(f"  missing on rank {other}: {', '.join(map(text, actions[:_SHOWN]))}{more}")
    return "\n".join(lines)


def _with_predecessors(actions: Iterable[Action], schedule: Schedule) -> set[Action]:
    """Returns the actions, all they need, and all that stands before any of these on its rank.

    A receive that stands before is only posted; its message is there when an action that needs it has run.
    """
    found: set[Action] = set()
    waiting = list(actions)
    while waiting:
        action = waiting.pop()
        if action in found:
            continue
        found.add(action)
        rank, index = schedule.positions[action]
        waiting += predecessors(action, schedule)
        if action.op not in RECEIVES:
            row = reversed(schedule.actions[rank][:index])
            waiting += [each for each in row if each.op not in RECEIVES][:1]
    return found
