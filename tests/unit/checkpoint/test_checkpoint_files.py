"""What a checkpoint is made of: safetensors files that no stranger can abuse, a manifest that finds every damage, and
retention that never loses the last good one."""

import json
import math
import os
import pickle
import random
import shutil
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from serried.configs.errors import UserError
from serried.records.ranged_files import BlockSums, block_sums
from serried.records.safetensors_files import (
    DTYPES,
    TensorFolder,
    TensorSpec,
    header,
    index_json,
    read_header,
    tensor_bytes,
)
from serried.trainer.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileRecord,
    check_file,
    fsync_folder,
    read_manifest,
    record_of,
    write_manifest,
)
from serried.trainer.checkpoint.retention import (
    committed,
    deleting_name,
    folder_name,
    partial_name,
    prune,
    step_of,
    sweep,
)


@contextmanager
def temporary() -> Iterator[Path]:
    """As ``tmp_path``, but a new one for each example of hypothesis."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of random bits, NaNs and infinities included; a bool of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(2, (count,), generator=generator).bool().view(shape)
    noise = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return noise.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor_bytes(tensor.contiguous()))


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def whole(folder: TensorFolder, name: str) -> Tensor:
    """All of a tensor in a folder."""
    return folder.read_elements(name, 0, folder.specs[name].numel).view(folder.specs[name].shape)


def write(path: Path, tensors: dict[str, Tensor]) -> list[TensorSpec]:
    """A file as a save writes it: the header, then one tensor after another. Returns what is in it."""
    with path.open("wb") as file:
        file.write(header(specs_of(tensors)))
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))
    return specs_of(tensors)


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tensor_maps = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.builds(random_tensor, shapes, st.sampled_from(list(DTYPES.values())), st.integers(0, 1000)),
    max_size=6,
)


# ---- safetensors, written and read ----


@given(tensor_maps)
@example(
    {f"{name}.{len(shape)}": random_tensor(shape, dtype) for name, dtype in DTYPES.items() for shape in [(), (3,)]}
)
def test_written_tensors_are_read_bitwise_by_safetensors_and_by_serried(tensors: dict[str, Tensor]) -> None:
    with temporary() as folder:
        path = folder / "model.safetensors"
        write(path, tensors)
        assert len(header(specs_of(tensors))) % 8 == 0
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(tensors)
            for name, tensor in tensors.items():
                assert bits(file.get_tensor(name)) == bits(tensor)
        ours = TensorFolder(folder)
        assert ours.specs == {spec.name: spec for spec in specs_of(tensors)}
        assert {name: bits(whole(ours, name)) for name in ours.specs} == {name: bits(t) for name, t in tensors.items()}


@given(tensor_maps)
def test_files_written_by_safetensors_are_read_bitwise(tensors: dict[str, Tensor]) -> None:
    with temporary() as folder:
        save_file(tensors, folder / "optimizer.safetensors", metadata={"any": "thing"})
        ours = TensorFolder(folder, "optimizer")
        assert set(ours.specs) == set(tensors)
        assert {name: bits(whole(ours, name)) for name in ours.specs} == {name: bits(t) for name, t in tensors.items()}


@given(st.data(), shapes.filter(bool), st.sampled_from(list(DTYPES.values())))
def test_any_range_of_elements_is_read(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_tensor(shape, dtype)
    begin = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(begin, tensor.numel()))
    with temporary() as folder:
        write(folder / "model.safetensors", {"before": random_tensor((3,), torch.uint8), "x": tensor})
        ours = TensorFolder(folder)
        assert bits(ours.read_elements("x", begin, end - begin)) == bits(tensor.reshape(-1)[begin:end])


def test_elements_out_of_range_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"x": torch.zeros(4, 2)})
    ours = TensorFolder(tmp_path)
    with pytest.raises(ValueError, match="elements"):
        ours.read_elements("x", 7, 2)
    with pytest.raises(KeyError):
        ours.read_elements("y", 0, 1)


def test_header_of_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="no name"):
        header([TensorSpec("x", torch.complex128, (2,))])


@pytest.fixture(scope="module")
def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("size", ["50KB", "1GB"])
def test_folder_saved_by_transformers_is_read(llama: Any, tmp_path: Path, size: str) -> None:
    llama.save_pretrained(tmp_path, max_shard_size=size)
    ours = TensorFolder(tmp_path)
    assert (len(ours.files) > 3) == (size == "50KB")
    state = llama.state_dict()
    assert set(ours.specs) == set(state)
    for name, tensor in state.items():
        assert bits(whole(ours, name)) == bits(tensor)


def test_index_equals_that_of_transformers(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path, max_shard_size="50KB")
    text = (tmp_path / "model.safetensors.index.json").read_text()
    theirs = json.loads(text)
    files: dict[str, list[TensorSpec]] = {}
    ours = TensorFolder(tmp_path)
    for name, spec in ours.specs.items():
        files.setdefault(theirs["weight_map"][name], []).append(spec)
    del theirs["metadata"]["total_parameters"]
    assert index_json(files) == json.dumps(theirs, indent=2, sort_keys=True) + "\n"
    assert list(theirs["weight_map"]) == list(json.loads(text)["weight_map"])


def test_several_threads_may_read_at_once(tmp_path: Path) -> None:
    tensors = {str(number): random_tensor((64, 1000), torch.float32, number) for number in range(16)}
    write(tmp_path / "model.safetensors", tensors)
    ours = TensorFolder(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for name, read in zip(tensors, pool.map(lambda name: whole(ours, name), tensors), strict=True):
            assert bits(read) == bits(tensors[name])


# ---- safetensors from strangers ----


def raw(entries: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


STRANGE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": b"\0" * 8,
    "huge length": raw({"x": entry()}, length=2**63),
    "length of all that follows and one": raw({"x": entry()}, length=len(json.dumps({"x": entry()})) + 9),
    "length that reaches into the data": raw({"x": entry()}, length=len(json.dumps({"x": entry()})) + 1),
    "not JSON": raw(b"{not json"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw([entry()]),
    "a number": raw(b"1"),
    "deeply nested": raw(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of many digits": raw(b'{"x": ' + b"9" * 10_000 + b"}"),
    "entry is not an object": raw({"x": 3}),
    "entry lacks offsets": raw({"x": {"dtype": "F32", "shape": [2]}}),
    "unknown dtype": raw({"x": entry("F4")}),
    "dtype is a list": raw({"x": entry(["F32"])}),
    "dtype with line breaks": raw({"x\ny": entry("F\n32" * 100)}),
    "shape is text": raw({"x": entry(shape="2")}),
    "negative shape": raw({"x": entry(shape=[-1, -2])}),
    "fractional shape": raw({"x": entry(shape=[2.0])}),
    "boolean shape": raw({"x": entry(shape=[True, 2])}),
    "huge shape": raw({"x": entry(shape=[2**62, 2**62])}),
    "huge shape of no elements": raw({"x": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}, b""),
    "shape of very many dims": raw({"x": entry(shape=[1] * 100_000, offsets=[0, 4])}, b"\0" * 4),
    "shape too large for its bytes": raw({"x": entry(shape=[3])}),
    "shape too small for its bytes": raw({"x": entry(shape=[1])}),
    "negative offsets": raw({"x": entry(offsets=[-8, 0])}),
    "offsets the wrong way": raw({"x": entry(offsets=[8, 0])}),
    "one offset": raw({"x": entry(offsets=[0])}),
    "offsets past the end": raw({"x": entry(shape=[4], offsets=[0, 16])}),
    "offsets far past the end": raw({"x": entry(shape=[2**50], offsets=[0, 2**52])}),
    "overlapping": raw({"x": entry(), "y": entry(shape=[1], offsets=[4, 8])}),
    "the same bytes twice": raw({"x": entry(), "y": entry()}),
    "a gap": raw({"x": entry(shape=[1], offsets=[4, 8])}),
    "bytes left over": raw({"x": entry()}, b"\0" * 9),
    "metadata is not a map": raw({"__metadata__": [], "x": entry()}),
    "metadata holds numbers": raw({"__metadata__": {"a": 1}, "x": entry()}),
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


def refusal(folder: Path) -> str:
    """The error with which the folder is refused; checked to be one line that names the place, and cheap."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            TensorFolder(folder)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(folder) in message
    assert message.isprintable()
    assert len(message) < 600
    return message


