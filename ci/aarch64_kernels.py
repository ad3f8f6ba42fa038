"""Kernels for 64-bit Arm under QEMU, on a Debian or Ubuntu machine of another kind: no Arm hardware is timed.

python ci/aarch64_kernels.py fetch                 # the emulator and a cross linker, into a folder
python ci/aarch64_kernels.py random [--count 500]  # random kernels on each core, against the interpreter
python ci/aarch64_kernels.py count                 # instructions of kernels, for docs/studies/aarch64_kernels.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ci.aarch64_emulator import Emulator, fetch, missing
from fusewright_cpu.target import aarch64_target

CORES = ("neoverse-n1", "neoverse-v1", "neoverse-v2")


def random(count: int) -> int:
    """How many random kernels give other bits than the interpreter."""
    from fusewright.toolkit.ir import interpret, to_text
    from fusewright_cpu.run.sources import hash_of
    from tests.backends.cpu.test_aarch64_emulated import random_cases
    from tests.backends.cpu.test_random_kernels import same_bits

    drawn, wrong = random_cases(count), 0
    for core in CORES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, Emulator(aarch64_target(core), Path(folder)) as emulator:
            for case in drawn:
                library = emulator.build([case.kernel])[hash_of(case.kernel)]
                wanted, got = ([t.clone() for t in case.tensors] for _ in range(2))
                interpret(case.kernel, wanted, case.sizes)
                code = emulator.run(case.kernel, library, got, case.sizes, threads=3)
                if code or not all(map(same_bits, got, wanted)):
                    wrong += 1
                    print(f"{core}: error {code}\n{to_text(case.kernel)}\n{case.sizes}")
        print(f"{core}: {len(drawn)} kernels in {time.monotonic() - start:.0f} s, {wrong} wrong so far")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 when something is wrong, 2 where the emulator is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fetch", "random", "count"])
    parser.add_argument("--count", type=int, default=500)
    given = parser.parse_args(arguments)
    if given.what == "fetch":
        fetch()
        return 0
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    return 1 if random(given.count) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
