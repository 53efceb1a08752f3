"""Several nodes, under torchrun or Slurm, train like one; every problem of a node is reported with its name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.hosts import Hosts, NoHostsError
from torch.distributed.run import get_args_parser

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.launch import connect_ranks
from slipstream.launch.local_ranks import first_node, is_task, torchrun_variables
from slipstream.launch.rendezvous import (
    address_towards,
    differences,
    hash_sources,
    is_loopback,
)
from slipstream.network_interfaces import find_address, find_interface
from slipstream.train.config import load_config
from slipstream.train.model_files import load_model_config
from slipstream.train.preflight.model_checks import check_layers
from support.forked import COMMAND, launch
from support.parameters import first_of
from support.paths import ROOT, WORKERS
from support.timeouts import LIMIT
from support.tiny_training import metrics_of, tiny_llama

WORKER = [sys.executable, str(WORKERS / "training/nodes.py")]
TRAIN = [sys.executable, "-m", "slipstream", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
PORT = "29517"
PLACE = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
PLACE += ["GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE", "SLIPSTREAM_RENDEZVOUS_SECONDS"]


Result = subprocess.CompletedProcess[str]


class Network:
    """The hosts, and commands that run on all of them at the same time."""

    def __init__(self, hosts: Any) -> None:
        self.hosts = hosts

    def run(
        self,
        commands: Sequence[Sequence[str | Path]],
        variables: Sequence[dict[str, str]] | None = None,
        own: Sequence[tuple[Path, Path] | None] | None = None,
    ) -> list[Result]:
        """The first command on the first host, and so on. What isn't over in time is ended, and fails."""
        deadline = time.monotonic() + LIMIT  # what pytest ends leaves its hosts behind
        processes = []
        for index, command in enumerate(commands):
            changed = clean_environment() | (variables[index] if variables else {})
            arguments = self.hosts.command(index, [str(part) for part in command], own[index] if own else None)
            processes.append(
                subprocess.Popen(
                    arguments,
                    env=changed,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        try:
            texts = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                end(process)
        return [Result(process.args, process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def clean_environment() -> dict[str, str]:
    """This one, without any launcher's marks."""
    return {name: value for name, value in os.environ.items() if name not in PLACE and not name.startswith("SLURM_")}


def end(process: subprocess.Popen[str]) -> None:
    """With all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def make_network() -> Iterator[Callable[[int], Network]]:
    made = []

    def make(num_hosts: int) -> Network:
        try:
            made.append(Hosts(num_hosts))
        except NoHostsError as error:
            pytest.skip(f"no hosts can be made on this machine: {error}")
        return Network(made[-1])

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture(scope="module")
def network(make_network: Callable[[int], Network]) -> Network:
    """Two hosts for all tests that leave them as they are."""
    return make_network(2)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def write_config(folder: Path) -> Path:
    """A tiny run on two ranks."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    model = tiny_llama(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    training = {"output": str(folder / "output"), "seq_len": 64, "batch_size": 2, "steps": 4}
    values: dict[str, Any] = {
        "model": {"config": model},
        "data": {"files": [str(folder / "text.txt")], "validation_fraction": 0.0},
        "pipeline": {"slices": 4, "num_microbatches": 2, "schedule": "1f1b"},
        "runtime": {"self_check": False},
        "optimizer": {"lr": 0.01},
        "training": training,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def losses_in(folder: Path) -> list[float]:
    lines = metrics_of(folder)
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run with two local ranks."""
    folder = tmp_path_factory.mktemp("one-host")
    result = launch(2, COMMAND, "train", write_config(folder))
    assert result.returncode == 0, result.stderr
    return losses_in(folder / "output")


def slurm_variables(rank: int, num_nodes: int) -> dict[str, str]:
    """What srun gives to the tasks of a step, one on each node."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(num_nodes),
        "SLURM_STEP_NODELIST": f"node[0-{num_nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_nodes})",
    }


@pytest.mark.more
def test_two_nodes_train_like_one_and_again_where_a_rank_is_killed(
    network: Network, config: Path, on_one_host: list[float]
) -> None:
    """As it saves its second step; torchrun starts both ranks again."""
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{PORT}", "--rdzv-id=1", "--max-restarts=1"]
    killed = [str(WORKERS / "training/killed_at.py"), "0", "slipstream.checkpoint.background_save", "Manifest.write"]
    saved = ["--checkpoint.every=1", "--checkpoint.resume=latest"]
    command = [*TORCHRUN, *meeting, *killed, "2", "train", str(config), *saved]
    results = network.run([command, command])
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    errors = results[0].stderr + results[1].stderr
    assert "exitcode: -9" in errors
    assert "Unable to shutdown process" not in errors  # as torchrun says after 30 s
    said = "".join(result.stdout for result in results)
    assert (
        "all ranks connected: rank 0 (node0), rank 1 (node1)" in said
        or "all ranks connected: rank 0 (node1), rank 1 (node0)" in said
    )
    assert "resumed after step 1" in said
    assert losses_in(config.parent / "output") == on_one_host


@pytest.mark.grid
def test_slurm_tasks_train_like_local_ranks(network: Network, config: Path, on_one_host: list[float]) -> None:
    results = network.run([[*TRAIN, config]] * 2, [slurm_variables(rank, 2) for rank in range(2)])
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert "all ranks connected: rank 0 (node0), rank 1 (node1)" in results[0].stdout
    assert losses_in(config.parent / "output") == on_one_host


@pytest.mark.more
def test_other_code_is_told_on_every_rank(network: Network, tmp_path: Path) -> None:
    """Of Slurm's tasks this time, without torchrun."""
    package, other = Path(slipstream.__file__).parent, tmp_path / "other" / "slipstream"
    shutil.copytree(package, other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "errors.py").open("a") as file:
        file.write("# a change\n")
    tasks = [slurm_variables(rank, 2) for rank in range(2)]
    hashes = [hash_sources(folder) for folder in (package, other)]
    for result in network.run([WORKER] * 2, [tasks[0], tasks[1] | {"PYTHONPATH": str(other.parent)}]):
        assert result.returncode == 1
        assert (
            f"slipstream's source files: {hashes[0]} on rank 0 (node0); {hashes[1]} on rank 1 (node1)" in result.stderr
        )


STEPS_OF_ITS_OWN = """
import os, sys
from slipstream.cli import main
sys.argv.append(f"--training.steps={4 + int(os.environ['RANK'])}")
main()
"""


def test_other_settings_are_told_on_every_rank(config: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS_OF_ITS_OWN)
    ended = launch(2, tmp_path / "program.py", "train", config)
    assert ended.returncode == 2
    here = re.escape(socket.gethostname())
    assert re.search(rf"training.steps: 4 on rank 0 \({here}\); 5 on rank 1 \({here}\)", ended.stderr)
    assert not (tmp_path / "output").exists()


@pytest.mark.grid
def test_a_folder_that_is_not_shared(network: Network, config: Path) -> None:
    """Even where an earlier run has left the same files on the node's own disk."""
    output, disk = config.parent / "output", config.parent / "disk"
    output.mkdir()
    (disk / "inputs").mkdir(parents=True)
    (disk / "inputs" / "run_id").write_text("an earlier run")
    program = "import sys; from slipstream.cli import main; from slipstream.train import training_rank; "
    program += "training_rank._SECONDS_TO_APPEAR = 1.0; main()"
    commands = [[sys.executable, "-c", program, "train", str(config)]] * 2
    results = network.run(commands, [slurm_variables(rank, 2) for rank in range(2)], own=[None, (disk, output)])
    for result in results:
        assert result.returncode == 2
        expected = f"rank 1 (node1): what rank 0 (node0) wrote to {output} isn't there"
        assert expected in result.stderr.splitlines()[-1]


@pytest.mark.grid
def test_tasks_sum_over_their_addresses(network: Network) -> None:
    """Each takes the interface between the hosts, though its own name stands for a loopback address there."""
    for result in network.run([WORKER] * 2, [slurm_variables(rank, 2) for rank in range(2)]):
        assert result.stdout == "rank 0 (node0), rank 1 (node1); eth0; sum 1\n", result.stderr


@pytest.mark.grid
def test_two_nodes_that_only_reach_the_master(make_network: Callable[[int], Network]) -> None:
    network = make_network(3)
    network.hosts.cut(1, 2)
    for result in network.run([WORKER] * 3, [slurm_variables(rank, 3) for rank in range(3)]):
        assert result.returncode == 1
        assert "error: rank 1 (node1): no connection to rank 2 (node2) at 10.77.0.3, port" in result.stderr
        assert "let firewalls pass TCP" in result.stderr


@pytest.mark.grid
def test_a_wrong_interface_is_told_on_every_rank(network: Network) -> None:
    variables = [slurm_variables(0, 2), slurm_variables(1, 2) | {"GLOO_SOCKET_IFNAME": "eth9"}]
    for result in network.run([WORKER] * 2, variables):
        assert result.returncode == 1
        expected = (
            "error: rank 1 (node1): GLOO_SOCKET_IFNAME=eth9, but there is no 'eth9'; the interfaces here are eth0, lo"
        )
        assert expected in result.stderr


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets a launcher's variables for this process, and no others."""
    for name in PLACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def given(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return given


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port at which nobody listens, and that the system gives to nobody else meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a store can listen there
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "stands_for"),
    first_of([("127.0.0.1", "127.0.0.1"), ("nowhere.invalid", "a name without an address on this machine")]),
)
def test_a_master_that_does_not_answer(
    place: Callable[..., None], free_port: int, address: str, stands_for: str
) -> None:
    port = free_port
    place(RANK=1, WORLD_SIZE=2, MASTER_ADDR=address, MASTER_PORT=port, SLIPSTREAM_RENDEZVOUS_SECONDS=1.5)
    with pytest.raises(SlipstreamError) as error:
        connect_ranks({})
    assert f"no answer from the master at MASTER_ADDR={address}, MASTER_PORT={port}" in str(error.value)
    assert f"({stands_for}) within 1.5 seconds" in str(error.value)
    assert f"nc -vz {address} {port}" in str(error.value)
    assert "SLIPSTREAM_RENDEZVOUS_SECONDS=3" in str(error.value)


def test_ranks_that_do_not_come_are_named(place: Callable[..., None], free_port: int) -> None:
    port = free_port
    place(RANK=0, WORLD_SIZE=4, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLIPSTREAM_RENDEZVOUS_SECONDS=1)
    expected = rf"connected to MASTER_ADDR=127.0.0.1, MASTER_PORT={port}, but of 4 ranks .* within 1 seconds: 1, 2, 3\."
    with pytest.raises(SlipstreamError, match=expected):
        connect_ranks({})


def test_a_port_that_is_taken(place: Callable[..., None]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        place(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLIPSTREAM_RENDEZVOUS_SECONDS=1)
        expected = rf"can't listen at .* MASTER_PORT={port} \(address already in use.*free port, such as MASTER_PORT="
        with pytest.raises(SlipstreamError, match=expected):
            connect_ranks({})


@pytest.mark.parametrize("answers", first_of([False, True]))
def test_a_stranger_at_the_masters_port(place: Callable[..., None], answers: bool) -> None:
    """It accepts and says nothing, or something that no store says; rank 1 waits no longer than it may."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            while True:
                try:
                    near = stranger.accept()[0]
                except OSError:
                    return
                with near, suppress(OSError):
                    near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        if answers:
            threading.Thread(target=answer, daemon=True).start()
        port = stranger.getsockname()[1]
        place(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLIPSTREAM_RENDEZVOUS_SECONDS=1)
        with pytest.raises(SlipstreamError) as error:
            connect_ranks({})
        stranger.shutdown(socket.SHUT_RDWR)
    assert f"reached MASTER_ADDR=127.0.0.1, MASTER_PORT={port} (127.0.0.1), but what listens there" in str(error.value)
    assert "another program holds that port on the master, or rank 0 is stopped" in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux only")
def test_ranks_of_one_machine_stay_on_it(place: Callable[..., None], free_port: int) -> None:
    """Also where the master's address is one that others can reach."""
    try:
        address = address_towards("203.0.113.1", 9)  # nobody has it, but it lies outside
    except OSError:
        address = "127.0.0.1"
    place(RANK=0, WORLD_SIZE=1, MASTER_ADDR=address, MASTER_PORT=free_port)
    meeting = connect_ranks({"steps": "4"})
    assert str(meeting) == f"rank 0 ({socket.gethostname()})"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_one_ranks_problem_is_told_with_its_name(place: Callable[..., None], free_port: int) -> None:
    place(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    with pytest.raises(SlipstreamError, match=rf"^rank 0 \({socket.gethostname()}\): too few GPUs$"):
        connect_ranks({}, problem="too few GPUs")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MASTER_ADDR": "node0"}, "RANK and WORLD_SIZE are set, but 'MASTER_PORT' is not"),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "http"}, "must be whole numbers.*'http'"),
        ({"SLIPSTREAM_RENDEZVOUS_SECONDS": "soon"}, "SLIPSTREAM_RENDEZVOUS_SECONDS=soon is not a number of seconds"),
        ({"SLIPSTREAM_RENDEZVOUS_SECONDS": "0"}, "SLIPSTREAM_RENDEZVOUS_SECONDS=0 is not"),
    ],
)
def test_bad_variables(place: Callable[..., None], variables: dict[str, str], words: str) -> None:
    place(RANK=0, WORLD_SIZE=2, **variables)
    with pytest.raises(SlipstreamError, match=words):
        connect_ranks({})


def test_differences_name_the_ranks_of_each_value() -> None:
    facts = [{"torch": "2.13"}, {"torch": "2.13"}, {"torch": "2.12", "new": "1"}, {"torch": "2.13"}]
    hosts = ["a", "a", "b", "c"]
    assert differences(facts, hosts) == [
        "torch: 2.13 on ranks 0-1 (a), rank 3 (c); 2.12 on rank 2 (b)",
        "new: absent on ranks 0-1 (a), rank 3 (c); 1 on rank 2 (b)",
    ]
    assert differences([facts[0]] * 3, ["a", "b", "c"]) == []


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("gpu-[07-12,20],login1", "gpu-07"),
        ("login1,gpu-[07-12]", "login1"),
        ("rack[2,4]node[03-05]-ib,x", "rack2node03-ib"),
    ],
)
def test_the_master_is_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_slurms_variables_in_torchruns_names() -> None:
    step = slurm_variables(rank=5, num_nodes=3) | {
        "SLURM_NODEID": "2",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "1,3,2",
    }
    assert is_task(step)
    assert torchrun_variables(step) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "14711",
    }
    assert torchrun_variables(step | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"})["LOCAL_WORLD_SIZE"] == "2"
    given = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}
    assert torchrun_variables(step | given).items() >= given.items()
    with pytest.raises(SlipstreamError, match="SLURM_STEP_NODELIST"):
        torchrun_variables({name: value for name, value in step.items() if name != "SLURM_STEP_NODELIST"})


