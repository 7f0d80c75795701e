"""safetensors files of checkpoints and prepared data, written as a stream and read in slices. Such files cannot run
code.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; the
header, a JSON object ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` that may be padded with
spaces; then the bytes of the tensors, row-major and little-endian, without gaps.

The safetensors library only checks headers here. It is not used for writing, since it needs every tensor of a
file in memory at once. It is not used for reading, since it (0.8) maps the file: if the file is cut short or the
disk fails, the process is killed instead of getting an error, and mapped pages count as its memory.
"""

import json
import math
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.hugging_face.quantization import quantization_in
from serried.configs.hugging_face.text_part import has_other_parts, name_in_text_part
from serried.configs.plain_data import NotPlainData, read_json
from serried.records.dequantized_weights import Values, dequantized
from serried.records.ranged_files import ranged_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
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
"""dtypes of torch by their name in the format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER_BYTES = 100_000_000  # as in the safetensors library
_LARGEST_TENSOR_BYTES = 2**62  # more than any disk holds; keeps the arithmetic of torch from overflowing
_MOST_DIMS = 64
_RANGES_AT_ONCE = 8  # of a file in a bucket; one connection uses only a fraction of the bandwidth
_READ_BYTES = 4 * 2**20  # bytes per call: as fast as larger ones, and other threads wait for less time


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of its values in the file, in bytes."""
        return self.numel * self.dtype.itemsize

    def plain(self) -> list[Any]:
        """Return the spec as JSON data."""
        return [self.name, _NAMES[self.dtype], list(self.shape)]

    @classmethod
    def of_plain(cls, data: Sequence[Any]) -> "TensorSpec":
        """Return the spec whose ``plain()`` is ``data``."""
        name, dtype, shape = data
        return cls(name, DTYPES[dtype], tuple(shape))


