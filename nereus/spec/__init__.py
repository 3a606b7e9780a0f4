"""What a job is to do: `JobSpec` and its sections."""

from nereus.spec.job import JobSpec, ModelSpec
from nereus.spec.section import Section

__all__ = ["JobSpec", "ModelSpec", "Section"]
