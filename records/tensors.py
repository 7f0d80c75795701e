"""safetensors files of checkpoints and prepared data: written as a stream, read by slices. A file cannot run code.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; the header, a
JSON object ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` that may be padded with spaces; then the bytes
of the tensors, row-major and little-endian, without gaps. The header is written by hand because the library wants every
tensor of a file in memory at once. The tensors are read by hand because the library (0.8) hands out mappings of the
file: one that is cut short, or on a disk that fails, would then kill the process where it could be an error, and what
is mapped counts as memory of this process.
"""

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from serried.configs.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of the dtypes that torch has."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER_BYTES = 100_000_000  # as in the safetensors library
_LARGEST_TENSOR_BYTES = 2**62  # more than any disk holds; keeps the arithmetic of torch from overflowing
_MOST_DIMS = 64
_READ_BYTES = 4 * 2**20  # in one call: as fast as larger ones, and other threads wait for less


@dataclass(frozen=True)
class TensorSpec:
    """What a file says of a tensor before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a tensor of no dims."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values in the file."""
        return self.numel * self.dtype.itemsize

    def plain(self) -> list[Any]:
        """Return it as JSON data."""
        return [self.name, _NAMES[self.dtype], list(self.shape)]

    @classmethod
    def of_plain(cls, data: Sequence[Any]) -> "TensorSpec":
        """Return what ``plain`` was made of."""
        name, dtype, shape = data
        return cls(name, DTYPES[dtype], tuple(shape))


