"""The `slipstream` command: its subcommands, whose heavy imports wait until they run."""

import os
import re
import sys
from typing import Annotated

import typer

from slipstream.cli.check import check
from slipstream.cli.doctor import doctor
from slipstream.cli.models import evaluate, export, generate
from slipstream.cli.options import CommandWithSettings, LogLevel, Quiet, chosen_level, with_output_options
from slipstream.cli.plan import plan
from slipstream.cli.profile import profile
from slipstream.cli.timeline import timeline
from slipstream.cli.train import init, runs, train
from slipstream.errors import InterruptedRunError, NonFiniteError, RankFailedError, SlipstreamError, StoppedRunError
from slipstream.terminal import at_level, fail
from slipstream.version import __version__

_INTERRUPTED = 130  # typer's exit code, silently, after Ctrl-C

app = typer.Typer(
    help="Pipeline-parallel training of causal language models with token slices.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # the settings of every command
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=CommandWithSettings)(with_output_options(init))
app.command(cls=CommandWithSettings)(with_output_options(train))
for command in (doctor, runs, timeline, check, profile, plan, export):
    app.command()(with_output_options(command))
# Python has a function `eval`, so this command's is called otherwise.
app.command("eval", cls=CommandWithSettings)(with_output_options(evaluate))
app.command()(with_output_options(generate))


def _show_version(asked: bool) -> None:
    if asked:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def _common_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
    quiet: Quiet = False,
    log_level: LogLevel = None,
) -> None:
    context.with_resource(at_level(chosen_level(quiet, log_level)))


def _with_home(word: str) -> str:
    """Returns an option with the home folder in place of ~, which a shell replaces at the beginning of words alone."""
    option = _OPTION_OF_HOME.fullmatch(word)
    return word if option is None else option[1] + os.path.expanduser(option[2])


_OPTION_OF_HOME = re.compile(r"(--[\w-]+=)(~.*)")


def main() -> None:
    """Runs the command. Exits with 0, or with 1 if a rank or a check failed, 2 for bad input, 3 where numbers of a run
    aren't finite, 75 where TERM or USR1 asked the run to stop, 130 after Ctrl-C.

    An error is the last thing on standard error.
    """
    sys.argv[1:] = map(_with_home, sys.argv[1:])
    try:
        app()
    except SlipstreamError as error:
        fail(f"error: {error}", 2)
    except NonFiniteError as error:
        fail(f"error: {error}", 3)
    except StoppedRunError as ending:
        fail(str(ending), StoppedRunError.exit_code)
    except RankFailedError as error:
        fail(f"error: {error}", 1, at_once=True)
    except InterruptedRunError as interruption:
        fail(f"interrupted; all ranks have ended; {interruption}", _INTERRUPTED)
    except SystemExit as ending:
        if ending.code != _INTERRUPTED:
            raise
        fail("interrupted; all ranks have ended", _INTERRUPTED)
