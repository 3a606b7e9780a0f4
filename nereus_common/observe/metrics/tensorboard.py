"""TensorBoard event files, written by tensorboardX into a job's folder `tensorboard`: one for each opening."""

from __future__ import annotations

import secrets
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from nereus_common.observe.metrics.base import Values

FOLDER = "tensorboard"


class TensorBoardSink:
    """Scalars under their metric's name with `/` for dots, which is how TensorBoard groups them.

    Records are written in the caller's thread: tensorboardX's SummaryWriter has a thread for it, and what fails there,
    such as a full disk, is never heard of. `time`: now, in seconds since the Unix epoch.
    """

    def __init__(self, folder: Path, time: float) -> None:
        target = folder / FOLDER
        target.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names
        self._writer = RecordWriter(str(target / f"events.out.tfevents.{int(time)}.{secrets.token_hex(4)}"))
        self._writer.write(Event(wall_time=time, file_version="brain.Event:2").SerializeToString())

    def write(self, step: int, values: Values, time: float) -> None:
        scalars = [Summary.Value(tag=name.replace(".", "/"), simple_value=value) for name, value in values.items()]
        self._tell(Event(wall_time=time, step=step, summary=Summary(value=scalars)))

    def rewind(self, step: int, time: float) -> None:
        """TensorBoard leaves out everything told so far of `step` and later, evaluations of `step` included."""
        self._tell(Event(wall_time=time, step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        self._writer.close()

    def _tell(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()