def header(specs: Sequence[TensorSpec], size: int = 0) -> bytes:
    """The beginning of a safetensors file: it, followed by the tensors' bytes in the order of ``specs``, is the file.

    Its length is a multiple of 8, so that tensors of one dtype lie aligned in the file. It is padded to ``size``.

    Raises:
        ValueError: a name occurs twice, a dtype has no name in the format, or the header is larger than a reader takes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        if spec.name in entries:
            raise ValueError(f"tensor {spec.name!r} occurs twice in one file")
        if spec.dtype not in _NAMES:
            raise ValueError(f"tensor {spec.name!r} is {spec.dtype}, for which safetensors has no name")
        end = begin + spec.nbytes
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(max(size - 8, len(text) + -len(text) % 8))
    if len(text) > _LARGEST_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes for {len(specs)} tensors; at most {_LARGEST_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def index_json(files: Mapping[str, Sequence[TensorSpec]]) -> str:
    """Text of ``*.safetensors.index.json`` for tensors that lie in several ``files``, as transformers writes it.

    Raises:
        ValueError: a tensor is in two files.
    """
    weight_map: dict[str, str] = {}
    for file, specs in files.items():
        for spec in specs:
            if spec.name in weight_map:
                raise ValueError(f"tensor {spec.name!r} is both in {weight_map[spec.name]} and in {file}")
            weight_map[spec.name] = file
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU ``tensor`` of any dtype and shape, shared with it: for files to write and to read.

    Raises:
        ValueError: it is not contiguous or not on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"bytes of a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}")
    # numpy's arrays are buffers; its types say so from Python 3.12 on.
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class TensorFolder:
    """The tensors of ``<stem>.safetensors``, or of the files that ``<stem>.safetensors.index.json`` names.

    Opening it reads and checks every header, and no values. The files may come from strangers: whatever they hold ends
    in tensors or in a ``UserError``. May be used by several threads at once.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        """Read the headers.

        Raises:
            UserError: there are no such files, or one of them is not as the format wants it.
        """
        self.folder = folder
        self.specs: dict[str, TensorSpec] = {}
        """By name, in the order of the index, or of the values in the single file."""
        self.file_of: dict[str, str] = {}
        """Name of a tensor -> name of its file."""
        self.files: list[str] = []
        """Names of the files that were read, the index last."""
        self._begins: dict[str, int] = {}
        single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        if _is_there(folder / single):
            self.files = [single]
            self._take(single, None)
        elif _is_there(folder / index):
            weight_map = _read_index(folder / index)
            self.file_of = weight_map
            self.files = [*dict.fromkeys(weight_map.values()), index]
            for file in self.files[:-1]:
                self._take(file, index)
            self.specs = {name: self.specs[name] for name in weight_map}
        else:
            raise UserError(_nothing_to_read(folder, single, index))

    def _take(self, file: str, index: str | None) -> None:
        path = self.folder / file
        if index is not None and not _is_there(path):
            raise UserError(f"{self.folder / index} names the file {_shown(file)}, which is not there; copy it too")
        found = read_header(path)
        if index is None:
            self.file_of = dict.fromkeys(found, file)
        for name, of in self.file_of.items():
            if of != file:
                continue
            if name not in found:
                raise UserError(f"{self.folder / str(index)} says that {_shown(name)} is in {file}, where it is not")
            self.specs[name], self._begins[name] = found[name]

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """A copy of ``rows`` rows of tensor ``name`` along its first dim, from ``first_row`` on; None: to the end.

        On the CPU, [rows, *the other dims]. A tensor without dims is read whole.

        Raises:
            KeyError: there is no such tensor.
            ValueError: it has no such rows.
            UserError: the file cannot be read, or has become shorter.
        """
        shape = self.specs[name].shape
        available = shape[0] if shape else 1
        count = available - first_row if rows is None else rows
        if first_row < 0 or count < 0 or first_row + count > available or (not shape and count != 1):
            raise ValueError(f"rows {first_row} to {first_row + count} of {name!r}, which is {list(shape)}")
        row = math.prod(shape[1:])
        flat = self.read_elements(name, first_row * row, count * row)
        return flat.view(count, *shape[1:]) if shape else flat.view(())

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """A copy of ``count`` elements of tensor ``name``, taken as a flat one, from ``first`` on; CPU, [count].

        Raises: as ``read``.
        """
        spec = self.specs[name]
        if first < 0 or count < 0 or first + count > spec.numel:
            raise ValueError(f"elements {first} to {first + count} of {name!r}, which has {spec.numel}")
        values = torch.empty(count, dtype=spec.dtype)
        position = self._begins[name] + first * spec.dtype.itemsize
        remaining = tensor_bytes(values)
        path = self.folder / self.file_of[name]
        # preadv lets other threads run, and writes where it is told to: nothing is held twice.
        try:
            with path.open("rb", buffering=0) as file:
                while remaining:
                    read = os.preadv(file.fileno(), [remaining[:_READ_BYTES]], position)
                    if read == 0:
                        _refuse(path, f"it has become shorter and ends at byte {position}, inside of {_shown(name)}")
                    remaining, position = remaining[read:], position + read
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        return values


class Entry(NamedTuple):
    """One tensor in a file."""

    spec: TensorSpec
    begin: int  # byte of the file


def read_header(path: Path) -> dict[str, Entry]:
    """Return every tensor of a file with the place of its first byte, in the order of their bytes.

    Raises:
        UserError: the file cannot be read, or is not as the format wants it.
    """
    text, file_bytes = _read_header_text(path)
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "its __metadata__ is not a map from text to text")
    data_begin, data_bytes = 8 + len(text), file_bytes - 8 - len(text)
    found = sorted(
        ((*_read_entry(path, name, entry), name) for name, entry in entries.items()), key=lambda item: item[:2]
    )
    expected = 0
    for begin, end, dtype, shape, name in found:
        if begin != expected:
            what = "overlaps the one before it" if begin < expected else "leaves a gap before it"
            _refuse(path, f"{_shown(name)} {what}: it begins at byte {begin} of the data instead of {expected}")
        if end > data_bytes:
            _refuse(path, f"{_shown(name)} ends at byte {end} of the data, of which there are {data_bytes}: cut short?")
        needed = math.prod(shape) * dtype.itemsize
        if end - begin != needed:
            _refuse(path, f"{_shown(name)} of shape {_shown(shape)} takes {needed} bytes, but {end - begin} are given")
        expected = end
    if expected != data_bytes:
        _refuse(path, f"its header describes {expected} bytes of data, but there are {data_bytes}")
    return {name: Entry(TensorSpec(name, dtype, shape), data_begin + begin) for begin, _, dtype, shape, name in found}