@pytest.mark.parametrize("case", STRANGE)
def test_a_strange_header_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(STRANGE[case])
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_header_whose_length_reads_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    text = json.dumps({"x": entry()}).encode()
    (tmp_path / "model.safetensors").write_bytes(raw(text + b" " * (length - len(text))))
    assert read_header(tmp_path / "model.safetensors").keys() == {"x"}


def test_header_with_empty_metadata_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"__metadata__": {}, "x": entry()}))
    assert whole(TensorFolder(tmp_path), "x").tolist() == [0, 0]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with temporary() as folder:
        for text in (content, raw(content), raw(b"{" + content + b"}")):
            (folder / "model.safetensors").write_bytes(text)
            with pytest.raises(UserError) as caught:
                TensorFolder(folder)
            assert str(caught.value).isprintable()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["F32", "U8", "x", "dtype", "shape", "data_offsets"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BOOL"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=5), entries | json_values, max_size=3), st.binary(max_size=32))
def test_any_header_of_json_is_read_whole_or_refused(content: dict[str, Any], data: bytes) -> None:
    with temporary() as folder:
        (folder / "model.safetensors").write_bytes(raw(content, data))
        try:
            ours = TensorFolder(folder)
        except UserError as error:
            assert str(error).isprintable()
            return
        content.pop("__metadata__", None)
        assert set(ours.specs) == set(content)
        read = {name: whole(ours, name) for name in ours.specs}
        assert b"".join(bytes(tensor_bytes(tensor)) for tensor in read.values()) == data
        assert all(list(read[name].shape) == content[name]["shape"] for name in content)


def test_a_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    def save(path: Path, protocol: int | None) -> None:
        if protocol is None:
            torch.save({"x": Malicious()}, path)
        else:
            path.write_bytes(pickle.dumps({"x": Malicious()}, protocol))

    for protocol in (None, 2, 3, 4, 5):
        folder = tmp_path / str(protocol)
        folder.mkdir()
        save(folder / "pytorch_model.bin", protocol)
        message = refusal(folder)
        assert "pytorch_model.bin" in message and "never loaded" in message and "safe_serialization=True" in message
        (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
        message = refusal(folder)
        assert "pickle" in message and "save_pretrained" in message
        (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
        refusal(folder)
    assert not (tmp_path / "executed").exists()


def test_a_folder_without_tensors_says_so(tmp_path: Path) -> None:
    assert "neither model.safetensors nor model.safetensors.index.json; use the folder" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent")
    (tmp_path / "model.safetensors").mkdir()
    assert "neither" in refusal(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    assert "neither" in refusal(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"x": 1}}',
        b'{"weight_map": {"x": "../secret.safetensors"}}', b'{"weight_map": {"x": "/etc/secret.safetensors"}}',
        b'{"weight_map": {"x": "sub/secret.safetensors"}}', b'{"weight_map": {"x": "..\\\\secret.safetensors"}}',
        b'{"weight_map": {"x": ".."}}', b'{"weight_map": {"x": ""}}', b'{"weight_map": {"x": "a\\u0000.safetensors"}}',
        b'{"weight_map": {"x": "\\ud800.safetensors"}}', b'{"weight_map": {"x": "part.bin"}}',
        b'{"weight_map": {"x": "%b.safetensors"}}' % (b"a" * 300),
        b'{"weight_map": {"x": "absent.safetensors"}}', b'{"weight_map": {"y": "part.safetensors"}}',
        b'{"weight_map": {"x": "part.safetensors", "y": "part.safetensors"}}',
    ],
)  # fmt: skip
def test_a_strange_index_is_refused_in_one_line(index: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for secret in (tmp_path, folder / "sub", folder):
        write(secret / ("part.safetensors" if secret == folder else "secret.safetensors"), {"x": torch.zeros(2)})
    (folder / "model.safetensors.index.json").write_bytes(index)
    assert "index.json" in refusal(folder)


def test_file_truncated_while_read_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"x": torch.zeros(1000, 1000)})
    ours = TensorFolder(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 1_000_000)
    assert ours.read_elements("x", 0, 10_000).shape == (10_000,)
    with pytest.raises(UserError, match="truncated while open"):
        whole(ours, "x")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot read"):
        whole(ours, "x")


