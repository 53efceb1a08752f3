"""Starts local ranks, as torchrun would; all end together, and the first cause is printed last."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from slipstream.atomic_files import replaced_file
from slipstream.errors import NonFiniteError, RankFailedError, SlipstreamError, StoppedRunError
from slipstream.launch.forked_ranks import ForkedRank, ForkServer
from slipstream.launch.stop_request import STOP_SIGNALS, RequestCount, kept_hub
from slipstream.network_interfaces import interface_problems
from slipstream.watchdog import exit_text, listen_at, loopback_address, num_ended_for_memory, wait_for_an_end

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LocalRank = subprocess.Popen[bytes] | ForkedRank

# glibc returns freed memory to the system and pages it in again at every step; with these settings it keeps it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_TOP_PAD_": "67108864"}
_PARENT = "SLIPSTREAM_PARENT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable
_PR_SET_NAME = 15
_PASSED_ON: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (SlipstreamError, NonFiniteError, StoppedRunError)
}
_KINDS = {**_PASSED_ON, RankFailedError.__name__: RankFailedError}  # errors whose messages need no traceback
# Linux ends a process at the death of its parent if that is asked for, at any moment of its life, its imports included.
# A process's requests stay when it becomes another program.
_ASK = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(os.environ["{_PARENT}"]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_ENDS_WITH_PARENT = ["-I", "-S", "-c", _ASK] if sys.platform == "linux" else []
# Waits for the end of the process that has the other end of its pipe; ranks that end a moment later may still write.
_REMOVE = 'read -r _; rm -rf "$1" || { sleep 3; rm -rf "$1"; }'
_LOOK_SECONDS = 1.0
_BREATH_SECONDS = 0.01  # time between the end of a forked rank and its server's message about it
_SECONDS_TO_SAY = 3  # time to name the awaited message, after another rank has failed
_SECONDS_TO_END = 3  # time between asking ranks to end and killing them
# No program of ours sends these signals to a single rank.
_ENDED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGBUS)


def has_launcher() -> bool:
    """Returns whether srun, torchrun or another launcher that sets RANK and WORLD_SIZE started this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() or is_task(os.environ)


class RegroupedError(Exception):
    """The ranks have saved and ended, to be started again in another number."""


def launch_ranks(
    module: str,
    arguments: Sequence[str],
    places: int | Sequence[int],
    server: ForkServer | None = None,
    regroups: Callable[[], bool] = lambda: False,
) -> None:
    """Runs `main` of a module as local ranks on the loopback interface, and waits for them.

    When this call ends, every rank has ended, even if one of them failed or Ctrl-C was pressed.

    Args:
        module: whose file also runs `main` with `python -m`.
        arguments: for sys.argv.
        places: the number of ranks, or the local number of each, by which it has a GPU.
        server: which forks the ranks; without it, each is a new process that imports everything anew.
        regroups: is asked every second; once it says so, the ranks are to save and to end.

    Raises:
        RankFailedError: if a rank failed; the message has the first cause.
        RegroupedError: if the ranks have ended because of `regroups`.
        SlipstreamError, NonFiniteError: if the first cause was one.
        StoppedRunError: if the ranks have ended as TERM or USR1 asked them to; both are passed on to them.
        KeyboardInterrupt: after Ctrl-C.
    """
    for problem in interface_problems(os.environ, uses_nccl=False).values():
        raise SlipstreamError(problem)
    places = range(places) if isinstance(places, int) else places
    num_ranks = len(places)
    store, address, port = loopback_store()
    with (
        temporary_folder() as folder,
        kept_hub(store, address, num_ranks),
        _own_signals(),
    ):
        error_files = {rank: folder / f"error-{rank}.json" for rank in range(num_ranks)}
        # The server has died together with the ranks that it had started before.
        if server is not None and server.ending:
            server = None
        parent = os.getpid() if server is None else server.pid
        environments = [
            _environment(rank, place, num_ranks, address, port, parent, error_files[rank])
            for rank, place in enumerate(places)
        ]
        ranks: list[LocalRank] = []
        ended: dict[int, int] = {}
        asked: list[int] = []
        regrouping = _Regrouping(regroups)
        before = num_ended_for_memory()
        try:
            if server is None:
                ranks.extend(_start_anew([*_ENDS_WITH_PARENT, "-m", module, *arguments], env) for env in environments)
            else:
                ranks.extend(server.start(module, arguments, environments))
            asked = _pass_stop_signals_on(ranks)
            # Ranks are away from the terminal, whose Ctrl-Z reaches this process alone.
            signal.signal(signal.SIGTSTP, lambda *_: _stop_with(ranks))
            ended = _wait(ranks, regrouping)
        finally:
            # A second Ctrl-C must not leave orphans.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _end(ranks, at_once=any(code < 0 and -code not in asked for code in ended.values()))
        del store
        if server is not None and server.ending:
            raise RankFailedError(f"{server.ending}, and its ranks have ended with it")
        try:
            if any(code in (StoppedRunError.exit_code, *(-request for request in asked)) for code in ended.values()):
                name = signal.Signals(asked[0]).name if asked else "a signal"
                raise StoppedRunError(f"{name} ended the ranks before they could save anything new")
            _raise_first_cause(ended, error_files, is_short=before is None or before != num_ended_for_memory())
        except StoppedRunError:
            if regrouping.has_begun and not asked:
                raise RegroupedError from None
            raise