def _read_header_text(path: Path) -> tuple[bytes, int]:
    """The header's text and the size of the file. Reads no more than there can be of it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                _refuse(path, "it is not a regular file")
            start = file.read(8)
            length = int.from_bytes(start, "little")
            limit = min(status.st_size - 8, _LARGEST_HEADER_BYTES)
            if len(start) < 8 or length > limit:
                known = _known_format(start)
                _refuse(path, known or f"its header would be {length} bytes, with {max(limit, 0)} at most")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(text) != length:
        _refuse(path, f"it has become shorter: {len(text)} of {length} bytes of its header are there")
    return text, status.st_size


def _read_entry(path: Path, name: str, entry: Any) -> tuple[int, int, torch.dtype, tuple[int, ...]]:
    """(begin, end, dtype, shape) of one entry of a header, each of the right type and range by itself."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"{_shown(name)} has not just a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(path, f"{_shown(name)} has the dtype {_shown(dtype)}, which is none of {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(shape) > _MOST_DIMS:
        _refuse(path, f"{_shown(name)} has the shape {_shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, f"{_shown(name)} has the data_offsets {_shown(offsets)}")
    # Zeros left out: [0, 2**40, 2**40] has no bytes, and yet torch cannot count its strides.
    if math.prod(size for size in shape if size) * DTYPES[dtype].itemsize > _LARGEST_TENSOR_BYTES:
        _refuse(path, f"{_shown(name)} has the shape {_shown(shape)}")
    return offsets[0], offsets[1], DTYPES[dtype], tuple(shape)


def _read_index(path: Path) -> dict[str, str]:
    """The ``weight_map``: name of a tensor -> name of a file in the same folder."""
    try:
        if (size := path.stat().st_size) > _LARGEST_HEADER_BYTES:
            _refuse(path, f"it has {size} bytes, with {_LARGEST_HEADER_BYTES} at most")
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    weight_map = _parse(path, text).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(path, "it has no weight_map")
    for file in weight_map.values():
        # Anything else could lead out of the folder, or name what no file is called.
        plain = isinstance(file, str) and file.isprintable() and not set(file) & {"/", "\\"}
        if not plain or not file.endswith(".safetensors"):
            _refuse(path, f"it names the file {_shown(file)}; only *.safetensors beside it are read")
    return weight_map


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, entry in pairs:
            if name in entries:
                _refuse(path, f"it has {_shown(name)} twice")
            entries[name] = entry
        return entries

    try:
        value = json.loads(text.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):  # ValueError: JSON or UTF-8 that is none, or a number of thousands of digits
        value = None
    if not isinstance(value, dict):
        _refuse(path, f"the {len(text)} bytes that should be a JSON object are not")
    return value


def _known_format(start: bytes) -> str | None:
    """What the file is instead, when its first eight bytes tell."""
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return f"it looks like a pickle (torch.save), which is never loaded; {_CONVERT}"
    if start == b"version ":
        return "it is a pointer of git-lfs; fetch the file itself with: git lfs pull"
    return None


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _is_there(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


_CONVERT = (
    "convert it where you trust it: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER, safe_serialization=True)"
)


def _nothing_to_read(folder: Path, single: str, index: str) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"cannot read the folder {folder}: {error.strerror}"
    text = f"{folder} has neither {single} nor {index}"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    return f"{text}; {_shown(pickles[0])} is a pickle, which is never loaded; {_CONVERT}" if pickles else text


def _shown(value: Any) -> str:
    """What a stranger wrote, on one line and not too long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UserError(f"{path} cannot be used: {reason}")
