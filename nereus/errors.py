"""The errors that Nereus raises on purpose, for `except nereus.errors.Unavailable:`."""

from nereus_common.core.errors import (
    Conflict,
    DeadlineExceeded,
    IllegalTransition,
    InvalidInput,
    InvalidPlan,
    JobFailed,
    NereusError,
    NotFound,
    ProcessLost,
    ResourceExhausted,
    StaleEpoch,
    StaleVersion,
    Unavailable,
    UnsupportedByEngine,
    VerificationFailed,
)

__all__ = [
    "Conflict",
    "DeadlineExceeded",
    "IllegalTransition",
    "InvalidInput",
    "InvalidPlan",
    "JobFailed",
    "NereusError",
    "NotFound",
    "ProcessLost",
    "ResourceExhausted",
    "StaleEpoch",
    "StaleVersion",
    "Unavailable",
    "UnsupportedByEngine",
    "VerificationFailed",
]
