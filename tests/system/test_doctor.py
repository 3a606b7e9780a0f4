"""`nereus doctor` on the machine at hand."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_doctor_moves_bytes_over_every_kind_of_pair() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nereus", "doctor", "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    for pair in ("process", "node", "network"):
        assert findings[f"transport, {pair}"]["ok"] and "GB/s" in findings[f"transport, {pair}"]["found"]
