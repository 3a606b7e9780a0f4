"""Every error Nereus raises on purpose.

NereusError
├── InvalidInput            the caller's request, file or plan is wrong; nothing was changed
│   ├── InvalidPlan         a plan that contradicts itself, its model or its devices
│   └── UnsupportedByEngine a valid plan that the named engine cannot run
├── NotFound
├── Conflict                a compare-and-set lost, or the name is taken
│   ├── StaleEpoch          the caller acts for an epoch that has been superseded
│   └── StaleVersion        the state version asked for is no longer held
├── IllegalTransition       a lifecycle event that the current phase does not allow
├── DeadlineExceeded        somebody waited for somebody, and it took too long
├── Unavailable             a peer, server or store cannot be reached; trying again may help
├── ResourceExhausted       memory, devices, ports or bounded queues are used up
├── VerificationFailed      state arrived, but it is not what was sent
├── ProcessLost             a worker, engine or service process died
└── JobFailed               a job cannot go on
"""

from __future__ import annotations

from collections.abc import Mapping


class NereusError(Exception):
    """Root of all errors. `reason` is stable and machine-readable, `details` names what is concerned.

    The text says who, what and where; `remedy` says what to do, and is part of the text when there is one.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, *, remedy: str = "", **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details: Mapping[str, str] = {key: str(value) for key, value in details.items()}

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.remedy, dict(self.details))


def _rebuild(kind: type[NereusError], message: str, remedy: str, details: dict[str, str]) -> NereusError:
    error = kind.__new__(kind)
    NereusError.__init__(error, message, remedy=remedy, **details)
    return error


class InvalidInput(NereusError):
    reason = "INVALID_INPUT"


class InvalidPlan(InvalidInput):
    reason = "INVALID_PLAN"


class UnsupportedByEngine(InvalidInput):
    reason = "UNSUPPORTED_BY_ENGINE"


class NotFound(NereusError):
    reason = "NOT_FOUND"


class Conflict(NereusError):
    reason = "CONFLICT"


class StaleEpoch(Conflict):
    reason = "STALE_EPOCH"


class StaleVersion(Conflict):
    reason = "STALE_VERSION"


class IllegalTransition(NereusError):
    reason = "ILLEGAL_TRANSITION"


class DeadlineExceeded(NereusError):
    reason = "DEADLINE_EXCEEDED"


class Unavailable(NereusError):
    reason = "UNAVAILABLE"


class ResourceExhausted(NereusError):
    reason = "RESOURCE_EXHAUSTED"


class VerificationFailed(NereusError):
    reason = "VERIFICATION_FAILED"


class ProcessLost(NereusError):
    reason = "PROCESS_LOST"


class JobFailed(NereusError):
    reason = "JOB_FAILED"


def error_kinds() -> dict[str, type[NereusError]]:
    """Reason → the class that declares it, for rebuilding an error that crossed a wire."""

    def walk(kind: type[NereusError]) -> list[type[NereusError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in walk(child))]

    return {kind.reason: kind for kind in walk(NereusError) if "reason" in vars(kind)}
