"""The common base of the forms of a program (graph, region, fragment, kernel, plan): a spec made of rules, and passes, which
are functions from one verified form to another. `passes` lists them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from fusewright.errors import FusewrightError

F = TypeVar("F")
X = ParamSpec("X")
R = TypeVar("R")


class Violation(NamedTuple):
    """A violation of the rule with that id; `text` begins with the location."""

    rule: str
    text: str


class FormError(FusewrightError):
    """A form violates its spec after the pass `after`."""

    after: str = ""
    violations: Sequence[Violation] = ()


@dataclass(frozen=True)
class Rule(Generic[F]):
    """`check` yields one line per violation. Rules after a `basis` rule rely on it, and are skipped if it is violated."""

    id: str
    says: str
    check: Callable[[F], Iterable[str]]
    basis: bool = False


@dataclass(frozen=True)
class Spec(Generic[F]):
    """`content` shows whether an in-place pass has changed the form; None for an immutable form."""

    form: str
    error: type[FormError]
    rules: tuple[Rule[Any], ...]
    facts: Callable[[F], Any] = lambda form: form
    """Compute the facts that rules look at."""
    content: Callable[[F], object] = lambda form: None
    name: Callable[[F], str] = lambda form: ""
    """Name the form among those of its kind."""

    def violations(self, form: F) -> Iterator[Violation]:
        facts = self.facts(form)
        for rule in self.rules:
            found = [Violation(rule.id, text) for text in rule.check(facts)]
            yield from found
            if found and rule.basis:
                return

    def check(self, form: F, after: str) -> None:
        """Raise the form's error with every violation. `after` names the pass."""
        found = list(self.violations(form))
        if found:
            lines = "\n  ".join(f"{v.text} [rule {v.rule}]" for v in found)
            name = f"{self.form} {self.name(form)}".rstrip()
            error = self.error(f"the {name} is not valid after {after}:\n  {lines}")
            error.after, error.violations = after, found
            raise error


def _result(args: tuple[Any, ...], result: Any) -> Iterable[Any]:
    return (result,)


def in_place(args: tuple[Any, ...], result: Any) -> Iterable[Any]:
    """For `Pass.made`: the pass changes its first argument, and returns something else."""
    return args[:1]


@dataclass(eq=False)
class Pass(Generic[X, R]):
    """A function from form `takes`, its first argument, to forms `gives`, which `made` finds in its result. A call verifies
    them, except a form returned unchanged; `run` is the bare function."""

    name: str
    takes: str
    gives: Spec[Any]
    run: Callable[X, R]
    made: Callable[[tuple[Any, ...], R], Iterable[Any]] = _result

    def __call__(self, *args: X.args, **kwargs: X.kwargs) -> R:
        same = self.takes == self.gives.form
        before = self.gives.content(args[0]) if same else None
        result = self.run(*args, **kwargs)
        for form in self.made(args, result):
            if not (same and form is args[0] and self.gives.content(form) == before):
                self.gives.check(form, self.name)
        return result


class Identities:
    """A sequence of objects, compared by identity and order."""

    def __init__(self, objects: Iterable[object]) -> None:
        self.objects = list(objects)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Identities)
            and len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
        )

    __hash__ = None  # type: ignore[assignment]