# ---- the manifest ----


def make_checkpoint(folder: Path, *, loss: Any = None, tensors: int = 2, progress: Any = None) -> Path:
    """A committed checkpoint as a save leaves it, of a few KB."""
    folder.mkdir(parents=True)
    for stem in ("model", "optimizer"):
        files: dict[str, list[TensorSpec]] = {}
        for number in range(1, tensors + 1):
            part = {f"{stem}.{number}": random_tensor((20, 7), torch.float32, number)}
            name = f"{stem}-{number:05d}-of-{tensors:05d}.safetensors"
            files[name] = write(folder / name, part)
        if tensors:
            (folder / f"{stem}.safetensors.index.json").write_text(index_json(files))
    (folder / "config.json").write_text('{"model_type": "llama"}\n')
    state = {"step": step_of(folder), "validation_loss": loss, "progress": progress}
    (folder / "state.json").write_text(json.dumps(state) + "\n")
    write_manifest(folder, {path.name: record_of(path) for path in folder.iterdir()})
    return folder


def verify(folder: Path) -> None:
    for name, record in read_manifest(folder).items():
        check_file(folder, name, record)


def test_manifest_with_a_checksum_for_each_mib_has_version_2_and_wrong_ones_are_damage(tmp_path: Path) -> None:
    sums, content = BlockSums(), os.urandom(2 * 2**20 + 5)
    for first in range(0, len(content), 700_000):
        sums.add(memoryview(content)[first : first + 700_000])
    expected = [zlib.crc32(content[first : first + 2**20]) for first in range(0, len(content), 2**20)]
    assert list(block_sums(sums.text(), len(content))) == expected
    files = {"a": FileRecord(len(content), zlib.crc32(content), sums.text()), "b": FileRecord(1, 2)}
    write_manifest(tmp_path, files)
    assert read_manifest(tmp_path) == files
    text = json.loads((tmp_path / MANIFEST).read_text())
    assert text["version"] == 2
    (tmp_path / "a").write_bytes(content)
    check_file(tmp_path, "a", files["a"])
    for wrong in ("AAAA", "?", 7, "AAAAAAAAAAAAAAA="):
        text["files"]["a"]["blocks"] = wrong
        (tmp_path / MANIFEST).write_text(json.dumps(text))
        with pytest.raises(Damaged):
            read_manifest(tmp_path)


