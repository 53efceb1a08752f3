"""Notices ranks that have died, stopped or wait too long, from a process next to each of them. No torch."""

from slipstream.watchdog.board import Board
from slipstream.watchdog.judgement import exit_text, num_ended_for_memory
from slipstream.watchdog.supervisor import WatchSettings, open_hub, supervised_hub
from slipstream.watchdog.watched_rank import (
    StallLimit,
    board,
    end_watch,
    explain_loss,
    finished_ranks,
    is_watched,
    note_order,
    start_watch,
    waiting,
    watchdog_paused,
)
from slipstream.watchdog.wire import listen_at, loopback_address, wait_for_an_end
