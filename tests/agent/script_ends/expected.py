"""What agent and controller are to make of the ends in `recorded.json`."""

from __future__ import annotations

from outlast.failures import FailureClass

PROGRAM, USER = FailureClass.PROGRAM_ERROR, FailureClass.USER_ERROR
MISSING, CONFIG = FailureClass.MISSING, FailureClass.CONFIG
NUMBER = "invalid literal for int() with base 10: 'a hundred'"
# Of ends that are alike whether torch reports them or Python prints them: type, class, first line.
BY_EXCEPTION = {
    "value_error": ("builtins.ValueError", PROGRAM, f"ValueError: {NUMBER}"),
    "value_error_twice": ("builtins.ValueError", PROGRAM, "ValueError: row 7 is bad"),
    "value_error_of_a_file": ("builtins.ValueError", USER, "ValueError: no rows"),
    "own_error": ("__main__.DataError", USER, "__main__.DataError: 3 rows are bad:"),
    "nested_error": (
        "nested_error.<locals>.InnerError",
        USER,
        "nested_error.<locals>.InnerError: ",
    ),
    "json_error": (
        "json.decoder.JSONDecodeError",
        USER,
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)",
    ),
    "noted_error": ("builtins.TypeError", PROGRAM, "TypeError: not a tensor"),
    "group": (
        "builtins.ExceptionGroup",
        USER,
        "ExceptionGroup: 2 loaders failed (2 sub-exceptions)",
    ),
    "no_module": (
        "builtins.ModuleNotFoundError",
        MISSING,
        "ModuleNotFoundError: No module named 'flash_attn_of_nobody'",
    ),
    "no_file": (
        "builtins.FileNotFoundError",
        MISSING,
        "FileNotFoundError: [Errno 2] No such file or directory: 'train.bin'",
    ),
    "cuda_oom": (
        "torch.OutOfMemoryError",
        FailureClass.CUDA_OOM,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
        "total capacity of 79.15 GiB",
    ),
    "host_oom": (
        "builtins.RuntimeError",
        FailureClass.OOM_HOST,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 4611686018427387904 bytes. Error code 12 (Cannot "
        "allocate memory)",
    ),
    "shapes": (
        "builtins.RuntimeError",
        PROGRAM,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
    ),
    "no_name": (
        "socket.gaierror",
        FailureClass.UNKNOWN,
        "socket.gaierror: [Errno -2] Name or service not known",
    ),
    "no_service": (
        "urllib.error.URLError",
        FailureClass.UNKNOWN,
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
    ),
    "error_with_peer": ("__main__.DataError", USER, "__main__.DataError: 3 rows are bad:"),
    "error_in_progress": ("builtins.ValueError", PROGRAM, f"ValueError: {NUMBER}"),
    "error_and_noise": ("builtins.KeyError", PROGRAM, "KeyError: 'label'"),
    "pool": ("builtins.KeyError", PROGRAM, "KeyError: 'label'"),
}
SILENT = (
    *("logged_and_went_on", "printed_and_went_on", "thread", "child_process"),
    *("exit_code", "interrupted"),
)
# Of ends whose words are those of one form, or that differ from run to run.
BY_NAME = {
    "plain syntax_error": ("builtins.SyntaxError", PROGRAM, "SyntaxError: invalid syntax"),
    "recorded syntax_error": (
        "builtins.SyntaxError",
        PROGRAM,
        "SyntaxError: invalid syntax (config.py, line 1)",
    ),
    "recorded told_traceback": ("builtins.RuntimeError", USER, "RuntimeError: a worker said:"),
    "plain no script": (
        "SystemExit",
        MISSING,
        "/venv/bin/python: can't open file '/job/nothing.py': [Errno 2] No such file or directory",
    ),
    "plain no module to run": (
        "SystemExit",
        MISSING,
        "/venv/bin/python: Error while finding module specification for 'nothing.of.ours' "
        "(ModuleNotFoundError: No module named 'nothing')",
    ),
    "plain package to run": (
        "SystemExit",
        MISSING,
        "/venv/bin/python: No module named json.__main__; 'json' is a package and cannot be "
        "directly executed",
    ),
    "plain wrong argument": (
        "SystemExit",
        PROGRAM,
        "train.py: error: argument --lr: invalid float value: 'fast'",
    ),
    "plain wrong argument of click": (
        "SystemExit",
        PROGRAM,
        "Error: Invalid value for '--lr': 'fast' is not a valid float.",
    ),
    "plain shell without the program": (
        "SystemExit",
        MISSING,
        "bash: line 1: no-such-program: command not found",
    ),
    "plain shell and a text": (
        "SystemExit",
        CONFIG,
        "bash: line 1: ./notes.txt: Permission denied",
    ),
    "plain exception of a line": (
        "builtins.ZeroDivisionError",
        PROGRAM,
        "ZeroDivisionError: division by zero",
    ),
    "forked no program": (
        "SystemExit",
        MISSING,
        "outlast: cannot start './no-such-program': No such file or directory",
    ),
    "forked program that is a text": (
        "SystemExit",
        CONFIG,
        "outlast: cannot start './notes.txt': Permission denied",
    ),
    "forked program of another machine": (
        "SystemExit",
        CONFIG,
        "outlast: cannot start './program': Exec format error",
    ),
}
KINDS = ("plain", "recorded")
EXPECTED = {
    **{f"{kind} {name}": told for kind in KINDS for name, told in BY_EXCEPTION.items()},
    **BY_NAME,
    "forked no script": BY_NAME["plain no script"],
    "forked no module to run": BY_NAME["plain no module to run"],
    "forked value_error": BY_EXCEPTION["value_error"],
}
# A message with a traceback of its own looks as if it went on with that.
AMBIGUOUS = ("plain told_traceback",)
CASCADES = ("lost_peer", "no_store")
