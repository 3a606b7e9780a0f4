"""The registry: devices, units, plans, jobs, events and leases of a cluster, in Redis or Valkey.

`open_registry(url)` gives a `Registry` (its laws are in `base`); `embedded` runs a server where none is given.
"""

from nereus_common.registry.base import Registry
from nereus_common.registry.open import open_registry
from nereus_common.registry.records import (
    CommittedPlan,
    Device,
    Grant,
    JobEvent,
    JobRecord,
    JobState,
    Lease,
    LeaseStatus,
    ServiceRecord,
    ServiceStatus,
    TransitionRecord,
    Versioned,
)

__all__ = [
    "CommittedPlan",
    "Device",
    "Grant",
    "JobEvent",
    "JobRecord",
    "JobState",
    "Lease",
    "LeaseStatus",
    "Registry",
    "ServiceRecord",
    "ServiceStatus",
    "TransitionRecord",
    "Versioned",
    "open_registry",
]
