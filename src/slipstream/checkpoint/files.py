"""Files with a checksum, verified when they are read, and the check that their numbers are finite."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.foreign_text import parse_json

_BLOCK = 2**23  # bytes read at a time


class DamagedError(Exception):
    """A file differs from what was written; the message says which file and how."""

    what = "is damaged"  # the checkpoint


class OtherFormatError(DamagedError):
    """A file is of a format that this version doesn't read; the message says which, and how to go on."""

    what = "can't be read"


class FileDigest(NamedTuple):
    """The size of a file in bytes, and its CRC-32 in eight hexadecimal digits."""

    size: int
    crc32: str


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> FileDigest:
    """Writes the blocks to a new file, which is on the disk when this returns."""
    size, checksum = 0, 0
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
            size = size + len(block)
            checksum = zlib.crc32(block, checksum)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size, f"{checksum:08x}")


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_file(path: Path, digest: FileDigest) -> None:
    """Raises DamagedError where the file is missing, or has another size or other bytes."""
    with _damage_named(path):
        size = path.stat().st_size
        if size != digest.size:
            how = "is truncated" if size < digest.size else "has grown"
            raise DamagedError(f"{path.name} {how}: {size:,} bytes instead of {digest.size:,}")
        checksum = 0
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                checksum = zlib.crc32(block, checksum)
    if f"{checksum:08x}" != digest.crc32:
        raise DamagedError(f"{path.name} has been altered: its checksum is {checksum:08x} instead of {digest.crc32}")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON object as a file that appears complete; its first entry is the checksum of the rest."""
    body = json.dumps(record)[1:].encode()
    unfinished = path.with_suffix(".unfinished")
    write_file(unfinished, [_head(body), body])
    unfinished.replace(path)


def read_record(path: Path) -> dict[str, Any]:
    """Returns the record of `write_record`; raises DamagedError where the file differs from it."""
    with _damage_named(path):
        data = path.read_bytes()
    body = data[len(_head(b"")) :]
    if data != _head(body) + body:
        raise DamagedError(f"{path.name} is truncated or has been altered")
    try:
        record = parse_json(data)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "crc32" not in record:
        raise DamagedError(f"{path.name} isn't a JSON object, though its checksum is right")
    del record["crc32"]
    return record


def _head(body: bytes) -> bytes:
    return f'{{"crc32": "{zlib.crc32(body):08x}", '.encode()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raises DamagedError where the file can't be read."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name} can't be read: {error.strerror}") from None


def is_finite(tensor: Tensor) -> bool:
    """Returns whether no element is infinite or not a number.

    A sum is finite only where all of its terms are, and it takes a fraction of the time of looking at each of them,
    which is left for the sums that have overflowed.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def find_non_finite(path: Path) -> str | None:
    """Returns the name of a tensor in a safetensors file that isn't finite, None where all are. Raises DamagedError
    where it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            return next((name for name in file.keys() if not is_finite(file.get_tensor(name))), None)  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedError(f"{path.name} isn't a safetensors file: {error}") from None


def describe_non_finite(name: str) -> str:
    """Returns the part of a sentence that says a tensor isn't finite."""
    return f"{name} has elements that are infinite or not numbers"
