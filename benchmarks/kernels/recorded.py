"""Times of tuning runs as they are kept for tests, and the table that ships, which is fitted from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specla.benchmarks.kernels.candidates import candidates
from specla.benchmarks.kernels.cases import Place, tuning_plan
from specla.benchmarks.kernels.launch import name_of
from specla.benchmarks.kernels.tune import Times, fitted
from specla.kernels.gpu.selector import Selector, alike

Record = dict[str, Any]
"""{what, device, date, versions, command, older, times}; times are microseconds by case ("place, tree") and kernel, and
`older` has the commit of each case that the last run has not timed."""


def recorded(runs: Sequence[Mapping[str, Any]], former: Mapping[str, Any] | None = None) -> Record:
    """What `specla bench kernels --tune FILE --json RUN` wrote, as one record.

    Args:
        runs: reports, earlier ones first: what a later one has timed replaces what stands there.
        former: a record; its cases stay where no run has timed them, if it is of the same device.

    Raises:
        ValueError: no runs, or runs on different devices.
    """
    devices = {run["device"] for run in runs}
    if len(devices) != 1:
        raise ValueError(f"runs on {len(devices)} devices ({sorted(devices)}): give those of one")
    (device,) = devices
    kept = former if former and former["device"] == device else None
    times: dict[str, dict[str, float]] = dict(kept["times"]) if kept else {}
    commits: dict[str, str] = dict.fromkeys(times, _commit(kept)) | kept["older"] if kept else {}
    for run in runs:
        found: dict[str, dict[str, float]] = {}
        for row in run["rows"]:
            if row["unit"] == "us":
                found.setdefault(row["case"], {})[row["name"]] = round(row["median"], 3)
        times |= found
        commits |= dict.fromkeys(found, _commit(run))
    wanted = [f"{place.name}, {tree}" for place in tuning_plan().places for tree in place.trees]
    last = _commit(runs[-1])
    return {
        "what": "microseconds of a layer by case and kernel, from the runs that the shipped table was fitted from",
        "device": device,
        **{key: runs[-1][key] for key in ("date", "versions", "command")},
        "older": {case: commits[case] for case in wanted if commits.get(case, last) != last},
        "times": {case: times[case] for case in wanted if case in times},
    }


def _commit(run: Mapping[str, Any]) -> str:
    commit: str = run["versions"].get("commit", "unknown")
    return commit


def timed_places(record: Mapping[str, Any]) -> list[tuple[Place, Times]]:
    """The places of the tuning plan that a record has times of, with those of every tree and candidate."""
    found = []
    for place in tuning_plan().places:
        topologies = list(place.topologies.values())
        choices = {name_of(c): c for c in candidates(place.shape, place.sessions, topologies, place.rows)}
        times = {
            tree: {choices[n]: us for n, us in record["times"][f"{place.name}, {tree}"].items() if n in choices}
            for tree in place.trees
            if f"{place.name}, {tree}" in record["times"]
        }
        if times:
            found.append((place, times))
    return found


def table_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The selector's table of a record's places."""
    device = record["device"].split(",")[0]
    return Selector(device, [fitted(place, times) for place, times in timed_places(record)]).to_table(alike(device))