def header(specs: Sequence[TensorSpec]) -> bytes:
    """Return the beginning of a safetensors file, to be followed by the bytes of the tensors in the order of
    ``specs``.

    Its length is a multiple of 8, so that tensors of one dtype are aligned in the file.

    Raises:
        ValueError: the format has no name for a dtype.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise ValueError(f"tensor {spec.name!r} is {spec.dtype}, and safetensors has no name for this dtype")
        end = begin + spec.nbytes
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_json(files: Mapping[str, Sequence[TensorSpec]]) -> str:
    """Return the text of ``*.safetensors.index.json`` for tensors in several ``files``, as transformers writes it."""
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU ``tensor`` of any dtype and shape as bytes, to be written to a file or
    read into."""
    # numpy's arrays are buffers; numpy's annotations say so from Python 3.12 on.
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class TensorFolder:
    """The tensors of ``<stem>.safetensors``, or of the files that ``<stem>.safetensors.index.json`` names.

    Opening it reads and checks every header, but no values. Reading files from untrusted sources returns
    tensors or raises ``UserError``. Several threads may use it at once.

    If the ``config.json`` of a model says that weights are quantized, in a format that is known here, the folder
    contains the dequantized weights instead. If it says that the model reads images too, the folder contains the
    tensors of its text part, under their names in a text-only model.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        """Read the headers. Raises ``UserError`` if the files do not exist, or one of them violates the format."""
        self.folder = folder
        self.files: list[str] = []
        """Names of the files that were read, with the index last."""
        self._values: dict[str, Values] = {}
        single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        if _is_there(folder / single):
            self.files = [single]
            self._values = dict(self._found(single))
        elif _is_there(folder / index):
            weight_map = _read_index(folder / index)
            self.files = [*dict.fromkeys(weight_map.values()), index]
            found = {file: self._listed(file, index) for file in self.files[:-1]}
            for name, file in weight_map.items():
                if name not in found[file]:
                    raise UserError(
                        f"{folder / index} lists the tensor {_shown(name)} in {file}, but that file does not contain "
                        "it; copy the files of the model again"
                    )
                self._values[name] = found[file][name]
        else:
            raise UserError(_nothing_to_read(folder, single, index))
        if stem == "model" and has_other_parts(folder):
            named = {name_in_text_part(name): values for name, values in self._values.items()}
            self._values = {name: values for name, values in named.items() if name is not None}
        if stem == "adapter_model":
            self._values = _without_duplicates(self._values, folder)
        quantization = quantization_in(folder) if stem == "model" else None
        self.is_dequantized = quantization is not None
        """Whether weights in the files are quantized, and dequantized while they are read."""
        if quantization is not None:
            try:
                self._values = dequantized(self._values, quantization)
            except ValueError as error:
                raise UserError(f"{folder} cannot be used: {error}; copy the files of the model again") from None
        self.specs = {name: TensorSpec(name, each.dtype, each.shape) for name, each in self._values.items()}
        """Specs by name, in the order of the index, or of the values in a single file."""

    def named_like(self, wanted: Collection[str]) -> "TensorFolder":
        """Prefix all names with the first part of ``wanted`` names if they lack it, as transformers does for a model
        that was saved without its head (GPT-2 on the Hub). Return ``self``."""
        prefix = next((name.partition(".")[0] for name in wanted if name.partition(".")[2] in self.specs), None)
        if prefix is None or any(name.startswith(f"{prefix}.") for name in self.specs):
            return self
        self.specs = {f"{prefix}.{name}": replace(spec, name=f"{prefix}.{name}") for name, spec in self.specs.items()}
        self._values = {f"{prefix}.{name}": values for name, values in self._values.items()}
        return self

    @property
    def reads_at_once(self) -> int:
        """Number of reads at a time that use the full bandwidth: 1 for a disk."""
        is_ranged = any(ranged_file(self.folder / name) is not None for name in self.files)
        return _RANGES_AT_ONCE if is_ranged else 1

    def rename(self, name: str, new: str) -> None:
        """Rename the tensor ``name`` to ``new``."""
        self.specs[new] = replace(self.specs.pop(name), name=new)
        self._values[new] = self._values.pop(name)

    def _listed(self, file: str, index: str) -> dict[str, "_Stored"]:
        if not _is_there(self.folder / file):
            raise UserError(f"{self.folder / index} names {_shown(file)}, which does not exist; copy that file too")
        return self._found(file)

    def _found(self, file: str) -> dict[str, "_Stored"]:
        path = self.folder / file
        return {name: _Stored(path, *entry) for name, entry in read_header(path).items()}

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """Return a copy of ``count`` elements of tensor ``name``, flattened, starting at ``first``: a CPU tensor,
        [count].

        Raises the same errors as ``read``.
        """
        spec = self.specs[name]
        if first < 0 or count < 0 or first + count > spec.numel:
            raise ValueError(f"elements {first} to {first + count} of {name!r} with {spec.numel} elements")
        return self._values[name].read(first, count)


def _without_duplicates(values: Mapping[str, Values], folder: Path) -> dict[str, Values]:
    """Return ``values`` without the tensors that PEFT stores in addition for an embedding that was resized and is saved
    in full: the original module, and the saved module a second time."""
    kept = {name: each for name, each in values.items() if ".original_module." not in name}
    for name, duplicate in [*kept.items()]:
        plain = name.replace(".modules_to_save.", ".")
        twin = kept.get(plain) if plain != name else None
        if twin is not None and (twin.dtype, twin.shape) == (duplicate.dtype, duplicate.shape):
            kept[plain] = _StoredTwice(twin, duplicate, f"{folder}: {name} and {plain}")
            del kept[name]
    return kept


class _StoredTwice(NamedTuple):
    """A tensor that is stored under two names, which must have the same values."""

    values: Values
    duplicate: Values
    names: str

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, first: int, count: int) -> Tensor:
        found = self.values.read(first, count)
        if not found.view(torch.uint8).equal(self.duplicate.read(first, count).view(torch.uint8)):
            raise UserError(f"{self.names} have different values, and only one can be used; save the adapters again")
        return found


class _Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    spec: TensorSpec
    begin: int  # byte of the file

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def read(self, first: int, count: int) -> Tensor:
        values = torch.empty(count, dtype=self.dtype)
        position = self.begin + first * self.dtype.itemsize
        remaining = tensor_bytes(values)
        if (ranged := ranged_file(self.path)) is not None:
            ranged.read_into(position, remaining)
            return values
        # preadv lets other threads run, and writes directly into the tensor: no second copy exists.
        try:
            with self.path.open("rb", buffering=0) as file:
                while remaining:
                    read = os.preadv(file.fileno(), [remaining[:_READ_BYTES]], position)
                    if read == 0:
                        end = f"it ends at byte {position}, in {_shown(self.spec.name)}"
                        _refuse(self.path, f"it was truncated while open: {end}")
                    remaining, position = remaining[read:], position + read
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        return values


class Entry(NamedTuple):
    """A tensor in a file."""

    spec: TensorSpec
    begin: int  # byte of the file


def read_header(path: Path) -> dict[str, Entry]:
    """Return every tensor of a file with the offset of its first byte, in the order of their bytes. Raises
    ``UserError`` if the file cannot be read or violates the format."""
    try:
        if not _is_there(path):
            _refuse(path, "it is not a regular file")
        with path.open("rb") as file:
            start = file.read(8)
            if known := _known_format(start):
                _refuse(path, known)
            with safe_open(path, "numpy"):  # checks the header: types, sizes, no gaps, nothing left over
                text = file.read(int.from_bytes(start, "little"))
        entries = json.loads(text)
    except (SafetensorError, ValueError, RecursionError) as error:
        _refuse(path, f"{_shown(str(error))}; the file may be truncated; copy it again")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    entries.pop("__metadata__", None)
    found: dict[str, Entry] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            _refuse(path, f"the tensor {_shown(name)} has dtype {entry['dtype']}, not one of {', '.join(DTYPES)}")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        # Without zeros: [0, 2**40, 2**40] has no bytes, and yet torch cannot compute its strides.
        if len(shape) > _MOST_DIMS or math.prod(filter(None, shape)) * dtype.itemsize > _LARGEST_TENSOR_BYTES:
            _refuse(path, f"the tensor {_shown(name)} has the shape {_shown(entry['shape'])}, which is too large")
        found[name] = Entry(TensorSpec(name, dtype, shape), 8 + len(text) + entry["data_offsets"][0])
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Return the ``weight_map``: file name in the same folder, by tensor name."""
    try:
        weight_map = read_json(path, _LARGEST_HEADER_BYTES).get("weight_map")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except NotPlainData as error:
        _refuse(path, str(error))
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(path, "it has no weight_map")
    for file in weight_map.values():
        # Any other name could lead out of the folder, or cannot be a file name.
        plain = isinstance(file, str) and file.isprintable() and not set(file) & {"/", "\\"}
        if not plain or not file.endswith(".safetensors"):
            _refuse(path, f"it names the file {_shown(file)}; only *.safetensors files in the same folder are read")
    return weight_map


