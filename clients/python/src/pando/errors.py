"""Errors of the service, and of reaching it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FieldError:
    """What is wrong with a field of a request."""

    message: str
    location: str = ""
    """Such as body.name."""


@dataclass(frozen=True)
class Problem:
    """An error as the service describes it: problem details of RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    kind: str
    op: str = ""
    ref: str = ""
    hint: str = ""
    errors: list[FieldError] = field(default_factory=list)


class PandoError(Exception):
    """An error of the service. Its subclasses are the kinds of errors.

    kind names the kind, op is the operation that failed, ref its object, detail says what failed and why, and hint what
    to do next. status is the status of HTTP, 0 if there was no answer.
    """

    kind = "internal"

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.detail} ({problem.hint})" if problem.hint else problem.detail)
        self.problem = problem
        if problem.kind:
            self.kind = problem.kind

    @property
    def op(self) -> str:
        """The operation that failed."""
        return self.problem.op

    @property
    def ref(self) -> str:
        """The object of the operation."""
        return self.problem.ref

    @property
    def detail(self) -> str:
        """What failed, and why."""
        return self.problem.detail

    @property
    def hint(self) -> str:
        """What to do next; may be empty."""
        return self.problem.hint

    @property
    def status(self) -> int:
        """The status of HTTP."""
        return self.problem.status

    @property
    def errors(self) -> list[FieldError]:
        """Fields of the request that are invalid."""
        return self.problem.errors


class Internal(PandoError):
    """A bug of the service, or an answer that this client does not understand."""


class Invalid(PandoError):
    """The request is invalid."""

    kind = "invalid"


class NotFound(PandoError):
    """There is no such object."""

    kind = "not_found"


class Exists(PandoError):
    """An object has this name already."""

    kind = "exists"


class InUse(PandoError):
    """The object is in use."""

    kind = "in_use"


class NoSpace(PandoError):
    """There is not enough free space."""

    kind = "no_space"


class Permission(PandoError):
    """This caller may not do this."""

    kind = "permission"


class Unsupported(PandoError):
    """This pool, host or kind of object cannot do this."""

    kind = "unsupported"


class Conflict(PandoError):
    """The state of the object, or another request, does not allow this."""

    kind = "conflict"


class Changed(Conflict):
    """The object has another ETag than if_match says."""


class Damaged(PandoError):
    """Stored data is damaged."""

    kind = "damaged"


class TooNew(PandoError):
    """A newer version of Pando has written this."""

    kind = "too_new"


class IOFailed(PandoError):
    """A disk or the network of the service failed."""

    kind = "io"


class Canceled(PandoError):
    """The operation was canceled, and undone."""

    kind = "canceled"


class Unreachable(PandoError, ConnectionError):
    """The service cannot be reached, or the connection was lost before the answer.

    sent reports whether the service may have carried out the request.
    """

    kind = "unreachable"

    def __init__(self, problem: Problem, *, sent: bool = True) -> None:
        super().__init__(problem)
        self.sent = sent


KINDS: dict[str, type[PandoError]] = {
    c.kind: c
    for c in (
        Internal,
        Invalid,
        NotFound,
        Exists,
        InUse,
        NoSpace,
        Permission,
        Unsupported,
        Conflict,
        Damaged,
        TooNew,
        IOFailed,
        Canceled,
    )
}

PRECONDITION_FAILED = 412


def error_of(problem: Problem) -> PandoError:
    """Returns the exception for a problem."""
    if problem.status == PRECONDITION_FAILED:
        return Changed(problem)
    return KINDS.get(problem.kind, PandoError)(problem)


def internal(detail: str) -> Internal:
    """Returns the error of an answer that this client does not understand."""
    return Internal(Problem("urn:pando:internal", "", 0, detail, "internal"))


def invalid(detail: str, hint: str = "") -> Invalid:
    """Returns the error of an argument that is refused here."""
    return Invalid(Problem("urn:pando:invalid", "", 0, detail, "invalid", hint=hint))
