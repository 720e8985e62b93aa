"""Writes measured figures as a machine of the timing model: `--machine FILE` of bench and
sm100_sim.timing takes a report that has it."""

from __future__ import annotations

from typing import Any

from bench.bringup.outcome import Target
from fa4_hd256.gpus.gpu import FAMILY

#: Constants that a step of the stage `machine` tells: name -> (field, factor, unit).
_OF_THE_DEVICE = {"sms": ("SMs", 1.0, "SMs"), "l2_megabytes": ("L2, bytes", 1e-6, "MB")}


def machine(target: Target, results: dict, date: str) -> dict[str, Any] | None:
    """A machine file's content; None where nothing was measured on a GPU.

    Each constant has value, quartiles as its range, unit and where it was measured. Constants that
    no figure sets are those of the machine it is like: an H200's for compute capability 9.0, a
    B300's for 10.3, else a B200's. A difference of clocks that came out below 0 sets none.
    """
    measured = {
        outcome["values"]["constant"]: (name, outcome["values"])
        for name, outcome in results.get("micro", {}).items()
        if outcome["state"] == "measured"
        and outcome["values"]["constant"]
        and outcome["values"]["value"] >= 0
    }
    if not target.is_gpu or not measured:
        return None
    where = f"measured on {target.name}, {date}: bringup"
    constants = {
        constant: {
            "value": values["value"],
            "range": [max(values["low"], 0.0), values["high"]],
            "unit": values["unit"],
            "source": f"{where}, {name}: {values['what']}",
        }
        for constant, (name, values) in measured.items()
    }
    device = results.get("machine", {}).get("device", {}).get("values", {})
    for constant, (field, factor, unit) in _OF_THE_DEVICE.items():
        if field in device:
            constants[constant] = {
                "value": round(device[field] * factor, 3),
                "unit": unit,
                "source": f"{where}, the driver's answer",
            }
    _add_reuse(constants, results["micro"], where)
    other = like(target)
    basis = f"{len(constants)} constants {where}; the others as {other.upper()}"
    return {"name": target.name, "basis": basis, "like": other, "constants": constants}


def like(target: Target) -> str:
    """The machine file whose constants stand in for what is not measured."""
    return FAMILY.get(target.capability, ("B200",))[0].lower()


def _add_reuse(constants: dict[str, Any], micro: dict[str, Any], where: str) -> None:
    """`cta_reuse` is in clocks; its step measures time, and another one the clock."""
    measured = micro.get("CTA reuse", {}).get("values")
    if measured is None or "clock_ghz" not in constants:
        return
    value, low, high = (
        round(1e3 * constants["clock_ghz"]["value"] * measured[key], 1)
        for key in ("value", "low", "high")
    )
    constants["cta_reuse"] = {
        "value": value,
        "range": [low, high],
        "unit": "clocks",
        "source": f"{where}, CTA reuse: {measured['what']}",
    }