def _known_format(start: bytes) -> str | None:
    """Return the file's actual format if its first eight bytes show it; None otherwise.

    A pickle begins with 0x80 and its protocol. So does the length of a header of 640, 896, 1152 or 1408 bytes,
    but the upper bytes of a length are 0, which no pickle has.
    """
    is_pickle = start.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")) and any(start[3:])
    if is_pickle or start.startswith(b"PK\x03\x04"):
        return f"it looks like a pickle (torch.save), which is never loaded; {_CONVERT}"
    if start == b"version ":
        return "it is a git-lfs pointer instead of the file; download the file with: git lfs pull"
    return None


def _is_there(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


_CONVERT = (
    "if you trust it, convert it: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER, safe_serialization=True)"
)


def _nothing_to_read(folder: Path, single: str, index: str) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"cannot read the folder {folder}: {error.strerror}"
    text = f"{folder} has neither {single} nor {index}"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        return f"{text}; {_shown(pickles[0])} is a pickle, which is never loaded; {_CONVERT}"
    if single == "model.safetensors":
        return f"{text}; use the folder of a model saved as safetensors, with save_pretrained(FOLDER)"
    return f"{text}; copy the missing files too"


def _shown(value: Any) -> str:
    """Return an untrusted value on one line, shortened."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UserError(f"{path} cannot be used: {reason}")
