"""A service to be killed: starts one worker with descendants and a segment, says so, and waits."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from nereus_common.workers import Worker, WorkerSpec, processes
from nereus_common.workers.reaping import ReaperLink


async def main() -> None:
    folder, *preload = sys.argv[1:]
    spec = WorkerSpec("kept", "worker_bodies:Desk", {}, Path(folder) / "kept.log", preload=tuple(preload))
    worker = await Worker.start(spec, timeout=60)
    children = await worker.call("breed", timeout=10)
    segment = await worker.call("map_segment", 1 << 16, timeout=10)
    await asyncio.sleep(1.5)  # the reaper looks twice a second
    templates = [processes.read(worker.pid).parent] if preload else []
    pids = [worker.pid, *children, *templates, ReaperLink.shared().pid]
    print(json.dumps({"pids": pids, "segment": segment}), flush=True)
    await worker.exited


asyncio.run(main())