@given(
    st.dictionaries(
        st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="/\\"), min_size=1).filter(
            lambda name: name not in (".", "..", MANIFEST)
        ),
        st.builds(FileRecord, st.integers(0, 2**63), st.integers(0, 2**32 - 1), st.just("")),
    )
)
def test_manifest_is_read_as_written(files: dict[str, FileRecord]) -> None:
    with temporary() as folder:
        write_manifest(folder, files)
        assert read_manifest(folder) == files
        content = json.loads((folder / MANIFEST).read_text())
        assert content.keys() == {"version", "files", "crc32"}
        assert content["version"] == 1
        for name, record in files.items():
            assert content["files"][name] == {"size": record.size, "crc32": f"{record.crc32:08x}"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0", "a\nb", "\ud800", MANIFEST])
def test_manifest_names_only_files_in_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="manifest"):
        write_manifest(tmp_path, {name: FileRecord(0, 0)})
    files = {name: {"size": 0, "crc32": "00000000"}}
    crc32 = f"{zlib.crc32(json.dumps(files).encode()):08x}"
    text = json.dumps({"version": 1, "files": files, "crc32": crc32}, indent=2) + "\n"
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(Damaged):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "[" * 100_000, '{"version": 1, "files": [], "crc32": "00000000"}',
     '{"version": 1, "files": {"a": 1}, "crc32": "00000000"}', '{"version": 2, "files": {}}', "\ud800",
     '{"version": 1, "files": {"a": {"size": true, "crc32": "00000000"}}}',
     '{"version": 1, "files": {"a": {"size": 1, "crc32": 0}}}'],
)  # fmt: skip
def test_any_other_manifest_is_damaged_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(Damaged) as caught:
        read_manifest(tmp_path)
    assert str(caught.value).isprintable()
    assert str(tmp_path / MANIFEST) in str(caught.value)


