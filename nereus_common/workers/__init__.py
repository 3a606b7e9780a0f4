"""Worker processes of a service: start, call, stream, stop, and never leave one behind.

A body is a class in a process of its own. Its plain methods run one at a time on the main thread, its `async`
methods and async generators together on an io thread. Parent and child talk in pickles over a socketpair: local
only, never a network. Nothing of a worker outlives the service: see `reaper`.
"""

from nereus_common.workers.errors import WorkerError
from nereus_common.workers.worker import Worker, WorkerSpec

__all__ = ["Worker", "WorkerError", "WorkerSpec"]
