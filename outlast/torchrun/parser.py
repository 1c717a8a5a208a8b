"""torchrun's command line as argparse reads it: its flags, spellings, defaults and PET_ variables.

The same names, types, defaults and order as `torch.distributed.run.get_args_parser` has, without
importing torch; a test compares the two on the torch of the constraints. What the values mean:
`outlast.torchrun.flags`.
"""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

# torchrun reads the default of a flag from this and its name in capital letters.
PREFIX = "PET_"
# What torch.numa.binding offers.
_BINDINGS = ("node", "socket", "exclusive", "core-complex")


class FlagError(ValueError):
    """A command line that torchrun would refuse; as text with the usage before it."""

    def __init__(self, usage: str, prog: str, message: str) -> None:
        super().__init__(f"{usage}{prog}: error: {message}")
        self.message = message


class HelpWantedError(Exception):
    """The command line asks for help."""


class FlagParser(ArgumentParser):
    """An argument parser that raises what it would print and exit with."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(self.format_usage(), self.prog, message)

    def print_help(self, file: object = None) -> NoReturn:
        raise HelpWantedError


def flag_parser(environ: Mapping[str, str], prog: str) -> FlagParser:
    """The parser of torchrun's command line, with defaults out of `environ`.

    Raises:
        FlagError: a PET_ variable of a flag without a value is not a number.
    """
    usage = f"{prog} [options] SCRIPT [arguments of the script]"
    parser = FlagParser(prog=prog, usage=usage)
    flags = _Flags(parser, environ)
    _add_size(flags)
    _add_rendezvous(flags)
    _add_launch(flags)
    _add_output(flags)
    _add_rest(flags)
    parser.add_argument(
        "training_script", metavar="SCRIPT", help="the script, or the module with -m"
    )
    arguments = parser.add_argument(
        "training_script_args", nargs=REMAINDER, help="arguments of the script"
    )
    # Else a command line without a script lacks them, too.
    arguments.required = False
    return parser


def add_own_flags(parser: FlagParser) -> None:
    """Flags that torchrun does not have."""
    flags = _Flags(parser, {})
    flags.value(
        "nodes",
        kind=int,
        reads_environ=False,
        help="play so many nodes on this machine; what --nnodes leaves over are spares. With "
        "--server the same as --nnodes",
    )
    flags.value(
        "server",
        "",
        reads_environ=False,
        help="run on the nodes of this controller (gRPC); by default on this machine, with a "
        "controller that ends with the command",
    )
    flags.value(
        "code",
        "",
        reads_environ=False,
        help="with --server: send this folder along, which must be the current one or above it; "
        "ranks run in a copy",
    )


class _Flags:
    """Adds flags whose defaults come from the environment."""

    def __init__(self, parser: FlagParser, environ: Mapping[str, str]) -> None:
        self._parser, self._environ = parser, environ

    def value(
        self,
        name: str,
        default: object = None,
        *,
        help: str,
        short: str | None = None,
        kind: Callable[[str], object] = str,
        choices: Sequence[str] | None = None,
        reads_environ: bool = True,
    ) -> None:
        """A flag with a value; `kind` reads the text, that of a variable too."""
        if reads_environ:
            default = self._environ.get(_variable(name), default)
        self._parser.add_argument(
            *_spellings(name, short), type=kind, default=default, choices=choices, help=help
        )

    def switch(self, name: str, *, help: str, short: str | None = None) -> None:
        """A flag without a value; its variable is 0 or another number."""
        given = self._environ.get(_variable(name), "0")
        try:
            default = bool(int(given))
        except ValueError:
            self._parser.error(f"{_variable(name)} is {given!r}; allowed: 0 or 1")
        spellings = _spellings(name, short)
        self._parser.add_argument(*spellings, action="store_true", default=default, help=help)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _spellings(name: str, short: str | None) -> tuple[str, ...]:
    """`--a-b`, `--a_b` and the short one, of the name a_b."""
    dashes = name.replace("_", "-")
    long = dict.fromkeys((f"--{dashes}", f"--{name}"))
    return (*([] if short is None else [short]), *long)


def comma_separated(text: str) -> list[str]:
    """The items of a list; two commas are one in an item."""
    # As torch has it, so that whatever it makes of odd input is the same here.
    placeholder = "<COMMA_PLACEHOLDER>"
    return [item.replace(placeholder, ",") for item in text.replace(",,", placeholder).split(",")]


def _add_size(flags: _Flags) -> None:
    flags.value("nnodes", "1:1", help="number of nodes, or MIN:MAX for an elastic job")
    flags.value("nproc_per_node", "1", help="ranks on each node: a number, or as many as it has")


def _add_rendezvous(flags: _Flags) -> None:
    flags.value("rdzv_backend", "static", help="without effect here")
    flags.value("rdzv_endpoint", "", help="without effect here")
    flags.value("rdzv_id", "none", help="id of the run, as TORCHELASTIC_RUN_ID")
    flags.value("rdzv_conf", "", help="without effect here")
    flags.switch("standalone", help="one machine, whatever the other --rdzv flags say")


def _add_launch(flags: _Flags) -> None:
    flags.value(
        "max_restarts",
        0,
        kind=int,
        help="faults to survive without a checkpoint in between; 10 unless given",
    )
    flags.value("monitor_interval", 0.1, kind=float, help="without effect here")
    methods = ("spawn", "fork", "forkserver")
    flags.value("start_method", "spawn", choices=methods, help="without effect here")
    flags.value("event_log_handler", "null", help="without effect here")
    flags.value("role", "default", help="ROLE_NAME of the ranks")
    flags.switch("module", short="-m", help="the script is a module, as with python -m")
    flags.switch("no_python", help="run the script itself, not Python with the script")
    flags.switch("run_path", help="run the script with runpy.run_path")


def _add_output(flags: _Flags) -> None:
    flags.value("log_dir", help="folder for --tee and --redirects; a temporary one by default")
    flags.value(
        "redirects",
        "0",
        short="-r",
        help="write output to files only: 3, or as in 0:3,1:3 of some local ranks; 0: none",
    )
    flags.value("tee", "0", short="-t", help="the same, and show it, too")
    flags.value("local_ranks_filter", "", help="show the output of these local ranks only")
    without = "without effect here"
    flags.value("duplicate_stdout_filters", [], kind=comma_separated, help=without)
    flags.value("duplicate_stderr_filters", [], kind=comma_separated, help=without)


def _add_rest(flags: _Flags) -> None:
    flags.value("node_rank", 0, kind=int, help="without effect here")
    flags.value("master_addr", "127.0.0.1", help="without effect here")
    flags.value("master_port", kind=int, help="without effect here")
    flags.value("local_addr", help="without effect here")
    flags.value("logs_specs", reads_environ=False, help="without effect here")
    flags.value("numa_binding", choices=_BINDINGS, reads_environ=False, help="without effect here")
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    flags.value("signals_to_handle", signals, help="without effect here")
    flags.value("shutdown_timeout", kind=int, help="seconds that ranks have to stop in")
    flags.switch("virtual_local_rank", help="without effect here")