def test_any_flipped_bit_or_truncation_of_the_manifest_is_detected(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"model.safetensors": FileRecord(123, 0xDEADBEEF), "state.json": FileRecord(0, 0)})
    path = tmp_path / MANIFEST
    intact = path.read_bytes()
    for bit in range(8 * len(intact)):
        changed = bytearray(intact)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged):
            read_manifest(tmp_path)
    for length in range(len(intact)):
        path.write_bytes(intact[:length])
        with pytest.raises(Damaged):
            read_manifest(tmp_path)
    for more in (b" ", b"\n", b"\0", b"{}"):
        path.write_bytes(intact + more)
        with pytest.raises(Damaged):
            read_manifest(tmp_path)
    path.write_bytes(intact)
    read_manifest(tmp_path)


def test_any_truncated_or_flipped_file_is_detected(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / folder_name(100))
    verify(folder)
    choose = random.Random(0)
    paths = sorted(folder.iterdir())
    assert len(paths) == 9
    cases = 0

    def is_found(path: Path, content: bytes) -> None:
        nonlocal cases
        path.write_bytes(content)
        with pytest.raises(Damaged) as caught:
            verify(folder)
        assert str(path) in str(caught.value)
        assert str(caught.value).isprintable()
        cases += 1

    for path in paths:
        intact = path.read_bytes()
        for _ in range(30):
            is_found(path, intact[: choose.randrange(len(intact))])
            flipped = bytearray(intact)
            flipped[choose.randrange(len(intact))] ^= 1 << choose.randrange(8)
            is_found(path, flipped)
        is_found(path, b"")
        is_found(path, intact + b"\0")
        is_found(path, intact[:-8] + b"\0" * 8)  # a block that never reached the disk
        path.unlink()
        with pytest.raises(Damaged, match="No such file"):
            verify(folder)
        path.mkdir()
        with pytest.raises(Damaged):
            verify(folder)
        path.rmdir()
        path.write_bytes(intact)
    verify(folder)
    assert cases >= 300


def test_checksum_equals_that_of_zlib_for_any_size(tmp_path: Path) -> None:
    for size in (0, 1, 4 * 2**20 - 1, 4 * 2**20, 9 * 2**20 + 5):
        content = random.Random(size).randbytes(size)
        (tmp_path / "file").write_bytes(content)
        assert record_of(tmp_path / "file") == FileRecord(size, zlib.crc32(content))


def test_a_file_that_may_not_be_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"a")
    record = record_of(tmp_path / "a")
    write_manifest(tmp_path, {"a": record})

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Damaged, match="Input/output error"):
        check_file(tmp_path, "a", record)


def test_missing_folder_cannot_be_synced(tmp_path: Path) -> None:
    fsync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_folder(tmp_path / "absent")


# ---- retention ----


@given(st.integers(0, 10**12))
def test_a_step_is_read_from_its_folder_name_and_names_sort_by_step(step: int) -> None:
    assert step_of(Path("runs") / folder_name(step)) == step
    assert step_of(Path(partial_name(step))) is None
    assert step_of(Path(deleting_name(step))) is None
    if step < 10**8:
        assert len(folder_name(step)) == len("step-00000100")


@pytest.mark.parametrize(
    "name", ["step-100", "step-000000100", "step-0000010x", "step-00000100 ", "step-00000100.tmp", "xstep-00000100",
             "step--0000100", "step-٠٠٠٠٠١٠٠", "STEP-00000100", "step-" + "1" * 5000],
)  # fmt: skip
def test_folders_with_other_names_are_not_checkpoints(name: str) -> None:
    assert step_of(Path(name)) is None


