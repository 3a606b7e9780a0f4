"""A service to be killed: starts one worker with descendants and a segment, says so, and waits."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from nereus_common.workers import Worker, WorkerSpec
from nereus_common.workers.reaping import ReaperLink


async def main() -> None:
    spec = WorkerSpec("kept", "worker_bodies:Desk", {}, Path(sys.argv[1]) / "kept.log")
    worker = await Worker.start(spec, timeout=60)
    children = await worker.call("breed", timeout=10)
    segment = await worker.call("map_segment", 1 << 16, timeout=10)
    await asyncio.sleep(1.5)  # the reaper looks twice a second
    pids = [worker.pid, *children, ReaperLink.shared().pid]
    print(json.dumps({"pids": pids, "segment": segment}), flush=True)
    await worker.exited


asyncio.run(main())
