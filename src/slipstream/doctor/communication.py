"""What ranks need to reach each other on this machine: gloo, NCCL and the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from slipstream.doctor.finding import Finding, error_text

_SECONDS = 5


def find_backends() -> Iterator[Finding]:
    """Yields whether this PyTorch has gloo, over which processors exchange, and NCCL, over which GPUs do."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        how = "several ranks can't run: install a PyTorch with gloo, such as those of pytorch.org/get-started"
        yield Finding("gloo", "not in this PyTorch", how)
    else:
        yield Finding("gloo", "available")
    if not (dist.is_available() and dist.is_nccl_available()):
        several = torch.cuda.is_available() and torch.cuda.device_count() > 1
        yield Finding("NCCL", "not in this PyTorch", advice="GPUs then can't exchange" if several else None)
        return
    number = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Finding("NCCL", ".".join(map(str, number)) if isinstance(number, tuple) else str(number))


def find_loopback() -> Iterator[Finding]:
    """Yields whether a store at the loopback address, through which local ranks find each other, answers."""
    import torch.distributed as dist

    from slipstream.watchdog import listen_at, loopback_address

    address = loopback_address()
    try:
        listening = listen_at(address)
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_SECONDS),
            master_listen_fd=listening.detach(),
        )
        store.set("here", "yes")
        answer = store.get("here")
    except (OSError, RuntimeError) as error:
        yield _unreachable(address, error_text(error))
        return
    if answer == b"yes":
        yield Finding("loopback", f"a store at {address} answers")
    else:
        yield _unreachable(address, repr(answer))


def _unreachable(address: str, what: str) -> Finding:
    how = "local ranks meet there: bring the interface up (ip link set lo up), and let firewalls pass it"
    return Finding("loopback", f"no store answers at {address}", f"{what}; {how}")
