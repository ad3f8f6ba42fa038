"""`fusewright new-backend`: a package for a backend of one's own."""

from __future__ import annotations

from pathlib import Path

import click

from fusewright import registry, scaffold
from fusewright.scaffold import LICENSES, Package, ScaffoldError


@click.command("new-backend")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), help="The package's folder.  [default: ./NAME]")
@click.option("--license", type=click.Choice(LICENSES), default="LicenseRef-Proprietary", show_default=True, help="SPDX name.")
def new_backend(name: str, into: Path | None, license: str) -> None:
    """Write a backend's package: it installs, passes conformance with nothing lowered, and grows op by op."""
    folder = into or Path(name)
    package = Package(name, license)
    try:
        scaffold.check_name(name, (*registry.plugins(), *_torch_names()))
        made = scaffold.write(package, folder)
    except ScaffoldError as e:
        raise click.UsageError(str(e)) from None
    except OSError as e:
        raise click.UsageError(f"cannot write {e.filename}: {e.strerror}") from None
    for path in made:
        click.echo(f"  {path}")
    click.echo(f"\npip install {folder if folder.is_absolute() else f'./{folder}'}")
    click.echo(f"fusewright conformance --backend {name}")
    click.echo(f"Then add rows to {folder / package.module / 'lowerings.py'}; docs/adding_a_backend.md shows how.")


def _torch_names() -> list[str]:
    """Backends that `torch.compile` knows without Fusewright."""
    import torch

    return torch.compiler.list_backends(exclude_tags=())