def loopback_store(**options: Any) -> tuple[Store, str, int]:
    """Returns a store that this process keeps for its ranks, with its address and port.

    The system has chosen the port, so that it is free. By itself the store would listen on all interfaces, and it lets
    anybody who reaches it write.
    """
    import torch.distributed as dist

    address = loopback_address()
    listening = listen_at(address)
    port = listening.getsockname()[1]
    options |= {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    return dist.TCPStore(address, port, **options), address, port  # type: ignore[attr-defined]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes a folder for the body, which is removed also where this process is killed in it."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        remover = None
        with suppress(OSError):  # a system without sh
            command = ["sh", "-c", _REMOVE, "sh", folder]
            remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield Path(folder)
        finally:
            if remover is not None:
                remover.kill()
                remover.communicate()


def _start_anew(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True)


def _environment(
    rank: int, place: int, num_ranks: int, address: str, port: int, parent: int, error_file: Path
) -> dict[str, str]:
    """Returns this environment with torchrun's variables, the memory settings, and one thread per rank; the user's
    variables stay."""
    chosen = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **MALLOC}
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:
        chosen["GLOO_SOCKET_IFNAME"] = min(loopback)
    return {
        **chosen,
        **os.environ,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        ERROR_FILE: str(error_file),
        _PARENT: str(parent),
    }


