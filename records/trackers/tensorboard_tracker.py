"""TensorBoard, by its own event files: neither torch nor TensorFlow is needed to write them."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from serried.records.trackers.tracker import Held, Row, Run, Summary, flat

_PREFIX = "events.out.tfevents."
_REWRITING = ".rewriting"
_HYPER_PARAMETERS = ("recipe", "model", "data", "parallel", "precision", "optim", "schedule", "trainer", "health")
_FINAL_METRICS = ("train/loss", "validation/loss")
_STATES = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE, "running": api_pb2.STATUS_RUNNING}


class TensorBoardTracker:
    """One event file in ``tensorboard/``.

    Each start writes the whole history into a new file beside the one there is, and then puts it in its place: events
    cannot be taken back.
    """

    uses_network = False
    follows_changes = True

    def __init__(self) -> None:
        self._folder = Path()
        self._path = Path()
        self._file: IO[bytes] | None = None
        self._records: Any = None

    def open(self, run: Run) -> Held:
        if self._file is not None:
            self._file.close()
        self._folder = run.folder / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self._path = self._folder / _REWRITING
        self._file = self._path.open("wb")
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # Has a TensorBoard that is looking forget what the file before had.
        self._add(session_log=SessionLog(status=SessionLog.START))
        hyper_parameters = {key: run.config[key] for key in _HYPER_PARAMETERS}
        self._summarize(_hyper_parameters(flat(hyper_parameters), run.name))
        self._summarize(_text("config", "\n".join(f"    {line}" for line in yaml.safe_dump(run.config).splitlines())))
        if run.track["notes"]:
            self._summarize(_text("notes", run.track["notes"]))
        return Held(-1, run.rollbacks)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [SummaryProto.Value(tag=tag, simple_value=value) for tag, value in row.values.items()]
            self._add(time=row.time, step=row.step, summary=SummaryProto(value=values))
        self._flush()

    def caught_up(self) -> None:
        self._flush()
        earlier = list(self._folder.glob(f"{_PREFIX}*"))
        self._path = self._path.rename(self._folder / f"{_PREFIX}{time.time():.6f}.serried.{os.getpid()}")
        for path in earlier:
            with suppress(FileNotFoundError):
                path.unlink()

    def summarize(self, summary: Summary) -> None:
        pass

    def close(self, summary: Summary) -> None:
        end = plugin_data_pb2.SessionEndInfo(
            status=_STATES.get(summary["state"], api_pb2.STATUS_UNKNOWN), end_time_secs=time.time()
        )
        lines = "\n".join(f"    {key}: {value}" for key, value in summary.items())
        self._summarize(
            _plugin(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end)),
            _text("summary", lines),
        )
        self._flush()

    def note(self) -> str:
        return f"TensorBoard: tensorboard --logdir {self._folder}"

    def _add(self, **values: Any) -> None:
        values.setdefault("wall_time", values.pop("time", time.time()))
        self._records.write(Event(**values).SerializeToString())

    def _summarize(self, *values: SummaryProto.Value | Iterable[SummaryProto.Value]) -> None:
        every = [each for value in values for each in ([value] if isinstance(value, SummaryProto.Value) else value)]
        self._add(summary=SummaryProto(value=every))

    def _flush(self) -> None:
        assert self._file is not None
        self._file.flush()


def _hyper_parameters(values: Mapping[str, Any], name: str) -> list[SummaryProto.Value]:
    """What the page HPARAMS reads: names and values of hyper-parameters, and which scalars are the final metrics."""
    start = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
    infos = []
    for key, value in values.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
            kind = api_pb2.DATA_TYPE_BOOL
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
            kind = api_pb2.DATA_TYPE_FLOAT64
        else:
            start.hparams[key].string_value = "null" if value is None else str(value)
            kind = api_pb2.DATA_TYPE_STRING
        infos.append(api_pb2.HParamInfo(name=key, type=kind))
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in _FINAL_METRICS]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics, time_created_secs=time.time())
    return [
        _plugin(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        _plugin(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
    ]


def _plugin(tag: str, data: Any) -> SummaryProto.Value:
    return SummaryProto.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)


def _text(tag: str, markdown: str) -> SummaryProto.Value:
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=TensorShapeProto())
    return SummaryProto.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
