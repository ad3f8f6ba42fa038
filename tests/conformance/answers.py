"""What the children of test_children.py run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def perform(settings: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    print("what checked code prints is no result")
    imported = "torch" in sys.modules
    for job in jobs:
        Path(job["folder"], str(job["n"])).touch()
        match job["does"]:
            case "exit":
                sys.exit(3)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "start a process":
                with open(Path(job["folder"], "fifo"), "w") as out:
                    subprocess.Popen(["sleep", "600"], stdout=out)
            case seconds:
                time.sleep(seconds)
        found = {name: os.environ.get(name) for name in job.get("environment", ())}
        yield {"n": job["n"], "imported": imported, **settings, **found}