@contextmanager
def _own_signals() -> Iterator[None]:
    """Lets signals end this process by an exception, after which the ranks are ended; restores the handlers."""
    names = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *STOP_SIGNALS)
    handlers = {name: signal.getsignal(name) for name in (*names, signal.SIGTSTP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in names[1:]:
        # With a handler of its own, a request may end this process by itself.
        if name not in STOP_SIGNALS or handlers[name] is signal.SIG_DFL:
            signal.signal(name, _exit_by)
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)


def _stop_with(ranks: Sequence[LocalRank]) -> None:
    """Stops the ranks and their watchers with this process, until it is continued."""
    _signal_groups(ranks, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    _signal_groups(ranks, signal.SIGCONT)


def _signal_groups(ranks: Sequence[LocalRank], number: int) -> None:
    """Sends a signal to ranks, with all that they have started."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, number)


def _exit_by(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _pass_stop_signals_on(ranks: Sequence[LocalRank]) -> list[int]:
    """Sends requests to stop to the ranks, which save and end; returns the list of those that have come. The third one
    ends the ranks at once, as Ctrl-C does."""
    came = list[int]()
    requests = RequestCount()

    def take(number: int, frame: FrameType | None) -> None:
        if not requests.take(number):
            return
        came.append(number)
        if requests.ends_at_once:
            _exit_by(number, frame)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, take)
    return came


class _Regrouping:
    """Asks the ranks to save and to end, once, when they are to be started in another number."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self.has_begun = False

    def look(self, ranks: Sequence[LocalRank]) -> None:
        if not self.has_begun and self._is_wanted():
            self.has_begun = True
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGTERM)


def _wait(ranks: Sequence[LocalRank], regrouping: _Regrouping) -> dict[int, int]:
    """Waits until all ranks have ended, or until shortly after one has failed, so that others can name the message they
    waited for; returns the exit codes of those that have ended, in this order."""
    ended: dict[int, int] = {}
    deadline = math.inf
    while len(ended) < len(ranks) and time.monotonic() < deadline:
        running = [rank.pid for index, rank in enumerate(ranks) if index not in ended]
        wait_for_an_end(running, max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
        time.sleep(_BREATH_SECONDS)
        regrouping.look(ranks)
        for index, rank in enumerate(ranks):
            code = rank.poll()
            if code is not None:
                ended.setdefault(index, code)
        if any(ended.values()):
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_SAY)
    return ended


def _end(ranks: Sequence[LocalRank], at_once: bool) -> None:
    """Asks the ranks that still run to end, with all that they have started, and kills them if they don't, or at once
    where one was killed: nothing is left that they could save."""
    for signal_number in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
        running = [rank for rank in ranks if rank.poll() is None]
        _signal_groups(running, signal_number)
        deadline = time.monotonic() + _SECONDS_TO_END
        while (running := [rank for rank in running if rank.poll() is None]) and time.monotonic() < deadline:
            wait_for_an_end([rank.pid for rank in running], max(0.0, deadline - time.monotonic()))
            time.sleep(_BREATH_SECONDS)


def _raise_first_cause(ended: dict[int, int], error_files: dict[int, Path], is_short: bool) -> None:
    """Raises the error that came first, if there was one; `is_short` says whether memory may have run out.

    A rank that was killed wrote no error, and its neighbours' broken connections are only a consequence, which is
    written before.
    A rank that raised an error wrote when; its neighbours may have noticed and ended before it did.
    """
    errors = {rank: json.loads(file.read_text()) for rank, file in error_files.items() if file.exists()}
    silent = {rank: code for rank, code in ended.items() if code != 0 and rank not in errors}
    if silent:
        said = [error["message"] for _, error in sorted(errors.items()) if error["kind"] == RankFailedError.__name__]
        # The watchers of all ranks say the same.
        for text in dict.fromkeys(said):
            sys.stderr.write(f"{text}\n")
        rank, code = next(iter(silent.items()))
        how = exit_text(code) + (", perhaps because memory ran out" if code == -signal.SIGKILL and is_short else "")
        # A watcher that ends its rank because another one has ended writes an error first.
        lost = tuple(sorted(rank for rank, code in silent.items() if -code in _ENDED_FROM_OUTSIDE))
        raise RankFailedError(f"rank {rank} {how}; the other ranks were stopped", lost=lost)
    if errors:
        rank, error = min(errors.items(), key=lambda item: item[1]["time"])
        if error["kind"] in _PASSED_ON:
            raise _PASSED_ON[error["kind"]](error["message"])
        # This message names the ranks at fault.
        if error["kind"] == RankFailedError.__name__:
            raise RankFailedError(f"{error['message']}\nthe ranks were stopped. {error['message'].splitlines()[0]}")
        cause = error["message"].splitlines()[-1]
        raise RankFailedError(f"{error['message']}\nrank {rank} failed; the other ranks were stopped. {cause}")


@contextmanager
def reported_to_the_launcher() -> Iterator[None]:
    """Ends this rank's process after an exception, which the launcher that started it reports, and calls the process
    after the rank.

    Without our launcher, the exception is raised as usual.
    """
    parent = os.environ.get(_PARENT)
    if parent is None:
        yield
        return
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    # `top` and `ps -o comm` show this name; forked ranks have the launcher's command line.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {os.environ['RANK']}".encode())
    try:
        yield
    except BaseException as error:
        kind = next((name for name, raised in _KINDS.items() if isinstance(error, raised)), "")
        message = str(error) if kind else traceback.format_exc().rstrip()
        # torch reads "message" from such files
        report = {"message": message, "time": time.time(), "kind": kind}
        with replaced_file(Path(os.environ[ERROR_FILE])) as part:
            part.write_text(json.dumps(report))
        sys.stdout.flush()
        # A clean exit could wait for a neighbour that is gone.
        os._exit(1)


def end_with(parent: int) -> None:
    """Ends this process when its parent has died without a chance to end it; works even in a blocked rank."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


# Systems choose ports above these by themselves.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


def is_task(environment: Mapping[str, str]) -> bool:
    """Returns whether srun started this process as one of several tasks.

    A batch script, or a step of a single task, is none: it may start local ranks.
    """
    return "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task.

    The master is the first node of the step, where Slurm puts task 0, and its port follows from the job and the step.
    MASTER_ADDR and MASTER_PORT stay where they are set.

    Raises:
        SlipstreamError: if Slurm left a variable out.
    """
    try:
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": str(_tasks_of_each(environment)[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
        }
    except (KeyError, IndexError, ValueError) as error:
        raise SlipstreamError(
            f"Slurm's variables don't say which rank this task is ({error!r}); start it with srun, or set RANK, "
            "LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
        ) from error


def first_node(nodes: str) -> str:
    """Returns the first node of a list: `gpu-07` of `gpu-[07-12,20],login1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # splits at commas outside of brackets
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def _tasks_of_each(environment: Mapping[str, str]) -> list[int]:
    """Returns the number of tasks of every node: `2(x3),1` gives 2, 2, 2, 1."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        num_tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(num_tasks)] * int(times or 1)
    return counts


def _port(environment: Mapping[str, str]) -> int:
    """Returns a port that is the same on all nodes, and another one for the next job or step."""
    return _FIRST_PORT + (int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])) % _NUM_PORTS