def test_a_batch_script_and_a_single_task_are_no_tasks() -> None:
    assert not is_task({"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert not is_task(slurm_variables(rank=0, num_nodes=1))


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux only")
def test_addresses_and_their_interfaces() -> None:
    assert address_towards("localhost", 80) in ("127.0.0.1", "::1")
    assert find_interface("127.0.0.1") == "lo"
    assert find_address("lo") == "127.0.0.1"
    assert find_interface("203.0.113.7") is None
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("fe80::1%eth0")


def test_the_slurm_example_gives_a_run_that_fits(tmp_path: Path) -> None:
    """The script runs as it stands, with `srun` printing what it is given."""
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    prelude = tmp_path / "prelude"
    prelude.write_text("srun() { printf '%s\\n' \"$@\"; }\n")
    variables = {"BASH_ENV": str(prelude), "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711"}
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    result = subprocess.run(["bash", script], env=clean_environment() | variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    _, program, command, config, *overrides = result.stdout.splitlines()
    assert (program, command) == (".venv/bin/slipstream", "train")
    loaded = load_config(ROOT / config, overrides)
    options = dict(re.findall(r"^#SBATCH --(nodes|ntasks-per-node)=(\d+)$", script.read_text(), re.MULTILINE))
    assert loaded.pipeline.num_ranks == int(options["nodes"]) * int(options["ntasks-per-node"])
    assert loaded.training.output == Path("runs/slurm-4711")


def test_the_kubernetes_example_gives_a_run_that_fits(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "kubernetes" / "pytorchjob.yaml").read_text()
    settings, volume, job = yaml.safe_load_all(text)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {"RANK": "0", "MASTER_ADDR": "slipstream-demo-master-0", "MASTER_PORT": "23456"}
    program, *arguments = (
        re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in container["command"]
    )
    assert program == "torchrun"
    given = get_args_parser().parse_args(arguments)
    assert given.module
    command, config, *overrides = given.training_script_args
    assert (given.training_script, command) == ("slipstream", "train")

    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["config"]["configMap"]["name"] == settings["metadata"]["name"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    (tmp_path / "train.yaml").write_text(settings["data"][Path(config).name])
    loaded = load_config(tmp_path / "train.yaml", overrides)
    assert Path(config).parent == mounts["config"]
    assert loaded.training.output.is_relative_to(mounts["runs"])
    num_pods = sum(each["replicas"] for each in replicas.values())
    assert num_pods == int(given.nnodes)
    assert loaded.pipeline.num_ranks == num_pods * int(given.nproc_per_node)
    check_layers(loaded, load_model_config(loaded.model))
