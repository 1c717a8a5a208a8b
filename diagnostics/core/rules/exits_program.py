"""Ends of workers by the program itself, as the interpreter tells of them.

A program that ends itself with a line that says why (argparse, a shell, the interpreter that finds
no script) has raised `SystemExit`, as the agent reports it, and that line is its message.
"""

from __future__ import annotations

import re

from diagnostics.core.rules.exit_meaning import ExitMeaning, ExitRule
from diagnostics.core.rules.table import Rule
from outlast.failures import FailureClass

PROGRAM: tuple[ExitRule, ...] = (
    Rule(
        name="shapes and arguments",
        means=ExitMeaning(fault_class=FailureClass.PROGRAM_ERROR, in_stderr=False),
        pattern=re.compile(
            r"shapes cannot be multiplied|must match the size of tensor|"
            r"shape '\[.*\]' is invalid for input|size mismatch|inconsistent tensor size|"
            r"Expected all tensors to be on the same device|does not require grad|"
            r"modified by an inplace operation"
        ),
        matches=(
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 2x3)",
            "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at "
            "non-singleton dimension 1",
            "RuntimeError: shape '[2]' is invalid for input of size 3",
            "RuntimeError: inconsistent tensor size, expected tensor [3] and src [4]",
        ),
        misses=("RuntimeError: Connection closed by peer",),
    ),
    Rule(
        name="arguments",
        means=ExitMeaning(fault_class=FailureClass.PROGRAM_ERROR, in_stderr=False),
        pattern=re.compile(r"^SystemExit: (?:\S.*: )?[Ee]rror: "),
        matches=(
            "SystemExit: train.py: error: argument --lr: invalid float value: 'fast'",
            "SystemExit: python -m train: error: the following arguments are required: --data",
            "SystemExit: Error: Invalid value for '--lr': 'fast' is not a valid float.",
        ),
        misses=(
            "SystemExit: 3",
            "SystemExit: /venv/bin/python3: No module named train",
            "RuntimeError: train.py: error: argument --lr",
        ),
    ),
    Rule(
        name="not there",
        means=ExitMeaning(fault_class=FailureClass.MISSING, in_stderr=False),
        pattern=re.compile(
            r"^(?:FileNotFoundError|PermissionError|IsADirectoryError|NotADirectoryError|"
            r"ImportError|ModuleNotFoundError)\b|"
            r"^SystemExit: \S+: (?:can't open file |No module named |Error while finding module )|"
            r"^SystemExit: .*: (?:No such file or directory|Not a directory|"
            r"(?:command )?not found)$"
        ),
        matches=(
            "FileNotFoundError: [Errno 2] No such file or directory: 'train.txt'",
            "PermissionError: [Errno 13] Permission denied: '/data/train.txt'",
            "ModuleNotFoundError: No module named 'flash_attn'",
            "ImportError: libcudart.so.12: cannot open shared object file",
            "SystemExit: /venv/bin/python: can't open file '/job/train.py': [Errno 2] No such file "
            "or directory",
            "SystemExit: /venv/bin/python: can't open file '/job/train.py': [Errno 13] Permission "
            "denied",
            "SystemExit: /venv/bin/python: No module named train",
            "SystemExit: /venv/bin/python: Error while finding module specification for 'a.train' "
            "(ModuleNotFoundError: No module named 'a')",
            "SystemExit: outlast: cannot start 'train.sh': No such file or directory",
            "SystemExit: bash: line 1: no-such-program: command not found",
            "SystemExit: sh: 1: no-such-program: not found",
        ),
        misses=(
            "OSError: [Errno 5] Input/output error",
            "ValueError: FileNotFoundError in a message",
            "SystemExit: the data was not found",
        ),
    ),
    Rule(
        name="cannot be executed",
        means=ExitMeaning(fault_class=FailureClass.CONFIG, in_stderr=False),
        pattern=re.compile(
            r"^SystemExit: .*: (?:Permission denied|Exec format error|Is a directory|"
            r"Argument list too long)$"
        ),
        matches=(
            "SystemExit: outlast: cannot start './train.sh': Permission denied",
            "SystemExit: outlast: cannot start './train': Exec format error",
            "SystemExit: bash: line 1: ./train.sh: Permission denied",
            "SystemExit: bash: line 1: ./job: Is a directory",
        ),
        misses=(
            "SystemExit: outlast: cannot start './train.sh': No such file or directory",
            # It may be written at this moment.
            "SystemExit: outlast: cannot start './train': Text file busy",
            "PermissionError: [Errno 13] Permission denied: 'train.txt'",
        ),
    ),
    Rule(
        name="interpreter",
        means=ExitMeaning(fault_class=FailureClass.PROGRAM_ERROR, in_stderr=False),
        pattern=re.compile(
            r"^(?:KeyError|IndexError|AttributeError|TypeError|ValueError(?!: (?:cannot )?mmap )|"
            r"NameError|UnboundLocalError|AssertionError|ZeroDivisionError|SyntaxError|"
            r"IndentationError|RecursionError|NotImplementedError)\b"
        ),
        matches=(
            "KeyError: 'input_ids'",
            "AssertionError: heads must divide by tp",
            "SyntaxError: invalid syntax (model.py, line 3)",
        ),
        misses=(
            "RuntimeError: KeyError in a message",
            "OSError: [Errno 5] Input/output error",
            # Of what was read, which may be damaged.
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0",
            "ValueError: cannot mmap an empty file",
            "ValueError: mmap length is greater than file size",
        ),
    ),
)