def test_only_complete_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    assert committed(tmp_path / "absent") == []
    for step in (10**8, 300, 2):
        make_checkpoint(tmp_path / folder_name(step), tensors=0)
    (tmp_path / folder_name(400)).mkdir()  # no manifest
    (tmp_path / folder_name(500)).write_text("a file")
    make_checkpoint(tmp_path / partial_name(600), tensors=0)
    make_checkpoint(tmp_path / deleting_name(700), tensors=0)
    make_checkpoint(tmp_path / "best", tensors=0)
    assert [step_of(path) for path in committed(tmp_path)] == [2, 300, 10**8]


def test_sweep_removes_only_leftovers(tmp_path: Path) -> None:
    assert sweep(tmp_path / "absent") == []
    make_checkpoint(tmp_path / folder_name(1), tensors=0)
    for name in (".step-00000001.partial.txt", ".hidden", "notes", ".step-1.partial", "step-00000009.partial"):
        (tmp_path / name).mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    make_checkpoint(tmp_path / partial_name(2), tensors=1)
    make_checkpoint(tmp_path / deleting_name(3), tensors=1)
    (tmp_path / partial_name(4)).write_text("a file")
    elsewhere = make_checkpoint(tmp_path / "elsewhere")
    (tmp_path / partial_name(5)).symlink_to(elsewhere)
    assert sweep(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "elsewhere"])
    verify(elsewhere)


def test_folder_that_cannot_be_removed_is_reported_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path / folder_name(step), tensors=0)
    make_checkpoint(tmp_path / partial_name(4), tensors=0)
    real = cast(Callable[..., Any], os.unlink)

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if str(path).endswith("state.json"):
            raise PermissionError(13, "Permission denied")
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    told = sweep(tmp_path)
    assert len(told) == 1
    assert partial_name(4) in told[0] and "Permission denied" in told[0]
    problems: list[str] = []
    assert prune(tmp_path, keep=1, keep_every=0, best=None, problems=problems) == [
        tmp_path / folder_name(1), tmp_path / folder_name(2),
    ]  # fmt: skip
    assert len(problems) == 2
    assert [step_of(path) for path in committed(tmp_path)] == [3]
    monkeypatch.undo()
    assert sweep(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(3)]


def test_a_folder_that_cannot_be_renamed_or_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path / folder_name(step), tensors=0)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for function in ("rename", "iterdir"):
        problems: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(Path, function, refuse)
            assert prune(tmp_path, keep=1, keep_every=0, best=None, problems=problems) == []
        assert len(problems) == 1 and "Permission denied" in problems[0]
    assert [step_of(path) for path in committed(tmp_path)] == [1, 2]


LOSS = ("loss", "min")
damages = st.sampled_from([None, None, None, "cut", "missing", "manifest"])
losses = st.sampled_from([None, 1.0, 1.5, 2, -1.0, math.nan, math.inf, -math.inf, True, "0", [0.0]])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.integers(0, 40), st.tuples(damages, losses), max_size=7),
    st.integers(1, 4), st.sampled_from([0, 1, 3, 10]), st.booleans(),
)  # fmt: skip
def test_retention_keeps_the_expected_checkpoints(
    made: dict[int, tuple[str | None, Any]], keep: int, keep_every: int, keep_best: bool
) -> None:
    with temporary() as folder:
        for step, (damage, loss) in made.items():
            path = make_checkpoint(folder / folder_name(step), loss=loss, tensors=0)
            if damage == "cut":
                os.truncate(path / "config.json", 3)
            elif damage == "missing":
                (path / "config.json").unlink()
            elif damage == "manifest":
                os.truncate(path / MANIFEST, 40)
        intact = sorted(step for step, (damage, _) in made.items() if damage is None)
        expected = set(intact[-keep:]) | {step for step in intact if keep_every and step % keep_every == 0}
        candidates = [(made[step][1], step) for step in intact if type(made[step][1]) in (int, float)]
        measured = [(loss, step) for loss, step in candidates if math.isfinite(loss)]
        if keep_best and measured:
            expected.add(min(measured)[1])
        removed = prune(folder, keep=keep, keep_every=keep_every, best=LOSS if keep_best else None)
        assert [step_of(path) for path in removed] == sorted(set(intact) - expected)
        left = {step for step, (damage, _) in made.items() if damage is not None} | expected
        assert {step_of(path) for path in committed(folder)} == left
        assert {path.name for path in folder.iterdir()} == {folder_name(step) for step in left}
        assert prune(folder, keep=keep, keep_every=keep_every, best=LOSS if keep_best else None) == []


