"""The group of commands and their exit codes. A command's module is imported only when it is called."""

import atexit
import contextlib
import errno
import gc
import importlib
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Mapping

import click

from fsdpbench import __version__, is_command
from fsdpbench.base import interruption
from fsdpbench.base.errors import BenchError, ExitCode, unknown
from fsdpbench.base.files.documents import rows_beside
from fsdpbench.cli.output import say, tell
from fsdpbench.cli.requests.completion import COMPLETE_VARIABLE, answer
from fsdpbench.cli.startup import check_place

_ROWS = rows_beside(__file__, "commands.csv")
_COMMANDS = {row["command"]: row["summary"] for row in _ROWS}
_PLACES = {row["command"]: row["place"] for row in _ROWS if row["place"]}

_OBJECTS_BETWEEN_COLLECTIONS = 100_000
_NO_COMMAND: type[Exception] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _LazyGroup(click.Group):
    """A group that lists the names and one-line help texts of commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS and not ctx.resilient_parsing:
            raise unknown("command", name, _COMMANDS, "fsdpbench --help")
        return command_named(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def command_named(name: str) -> click.Command | None:
    """Return the command `name`, None if there is none."""
    if name not in _COMMANDS:
        return None
    module, _, function = _PLACES.get(name, f"commands.{name}.command").rpartition(".")
    command: click.Command = getattr(importlib.import_module(f"fsdpbench.cli.{module}"), function)
    words = {(row["command"], row["option"]): row["help"] for row in rows_beside(__file__, "options.csv")}
    _describe_options(command, name, words)
    return command


def _describe_options(command: click.Command, name: str, words: Mapping[tuple[str, str], str]) -> None:
    """Give each option without a help text the one of `options.csv`: the command's own row, else the shared
    row. Refuse empty values of options. Raises `KeyError` for an option without any text."""
    for option in command.params:
        if isinstance(option, click.Option) and option.flag_value != "":  # "": the value is optional
            option.callback = option.callback or _not_empty
        if isinstance(option, click.Option) and option.help is None and not option.hidden:
            flag = max(option.opts, key=len)
            option.help = words.get((name, flag)) or words["", flag]
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        _describe_options(part, f"{name} {part.name}", words)


def _not_empty(context: click.Context, option: click.Parameter, value: object) -> object:
    """Return an option's value; refuse an empty one, because an unset shell variable is not the default."""
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise click.BadParameter("it is empty; leave the option out for its default", context, option)
    return value


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fsdpbench")
def _group() -> None:
    """Run FSDP configurations on GPUs, CPUs or simulated GPUs, and see what they cost."""


def run() -> None:
    """Run the command that the arguments name and end the process."""
    # Torch creates hundreds of thousands of objects, none of them garbage. Collect less often than by
    # default, and not at exit, which would take a third of a second.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)
    try:
        code = _invoke()
    except BaseException as error:
        # After a signal, any exception may be a consequence of it, so it is not reported.
        if interruption.arrived():
            code = ExitCode.OK
        elif isinstance(error, Exception):
            say(crash_line(error))
            code = ExitCode.BENCH_FAILED
        else:
            raise
    if number := interruption.arrived():
        _end_interrupted(number)
    sys.exit(int(code))


def _invoke() -> int:
    """Run the command and return its exit code. Raises unexpected exceptions."""
    code: int = ExitCode.OK
    if COMPLETE_VARIABLE in os.environ:
        return answer(_group)
    try:
        check_place()
        try:
            # Not click's own `main`, which exits with 1 (here: a regression) on a closed pipe.
            with _group.make_context("fsdpbench", sys.argv[1:]) as context:
                _group.invoke(context)
        except click.exceptions.Exit as stop:
            code = stop.exit_code
        sys.stdout.flush()
    except _NO_COMMAND as error:
        tell(error)
        return ExitCode.USAGE
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "fsdpbench")
        say(f"{' '.join(error.format_message().split())} (`{command} --help` tells more)")
        return ExitCode.USAGE
    except BenchError as error:
        say(error)
        return error.exit_code
    return code


def _end_interrupted(number: int) -> None:
    """End the process with the exit code of signal `number`. All resources were released while unwinding."""
    resumes = any(row["command"] in sys.argv[1:2] and row["resumes"] for row in _ROWS)
    kept = "; finished work is kept, start the same command again to resume"
    say(f"interrupted{kept if resumes else ''}")
    if not is_command():
        interruption.forget()
        sys.exit(128 + number)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(128 + number)


# For an unexpected exception, print one line, write the traceback to a file, and exit with 5. Python's own
# exit code 1 would read as a regression in a pipeline.


def crash_line(error: BaseException) -> str:
    """Return one line on `error`: its type, its location, and the file with the traceback."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        way_out = "raise the limit (ulimit -n 4096) or take fewer --jobs; what is finished is kept"
        return f"{error.strerror}: {way_out}"
    where = _place(error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        file = _write(error)
    except OSError as refused:
        kept = f"its traceback cannot be written to {tempfile.gettempdir()} ({refused.strerror})"
    else:
        kept = f"its traceback is in {file}"
    return f"the bench itself failed: {what} (at {where}); {kept}"


def _write(error: BaseException) -> str:
    """Write the traceback into the folder for temporary files. Raises `OSError` if that fails."""
    handle, path = tempfile.mkstemp(prefix="fsdpbench-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        torch = sys.modules.get("torch")
        versions = f"fsdpbench {__version__}, Python {platform.python_version()}, "
        file.write(versions + f"torch {getattr(torch, '__version__', 'not loaded')}, {platform.platform()}\n")
        file.write(f"{sys.argv}\n\n")
        file.writelines(traceback.format_exception(error))
    return path


def _place(error: BaseException) -> str:
    """Return the innermost line of the traceback, as in `results/store.py:42`."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    folder, name = os.path.split(frames[-1].filename)
    return f"{os.path.basename(folder)}/{name}:{frames[-1].lineno}"
