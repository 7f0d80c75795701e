"""MANIFEST.json: size and checksum of every file of a checkpoint. It is written last and used to detect damage.

The checksum is zlib's CRC-32. It is in the standard library, runs at several GB/s and lets other threads run. It
detects every single flipped bit and every burst of up to 32 bits, and misses one in 2^32 of all other damage. Sizes
are compared as well. It protects against accidents (a full disk, a killed copy, failing hardware), not against an
attacker, who could write a matching manifest. Files from untrusted sources are safe for another reason: safetensors
and JSON are pure data formats, and both are validated before use.
"""

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.plain_data import NotPlainData, parse_json, read_bytes
from serried.records.ranged_files import block_sums

MANIFEST = "MANIFEST.json"
VERSION = 2
"""Version 2 has a checksum for each MiB of the tensor files, for checkpoints in a bucket. Others are of version 1."""

_CHUNK_BYTES = 4 * 2**20
_LARGEST_MANIFEST_BYTES = 64 * 2**20


class FileRecord(NamedTuple):
    """Size and checksum of a file when it was written."""

    size: int
    """Size in bytes."""
    crc32: int
    """``zlib.crc32`` of the full file."""
    blocks: str = ""
    """Checksums of each MiB, see ``BlockSums``; empty for a file that is only read as a whole."""


class Damaged(Exception):
    """Raised if a checkpoint is damaged. The message describes the file and the damage in one line."""


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Write MANIFEST.json for ``files`` (by name) of ``folder``, and flush it and the folder's entries to the disk.

    Raises:
        OSError: it cannot be written.
        ValueError: a name is not a file name in ``folder`` itself.
    """
    for name in files:
        if not _is_plain(name):
            raise ValueError(f"{name!r} cannot be in a manifest")
    with (folder / MANIFEST).open("wb") as file:
        file.write(manifest_text(files))
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(folder)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the records of a checkpoint's files by name. The files themselves are not read.

    Raises:
        Damaged: the manifest is missing, cannot be read, or has been changed.
    """
    path = folder / MANIFEST
    try:
        text = read_bytes(path, _LARGEST_MANIFEST_BYTES)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    except NotPlainData as error:
        raise Damaged(f"{path} cannot be used: {error}") from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path | str) -> dict[str, FileRecord]:
    """Return the records in the content of a manifest. ``path``: its place, for messages. Raises ``Damaged``."""
    try:
        content = parse_json(text)
    except NotPlainData as error:
        raise Damaged(f"{path} cannot be used: {error}") from None
    if isinstance(content, dict) and type(content.get("version")) is int and content["version"] > VERSION:
        raise Damaged(f"{path} has version {content['version']}, but this version of serried reads version {VERSION}")
    try:
        files = {name: _record(name, entry) for name, entry in content["files"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise Damaged(f"{path} does not list files with sizes and checksums") from None
    # The text is a function of its content, including the checksum, so every changed byte is detected, even a space.
    if text != manifest_text(files):
        raise Damaged(f"{path} has been changed: its {len(text)} bytes do not match its checksum")
    return files


def check_file(folder: Path, name: str, record: FileRecord) -> None:
    """Read the full file and compare it with its ``record``. Other threads can run during the read.

    Raises:
        Damaged: it is missing, cannot be read, or has another size or checksum.
    """
    check_size(folder, name, record)
    try:
        found = record_of(folder / name)
    except OSError as error:
        raise Damaged(f"{folder / name} cannot be read: {error.strerror}") from None
    if found[:2] != record[:2]:
        raise Damaged(f"{folder / name} has checksum {found.crc32:08x} instead of {record.crc32:08x}")


def check_files(folder: Path, wanted: Callable[[str], bool]) -> dict[str, FileRecord]:
    """Compare the files whose names satisfy ``wanted`` with their records, and return these records.

    Raises the same errors as ``check_file`` and ``read_manifest``.
    """
    records = {name: record for name, record in read_manifest(folder).items() if wanted(name)}
    for name, record in records.items():
        check_file(folder, name, record)
    return records


def check_size(folder: Path, name: str, record: FileRecord) -> None:
    """Compare only the file's size with its ``record``. The file is not opened.

    Raises:
        Damaged: it is missing, not a regular file, or has another size.
    """
    path = folder / name
    try:
        status = path.stat()
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path} is not a regular file")
    if status.st_size != record.size:
        raise Damaged(f"{path} has {status.st_size} bytes instead of {record.size}")


def record_of(path: Path) -> FileRecord:
    """Return the size and checksum of a file, read from the disk in chunks of a few MiB."""
    size = crc32 = 0
    piece = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(piece):
            crc32 = zlib.crc32(piece[:read], crc32)
            size += read
    return FileRecord(size, crc32)


def fsync_folder(path: Path) -> None:
    """Sync the entries of a folder to the disk: files created, renamed and removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems do not support this for folders
            raise
    finally:
        os.close(descriptor)


def manifest_text(files: Mapping[str, FileRecord]) -> bytes:
    """Return the canonical text of a manifest of ``files``."""
    entries = {
        name: {"size": record.size, "crc32": f"{record.crc32:08x}"}
        | ({"blocks": record.blocks} if record.blocks else {})
        for name, record in sorted(files.items())
    }
    crc32 = f"{zlib.crc32(json.dumps(entries).encode()):08x}"
    version = VERSION if any(record.blocks for record in files.values()) else 1
    return (json.dumps({"version": version, "files": entries, "crc32": crc32}, indent=2) + "\n").encode()


def _is_plain(name: str) -> bool:
    """Return whether ``name`` can be a file in the folder itself, other than the manifest, and be shown on one line."""
    return name not in ("", ".", "..", MANIFEST) and name.isprintable() and not set(name) & {"/", "\\"}


def _record(name: str, entry: Any) -> FileRecord:
    size, crc32 = entry["size"], entry["crc32"]
    has_values = type(size) is int and size >= 0 and re.fullmatch("[0-9a-f]{8}", crc32, re.ASCII)
    if not has_values or not _is_plain(name):
        raise ValueError(name)
    blocks = entry.get("blocks", "")
    if blocks:
        block_sums(blocks, size)
    return FileRecord(size, int(crc32, 16), blocks)
