"""Records as text. Plain JSON: what is stored can be read with any Redis client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from nereus_common.core.emu import Phase, Unit
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, JobId, ModelStage, UnitId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import plan_from_dict, plan_to_dict
from nereus_common.registry.records import JobRecord, JobState, ServiceRecord, TransitionRecord
from nereus_common.transitions.lifecycle import NodeState, TransitionState


def unit_to_json(unit: Unit) -> str:
    return _dump(
        {
            "id": unit.id,
            "job": unit.job,
            "model_stage": str(unit.model_stage),
            "replica": unit.replica,
            "layout": str(unit.layout),
            "devices": [str(device) for device in unit.devices],
            "epoch": unit.epoch,
            "phase": str(unit.phase),
            "version": unit.version,
        }
    )


def unit_from_json(text: str) -> Unit:
    data = json.loads(text)
    return Unit(
        id=UnitId(data["id"]),
        job=JobId(data["job"]),
        model_stage=ModelStage.parse(data["model_stage"]),
        replica=data["replica"],
        layout=Layout.parse(data["layout"]),
        devices=tuple(DeviceId.parse(device) for device in data["devices"]),
        epoch=data["epoch"],
        phase=Phase(data["phase"]),
        version=data["version"],
    )


def job_to_json(job: JobRecord) -> str:
    return _dump(dataclasses.asdict(job))


def job_from_json(text: str) -> JobRecord:
    data = json.loads(text)
    data["state"] = JobState(data["state"])
    data["error_log"] = tuple(data["error_log"])
    return JobRecord(**data)


def transition_to_json(record: TransitionRecord) -> str:
    plans = {"plan": plan_to_dict(record.plan), "target": plan_to_dict(record.target)}
    plain = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return _dump({**plain, **plans})


def transition_from_json(text: str) -> TransitionRecord:
    data = json.loads(text)
    data |= {name: plan_from_dict(data[name]) for name in ("plan", "target")}
    data |= {name: tuple(data[name]) for name in ("units", "kept")}
    data["state"] = TransitionState(data["state"])
    data["nodes"] = tuple(NodeState(node) for node in data["nodes"])
    data |= {name: {int(node): value for node, value in data[name].items()} for name in ("rounds", "digests")}
    return TransitionRecord(**data)


def service_to_json(service: ServiceRecord) -> str:
    return _dump(dataclasses.asdict(service) | {"devices": [str(device) for device in service.devices]})


def service_from_json(text: str) -> ServiceRecord:
    data = json.loads(text)
    data["devices"] = tuple(DeviceId.parse(device) for device in data["devices"])
    return ServiceRecord(**data)


def payload_to_json(payload: Mapping[str, object], kind: str) -> str:
    """Strict JSON, or InvalidInput naming the event: NaN is not JSON, and no reader has to cope with it."""
    try:
        return _dump(payload)
    except (TypeError, ValueError) as wrong:
        raise InvalidInput(
            f"the payload of event {kind!r} is not JSON: {wrong}",
            remedy="send plain numbers, strings, lists and objects; write a number that is not finite as null",
            field="payload",
        ) from wrong


def _dump(data: Mapping[str, object]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
