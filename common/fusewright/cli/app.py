"""The group of subcommands. Each is a module of this package, imported on use."""

from __future__ import annotations

import importlib

import click

from fusewright import __version__
from fusewright.errors import nearest

# name -> one line of help, so that `fusewright --help` imports neither torch nor a backend
COMMANDS = {
    "doctor": "Check every installed backend on this machine, with a real computation.",
    "explain": "Show what becomes of a model: coverage, fallbacks with reasons, partitions, plan.",
    "bench": "Time models against eager and Inductor, interleaved.",
    "report": "Write a page about a model: fusion graph, time by kernel, first call, memory, accuracy.",
    "new-backend": "Write a package for a backend of your own.",
    "quantize": "Quantize a model to 8 bits, and tell what each layer loses.",
    "conformance": "Check that a backend is right, and how much of the opset it lowers.",
    "cache": "List, measure or clear the plans kept on disk.",
    "config": "List the options and environment variables with their values.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            ctx.fail(f"there is no command {cmd_name!r}; {nearest(cmd_name, COMMANDS)}")
        attribute = cmd_name.replace("-", "_")
        module = importlib.import_module(f"fusewright.cli.{attribute}")
        command: click.Command = getattr(module, attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fusewright")
def app() -> None:
    """Fusewright: a family of torch.compile backends."""
