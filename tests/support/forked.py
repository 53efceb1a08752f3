"""Programs of tests, run by forked processes: worker scripts in one group over gloo, and the `slipstream` command.

A new process spends eight seconds on importing torch and transformers, and the tests need hundreds of processes: these
are forked from one that has imported everything, also what programs import only when they need it, and does nothing
else.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torch.distributed import TCPStore

import slipstream
from support.paths import ROOT, TESTS
from support.timeouts import LIMIT, wait_until

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "slipstream.pipeline.pipeline",
        "slipstream.planner.order.order_search",
        "slipstream.cli.train",
        "slipstream.train.training_rank",
        "transformers.models.auto.modeling_auto",
        "matplotlib.backends.backend_agg",  # for the picture of a run's last step
        "matplotlib.figure",
        "rich.progress",
        "support.architectures",
        "support.forked",
        "support.preloaded",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "qwen3")),
    ]
)


SHOWS_GPU = "SLIPSTREAM_TESTS_SHOW_GPU"  # set where processes may use a GPU: others compute on CPUs everywhere
COMMAND = Path(slipstream.__file__).with_name("__main__.py")


def launch(num_processes: int, script: Path, *arguments: str | Path, timeout: float = LIMIT) -> CompletedProcess[str]:
    """Runs `script` in `num_processes` ranks, as torchrun would.

    A rank that fails ends the others, and its exit code is returned; -9 is that of SIGKILL. Raises TimeoutError, with
    what was written until then, where the ranks take longer than `timeout` seconds.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    places = [_place(rank, num_processes, store.port) for rank in range(num_processes)]
    return _run_all(places, script, arguments, timeout)


def run_alone(script: Path, *arguments: str | Path, timeout: float = LIMIT) -> CompletedProcess[str]:
    """Runs `script` in one process that no launcher has started."""
    return _run_all([{}], script, arguments, timeout)


class ForkedProgram:
    """A script that runs by itself while its test goes on, much like a subprocess.Popen with pipes.

    What it writes is in `folder`. Whoever starts one ends it.
    """

    def __init__(self, folder: Path, script: Path, *arguments: str | Path) -> None:
        self._texts = folder / "stdout", folder / "stderr"
        words = [str(argument) for argument in arguments]
        self._process = _fork(_run, script, words, _environment(), self._texts)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, words: str, on_stderr: bool = False) -> None:
        """Waits until it has written the words, at any place."""
        text = self._texts[on_stderr]
        wait_until(lambda: text.exists() and words in text.read_text(), f"nothing says {words!r}")

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        """Waits for its end; returns what it has written. Raises TimeoutError where that takes longer."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} runs for more than {timeout} seconds")
        out, error = (text.read_text() for text in self._texts)
        return out, error


def start_standing(
    num_processes: int, port: int, script: Path, *arguments: str
) -> list[tuple[BaseProcess, socket.socket]]:
    """Starts ranks that read from a socket and write to it, and may use a GPU; whoever starts them ends them."""
    started = []
    for rank in range(num_processes):
        ours, theirs = socket.socketpair()
        place = {**os.environ, **_place(rank, num_processes, port), SHOWS_GPU: "1"}
        started.append((_fork(_stand, script, list(arguments), place, theirs), ours))
        theirs.close()
    return started


def slipstream_command(*arguments: str | Path) -> CompletedProcess[str]:
    """Runs `slipstream` with the arguments, in one process that no launcher has started."""
    return run_alone(COMMAND, *arguments)


def selected_cases(request: pytest.FixtureRequest) -> list[str]:
    """The values of the parameter `case` in those tests that are to run and use the requesting module's fixture."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    users = (item for item in items if request.fixturename in item.fixturenames)
    cases = (item.callspec.params.get("case") for item in users)
    return list(dict.fromkeys(filter(None, cases)))


def _run_all(
    places: Sequence[dict[str, str]], script: Path, arguments: Sequence[str | Path], timeout: float
) -> CompletedProcess[str]:
    words = [str(argument) for argument in arguments]
    places = [_environment() | place for place in places]
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "stdout"), Path(folder, "stderr")
        ranks = [_fork(_run, script, words, place, texts) for place in places]
        code = _end(ranks, time.monotonic() + timeout)
        stdout, stderr = (text.read_text() if text.exists() else "" for text in texts)
    if code is None:
        raise TimeoutError(f"{script.name} {' '.join(words)} took over {timeout} seconds\n{stdout}\n{stderr}")
    return CompletedProcess([str(script), *words], code, stdout, stderr)


def _fork(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Runs a function in a process that is forked from one that has imported what most programs need."""
    # Python 3.11 imports in that one what PYTHONPATH has, and no more.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{ROOT}", prepend=os.pathsep)
        forkserver.ensure_running()
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    return process


def _environment() -> dict[str, str]:
    """This process's, which a test may have changed since the process that forks was started."""
    own = {"PYTHONPATH": "", **os.environ}
    return own if SHOWS_GPU in os.environ else own | {"CUDA_VISIBLE_DEVICES": ""}


def _place(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """What torchrun tells a process. The store is in this process, so no port has to be guessed."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "SLIPSTREAM_STALL_LIMIT": "off",  # of programs of their own; runs of `slipstream train` are watched
    }


def _run(script: Path, arguments: list[str], place: dict[str, str], texts: tuple[Path, Path]) -> None:
    gc.freeze()  # see conftest
    for number, text in enumerate(texts, start=1):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # A line at once: what ranks write in pieces would mix in the file.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    _run_as_main(script, arguments, place)


def _stand(script: Path, arguments: list[str], place: dict[str, str], words: socket.socket) -> None:
    gc.freeze()
    for number in (0, 1):
        os.dup2(words.fileno(), number)
    sys.stdin = os.fdopen(0)
    _run_as_main(script, arguments, place)


def _run_as_main(script: Path, arguments: list[str], place: dict[str, str]) -> None:
    os.environ.clear()  # the server may have begun in a test that had set something
    os.environ.update(place)
    tempfile.tempdir = None  # TMPDIR may be another one
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent), str(TESTS), str(ROOT)]
    runpy.run_path(str(script), run_name="__main__")


def _end(ranks: list[BaseProcess], deadline: float) -> int | None:
    """The code of the first that failed, 0 where all end well, None where the time is over; then all have ended."""
    running, code = list(ranks), 0
    try:
        while running and code == 0 and time.monotonic() < deadline:
            wait([rank.sentinel for rank in running], deadline - time.monotonic())
            code = next((rank.exitcode for rank in running if rank.exitcode), 0)
            running = [rank for rank in running if rank.exitcode is None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return None if running and code == 0 else code
