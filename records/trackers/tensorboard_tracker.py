"""TensorBoard event files, written without torch or TensorFlow."""

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from serried.records.trackers.rows import Row, Run

_TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))


class TensorBoardTracker:
    """An event file in ``tensorboard/``.

    Events cannot be removed, so each start writes the whole history into a new file and deletes the previous
    one.
    """

    last_step = -1

    def __init__(self, run: Run) -> None:
        folder = run.folder / "tensorboard"
        self.note = f"TensorBoard: tensorboard --logdir {folder}"
        folder.mkdir(exist_ok=True)
        previous = list(folder.glob("events.out.tfevents.*.serried"))
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.serried").open("wb")
        self._records: Any = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # An open TensorBoard forgets the content of the previous file.
        self._add(session_log=SessionLog(status=SessionLog.START))
        config = "\n".join(f"    {line}" for line in yaml.safe_dump(dict(run.config)).splitlines())
        self._add(summary=Summary(value=[_text("config", config)]))
        self._file.flush()
        for path in previous:
            path.unlink()

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.values.items()]
            values += [_text(tag, text) for tag, text in row.texts.items()]
            values += [
                Summary.Value(tag=f"{tag}/{number}", image=_image(path.read_bytes()))
                for tag, paths in row.images.items()
                for number, path in enumerate(paths)
            ]
            self._add(wall_time=row.time, step=row.step, summary=Summary(value=values))
        self._file.flush()

    def close(self, _: Mapping[str, Any]) -> None:
        self._file.close()

    def _add(self, **values: Any) -> None:
        self._records.write(Event(**{"wall_time": time.time(), **values}).SerializeToString())


def _text(tag: str, text: str) -> Summary.Value:
    return Summary.Value(tag=tag, metadata=_TEXT, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]))


def _image(png: bytes) -> Summary.Image:
    """Return the content of a PNG file, in which width and height follow the first 16 bytes, for TensorBoard."""
    width, height = struct.unpack(">II", png[16:24])
    return Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
