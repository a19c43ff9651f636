"""From a log to a failing test: record operations, replay them, shrink them; begin with `record_operations`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate.replay.engine import drive as drive
    from batchstate.replay.engine import history_of as history_of
    from batchstate.replay.engine import recorded as recorded
    from batchstate.replay.format import Finding as Finding
    from batchstate.replay.format import Recording as Recording
    from batchstate.replay.format import load as load
    from batchstate.replay.recorder import Recorder as Recorder
    from batchstate.replay.recorder import record_operations as record_operations
    from batchstate.replay.replayer import Replay as Replay
    from batchstate.replay.replayer import replay as replay
    from batchstate.replay.replayer import shrunk_calls as shrunk_calls
else:
    from batchstate._lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "engine": "drive history_of recorded",
            "format": "Finding Recording load",
            "recorder": "Recorder record_operations",
            "replayer": "Replay replay shrunk_calls",
        },
    )
