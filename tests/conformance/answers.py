"""What the children of test_children.py run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DEADLY = -1.0


def warm_up() -> None:
    os.environ["WARMED_UP_BY"] = str(os.getpid())


def main(arguments: Sequence[str]) -> int:
    for job in json.loads(sys.stdin.read()):
        Path(job["folder"], str(job["n"])).touch()
        if job["sleeps"] == DEADLY:
            sys.exit(3)
        time.sleep(job["sleeps"])
        found = {name: os.environ.get(name) for name in job.get("environment", ())}
        print(json.dumps({"n": job["n"], "arguments": arguments, **found}), flush=True)
    return 0
