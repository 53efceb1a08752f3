"""Notices ranks that have died, stopped or wait too long, from a process next to each of them. No torch."""

from slipstream.watchdog.board import Board
from slipstream.watchdog.watched_rank import (
    StallLimit,
    WatchSettings,
    board,
    counted_off,
    end_watch,
    explain_loss,
    is_watched,
    note_order,
    open_hub,
    start_watch,
    waiting,
)
