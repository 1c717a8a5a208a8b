"""What can be wrong with a job spec, and how it is said: field, value, what is allowed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One thing wrong with a spec: where, and what is allowed there."""

    field: str
    message: str


class SpecError(ValueError):
    """A spec that cannot run; `problems` holds every reason."""

    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        self.problems = problems
        lines = "\n".join(f"  {problem.field}: {problem.message}" for problem in problems)
        super().__init__(f"the job spec has {len(problems)} problem(s):\n{lines}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divides:
    """A rule: `by` must divide the value of `field`."""

    field: str
    value: int
    by_name: str
    by: int

    def problems(self) -> list[FieldProblem]:
        """What is wrong, with the nearest values of both that would be right."""
        if self.value % self.by == 0:
            return []
        near = nearest_multiples(self.value, self.by)
        divisors = [str(n) for n in range(1, min(self.value, 128) + 1) if self.value % n == 0]
        return [
            FieldProblem(
                field=self.field,
                message=f"is {self.value}, which {self.by_name} = {self.by} does not divide; "
                f"allowed near it: {near}, or {self.by_name} in {{{', '.join(divisors)}}}",
            )
        ]


def nearest_multiples(value: int, by: int) -> str:
    """The multiples of `by` on both sides of `value`, in words."""
    below = value // by * by
    return " or ".join(str(n) for n in (below, below + by) if n > 0)


def only_with(field: str, value: object, needed: str, given: object) -> FieldProblem:
    """`field` has a value that means nothing here."""
    return FieldProblem(
        field=field,
        message=f"is {value}, which applies only with {needed}, not {given}; leave it out",
    )
