"""Generate the hosting service's workflows from ci/matrix.toml: `python -m ci.workflows` writes .github/workflows.

    job.yml       one job of the matrix with one torch and one Python; the others call it
    check.yml     every change: jobs without special hardware, with the pinned torch; the docs, the wheels, the replay
    vendors.yml   weekly or by hand: each job with every supported torch and Python
    nightly.yml   each job with torch's newest release
    release.yml   a tag: the changelog, wheels of every package, their smoke test, and the index

Every step calls a script of ci/, so that everything the service does can be done by hand. Jobs on our own hardware run only if the
repository variable HARDWARE, a JSON list, names them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent, indent

from ci import jobs
from ci.release import wheels

FOLDER = jobs.ROOT / ".github/workflows"
SETUP_MINUTES = 20
"""Minutes allowed for installation, on top of a job's own limit."""

HEAD = "# Made by `python -m ci.workflows` from ci/matrix.toml; edit those.\n"
GATE = "contains(fromJSON(vars.HARDWARE || '[]'), '{}')"

JOB = """
name: job
on:
  workflow_call:
    inputs:
      job:
        description: a name of ci/matrix.toml
        required: true
        type: string
      torch:
        description: a version, or "newest"
        required: true
        type: string
      python:
        required: true
        type: string
      runs_on:
        description: labels of a runner, as JSON
        required: true
        type: string
      minutes:
        required: true
        type: number
permissions:
  contents: read
jobs:
  run:
    runs-on: ${{ fromJSON(inputs.runs_on) }}
    timeout-minutes: ${{ inputs.minutes }}
    env:
      JOB: ${{ inputs.job }}
      TORCH: ${{ inputs.torch }}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{ inputs.python }}
          cache: pip
          cache-dependency-path: |
            **/pyproject.toml
            ci/constraints.txt
      - uses: actions/cache@v4
        with:
          path: ~/.cache/fusewright
          key: fusewright-${{ inputs.job }}-${{ inputs.torch }}-${{ inputs.python }}-${{ hashFiles('ci/**') }}
          restore-keys: fusewright-${{ inputs.job }}-${{ inputs.torch }}-${{ inputs.python }}-
      - run: ci/setup.sh "$TORCH"
      - run: python -m ci.jobs run --require --results results "$JOB"
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: ${{ inputs.job }}-torch-${{ inputs.torch }}-python-${{ inputs.python }}
          path: results
          if-no-files-found: warn
"""

FRAME = """
frame:
  name: docs, workflows, wheels
  runs-on: ubuntu-latest
  timeout-minutes: 60
  steps:
    - uses: actions/checkout@v4
    - uses: actions/setup-python@v5
      with:
        python-version: "{python}"
        cache: pip
        cache-dependency-path: "**/pyproject.toml"
    - run: ci/setup.sh {torch} docs,release
    - run: python -m ci.docs.site
    - run: ci/actionlint.sh
    - run: python -m ci.release.wheels try --torch {torch}
    - uses: actions/upload-artifact@v4
      with:
        name: site
        path: build/site
replay:
  runs-on: ubuntu-latest
  timeout-minutes: 90
  steps:
    - uses: actions/checkout@v4
    - uses: actions/setup-python@v5
      with:
        python-version: "{python}"
        cache: pip
        cache-dependency-path: "**/pyproject.toml"
    - run: ci/setup.sh {torch}
    - run: python -m ci.replay check
"""

RELEASE = """
name: release
on:
  push:
    tags: ["v*"]
permissions:
  contents: read
jobs:
  changelog:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - run: python -m ci.release.changelog check "$GITHUB_REF_NAME"
  pure:
    needs: changelog
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - run: ci/release.sh dist {pure}
      - uses: actions/upload-artifact@v4
        with:
          name: dist-pure
          path: dist
  native:
    needs: changelog
    runs-on: ubuntu-latest
    container: quay.io/pypa/manylinux_2_28_x86_64
    strategy:
      matrix:
        python: {pythons}
    env:
      PYTHON_VERSION: ${{{{ matrix.python }}}}
    steps:
      - uses: actions/checkout@v4
      - run: ci/release.sh dist {native}
      - uses: actions/upload-artifact@v4
        with:
          name: dist-native-${{{{ matrix.python }}}}
          path: dist
  try:
    needs: [pure, native]
    runs-on: ubuntu-latest
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - uses: actions/download-artifact@v4
        with:
          pattern: dist-*
          path: dist
          merge-multiple: true
      - run: python -m ci.release.wheels try --wheels dist --torch {torches}
  publish:
    needs: try
    runs-on: ubuntu-latest
    environment: pypi
    permissions:
      id-token: write
    steps:
      - uses: actions/download-artifact@v4
        with:
          pattern: dist-*
          path: dist
          merge-multiple: true
      - uses: pypa/gh-action-pypi-publish@release/v1
"""