def test_steps_requested_to_be_kept_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path / folder_name(step), tensors=0)
    assert [step_of(path) for path in prune(tmp_path, keep=1, keep_every=0, best=None, also=(1, 7))] == [2]


def test_checkpoint_with_damaged_state_is_not_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 2.0), (3, 3.0)):
        make_checkpoint(tmp_path / folder_name(step), loss=loss, tensors=0)
    state = tmp_path / folder_name(1) / "state.json"
    state.write_text(state.read_text().replace("0.5", "0.1"))  # of the same size
    assert [step_of(path) for path in prune(tmp_path, keep=1, keep_every=0, best=LOSS)] == [1]


def test_best_checkpoint_may_be_evaluated_after_it_was_saved(tmp_path: Path) -> None:
    """A stop left its evaluation out, which the resumed run made up."""
    later = {"made_up": {"2": {"loss": 0.1}}}
    for step, loss, progress in ((1, 0.5, {}), (2, None, {}), (3, 3.0, {}), (4, 4.0, later)):
        make_checkpoint(tmp_path / folder_name(step), loss=loss, tensors=0, progress=progress)
    assert [step_of(path) for path in prune(tmp_path, keep=1, keep_every=0, best=LOSS)] == [1, 3]


def test_best_checkpoint_follows_the_current_best_metric(tmp_path: Path) -> None:
    """Another ``checkpoint.best_metric`` on resume compares earlier checkpoints by it too."""
    for step, loss, accuracy in ((1, 0.5, 0.1), (2, 2.0, 0.9), (3, 3.0, 0.2), (4, 4.0, 0.3)):
        progress = {"validated_step": step if step < 4 else 3, "validation": {"loss": loss, "accuracy": accuracy}}
        make_checkpoint(tmp_path / folder_name(step), loss=loss, tensors=0, progress=progress)
    for best, expected in ((("accuracy", "min"), [2, 3]), (("loss", "min"), [])):
        assert [step_of(path) for path in prune(tmp_path, keep=1, keep_every=0, best=best)] == expected
    assert [step_of(path) for path in committed(tmp_path)] == [1, 4]


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(operation: int) -> Iterator[None]:
    """Die just before the given change to the disk, counted from 0: renames and removals."""
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if done == operation:
                raise Killed
            done += 1
            return real(*arguments, **options)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


def test_kill_while_pruning_leaves_only_complete_checkpoints_listed(tmp_path: Path) -> None:
    points = 0
    while True:
        folder = tmp_path / str(points)
        for step in (1, 2, 3, 4):
            make_checkpoint(folder / folder_name(step), tensors=1)
        # What an earlier kill left of another deletion of the same step.
        (folder / deleting_name(2)).mkdir()
        (folder / deleting_name(2) / "state.json").write_text("{}")
        finished = True
        try:
            with killed_at(points):
                prune(folder, keep=2, keep_every=0, best=None)
        except Killed:
            finished = False
        listed = committed(folder)
        assert [step_of(path) for path in listed][-2:] == [3, 4]
        for path in listed:
            verify(path)
        assert sweep(folder) == []
        assert sorted(folder.iterdir()) == listed
        prune(folder, keep=2, keep_every=0, best=None)
        assert [path.name for path in sorted(folder.iterdir())] == [folder_name(3), folder_name(4)]
        shutil.rmtree(folder)
        if finished:
            break
        points += 1
    assert points > 15
