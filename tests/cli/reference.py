"""docs/reference/cli.md from the command's own help: `python -m tests.cli.reference` writes it."""

from __future__ import annotations

from pathlib import Path

from typer.main import get_command

from outlast.cli.main import app
from tests.cli.running import outlast

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
_INTRODUCTION = """# The `outlast` command

This page is generated from `outlast COMMAND --help`; a test keeps it fresh, and
`python -m tests.cli.reference` writes it again.

`--json` is on every command that prints facts: one document, or one document a
line for commands that print as things happen (`watch`, `submit --watch`,
`logs`). JOB is a job id, a job's name, or an unambiguous beginning
of an id; of several jobs with one name, the one that has not finished is meant.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | the job failed or was cancelled (`watch`, `submit --watch`), a check failed \
(`diagnose`), logs are missing (`logs`), a message was not taken (`notify`), the demo did not \
pass (`demo`), or a service broke (`up`, `controller`) |
| 2 | bad usage, a wrong spec, no such thing, or a request that the job's state refuses |
| 3 | no controller answers |
| 130 | interrupted by Ctrl-C |

`run` ends with its script's own exit code, or 128 + N where signal N ended it.

Where the controller is: `--controller HOST:PORT`, else `OUTLAST_CONTROLLER`,
else what `controller.json` in `--state-dir` (or `OUTLAST_STATE_DIR`) says.
"""


def render() -> str:
    """The whole page."""
    sections = [_INTRODUCTION]
    for path in _commands(get_command(app), ()):
        # Always as wide, whatever terminal this runs on.
        helped = outlast(*path, "--help", COLUMNS="80")
        sections.append(f"## outlast {' '.join(path)}\n\n```\n{helped.stdout.strip()}\n```\n")
    return "\n".join(sections)


def _commands(command: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    inner: dict[str, object] = getattr(command, "commands", {})
    if not inner:
        return [path]
    found = [path] if path else []
    for name, each in inner.items():
        found += _commands(each, (*path, name))
    return found


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render())
