"""Generate the tables in the docs that come from code, and the pages of results: `python -m ci.docs.tables` writes them."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

from ci import jobs
from ci.docs import results, support
from fusewright.config import ENV, PREFIX, Options

ROOT = Path(__file__).resolve().parents[2]
GENERATED = [ROOT / "docs/reliability.md", ROOT / "docs/contributing.md", ROOT / "docs/support.md", ROOT / "docs/libraries.md"]


def options() -> str:
    """Return the table of every option and environment variable, from `fusewright.config`."""
    of_option = {
        f"{PREFIX}{f.metadata['env']}": f
        for f in Options.__dataclass_fields__.values()
        if f.metadata.get("env")
    }
    rows = []
    for name, var in ENV.items():
        option = f"`{of_option[name].name}`" if name in of_option else ""
        default = f"`{var.default!r}`" if var.default not in ("", ()) else ""
        rows.append(f"| {option} | `{name}` | {_spelled(var.type)} | {default} | {var.help} |")
    return "\n".join(["| option | variable | type | default | meaning |", "|---|---|---|---|---|", *rows])


def _spelled(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{c}`" for c in typing.get_args(kind))
    return {tuple: "names"}.get(
        typing.get_origin(kind), str(getattr(kind, "__name__", kind)).replace(" | None", "")
    )


TABLES = {
    "options": options, "jobs": lambda: jobs.table(jobs.read()[0]), "support": support.matrix,
    "libraries": lambda: results.newest("libraries") or NOT_MEASURED.format("libraries"),
}  # fmt: skip
NOT_MEASURED = (
    "No figures yet: `python -m ci.bench.{0} --json docs/results/DATE-MACHINE-{0}.json` measures them on an idle machine, and "
    "`python -m ci.docs.tables` puts them here."
)


def updated(page: Path) -> str:
    """Return the page's text with each table regenerated."""
    text = page.read_text()
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for generated in GENERATED:
        generated.write_text(updated(generated))
    for path, text in results.pages().items():
        path.write_text(text, encoding="utf-8")