def _call(job: jobs.Job, torches: Sequence[str], pythons: Sequence[str]) -> str:
    """Return a workflow job that runs one job of the matrix with each torch and Python."""
    lines = [
        f"{job.name}:",
        f"  name: {job.name} ({job.kind})",
        *([f"  if: {GATE.format(job.name)}"] if job.own_hardware else []),
        "  strategy:",
        "    fail-fast: false",
        "    matrix:",
        f"      torch: {json.dumps(list(torches))}",
        f"      python: {json.dumps(list(pythons))}",
        "  uses: ./.github/workflows/job.yml",
        "  with:",
        f"    job: {job.name}",
        "    torch: ${{ matrix.torch }}",
        "    python: ${{ matrix.python }}",
        f"    runs_on: '{json.dumps(list(job.runs_on))}'",
        f"    minutes: {job.minutes + SETUP_MINUTES}",
    ]
    return "\n".join(lines)


def _workflow(name: str, on: str, called: Iterable[str]) -> str:
    group = f"{name}-${{{{ github.ref }}}}"
    head = f"name: {name}\non:\n{indent(dedent(on).strip(), '  ')}\npermissions:\n  contents: read\n"
    running = f"concurrency:\n  group: {group}\n  cancel-in-progress: true\n"
    return HEAD + head + running + "jobs:\n" + indent("\n".join(c.strip() for c in called), "  ") + "\n"


def workflows() -> Mapping[str, str]:
    """Return the text of each file, by name."""
    rows, versions = jobs.read()
    torches, pythons, pin = versions["versions"], versions["python"], pinned()
    everywhere = [j for j in rows if not j.own_hardware]
    native = [p.name for p in wheels.packages() if wheels.native(p)]
    pure = [p.name for p in wheels.packages() if p.name not in native]
    filled = {
        "python": pythons[0],
        "torch": pin,
        "torches": f"{torches[0]} {pin} {torches[-1]}",
        "pythons": json.dumps(pythons),
    }
    return {
        "job.yml": HEAD + JOB.lstrip(),
        "check.yml": _workflow(
            "check", "push:\n  branches: [main]\npull_request:",
            [*(_call(j, [pin], pythons if j.name == "host" else pythons[:1]) for j in everywhere), FRAME.format(**filled)],
        ),
        "vendors.yml": _workflow(
            "vendors", 'schedule:\n  - cron: "17 3 * * 6"\nworkflow_dispatch:', (_call(j, torches, pythons) for j in rows)
        ),
        "nightly.yml": _workflow(
            "nightly", 'schedule:\n  - cron: "41 1 * * *"\nworkflow_dispatch:', (_call(j, ["newest"], pythons[-1:]) for j in rows)
        ),
        "release.yml": HEAD + RELEASE.lstrip().format(**filled, pure=",".join(pure), native=",".join(native)),
    }  # fmt: skip


def pinned() -> str:
    """Return the torch version that changes are checked with."""
    found = re.search(r"^torch==(\S+)", (jobs.ROOT / "ci/constraints.txt").read_text(), re.MULTILINE)
    assert found, "ci/constraints.txt pins no torch"
    return found[1]


def stale(folder: Path = FOLDER) -> list[str]:
    """Return the files that differ from what the matrix generates."""
    made = workflows()
    there = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.yml")}
    return sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale():
        path, text = FOLDER / name, workflows().get(name)
        print(f"{'removed' if text is None else 'written'}: {path.relative_to(jobs.ROOT)}")
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
