"""The end of a run, in words: launches, findings, what was looked for and on which GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sm100_sim import devices
from sm100_sim.causes import causes_of, listed
from sm100_sim.report import Report
from sm100_sim.settings import read_settings
from sm100_sim.terminal import painted, short_name

#: What a reading of the sanitizer looks for.
_READINGS = {
    True: "races, operations in flight, missing fences, reads of what nobody wrote",
    "wait-ld": "tcgen05.ld without tcgen05.wait::ld alone; --sanitize looks for the rest",
    "strict": "the same as --sanitize, by the letter of the PTX ISA",
    "strict-order": "the same as --sanitize, by the letter, with listed pairs of tcgen05 in order",
}


def summary(
    reports: Iterable[Report], failures: Sequence[BaseException] = (), colour: bool = False
) -> str:
    """Return one line for each kernel (launches, grid, seconds, warp instructions), then findings
    and notes, then what was looked for.

    failures: errors that ended launches; what was found before them counts.
    """
    kernels: dict[str, list[Report]] = {}
    for report in reports:
        kernels.setdefault(report.kernel, []).append(report)
    if not kernels and not failures:
        return "sm100_sim: no kernel was launched"
    lines = [
        f"sm100_sim: {sum(map(len, kernels.values()))} launches of {len(kernels)} kernels"
        f"{f', {len(failures)} more failed' if failures else ''}",
        f"{'launches':>8} {'translate s':>11} {'run s':>8} {'warp instr.':>12}  kernel",
    ]
    for name, launches in kernels.items():
        count = sum(part["warps"] for r in launches for part in r.instructions.values())
        last = launches[-1]
        shape = f"grid {last.grid}, cluster {last.cluster}, block {last.block}"
        lines.append(
            f"{len(launches):8} {sum(r.translate_seconds for r in launches):11.2f} "
            f"{sum(r.wall_seconds for r in launches):8.2f} {count:12}  {short_name(name)} ({shape})"
        )
    seeds = [report.seed for some in kernels.values() for report in some]
    noted = {
        f"sm100_sim: note on {short_name(name)}: {note}": None
        for name, launches in kernels.items()
        for report in launches
        for note in report.notes
    }
    return "\n".join([*lines, *_found(kernels, failures, colour), *noted, looked_for(seeds)])


def found_text(reports: Iterable[Report]) -> str:
    """The findings of launches by kernel and cause, "" if there are none."""
    kernels: dict[str, list[Report]] = {}
    for report in reports:
        kernels.setdefault(report.kernel, []).append(report)
    return "\n".join(_found(kernels, (), False))


def found_by_kernel(
    kernels: dict[str, list[Report]], failures: Sequence[BaseException]
) -> dict[str, list[str]]:
    """The findings of each kernel, those of failed launches included."""
    found = {
        name: [f for report in some for f in report.findings] for name, some in kernels.items()
    }
    for failure in failures:
        name = getattr(failure, "kernel", None) or "a launch that failed"
        found.setdefault(name, []).extend(getattr(failure, "findings", ()))
    return found


def _found(
    kernels: dict[str, list[Report]], failures: Sequence[BaseException], colour: bool
) -> Iterator[str]:
    for name, findings in found_by_kernel(kernels, failures).items():
        causes = causes_of(findings)
        if causes:
            count = sum(len(cause.findings) for cause in causes)
            head = (
                f"{count} finding{'s' * (count > 1)} of {len(causes)} "
                f"cause{'s' * (len(causes) > 1)} in {short_name(name)}"
            )
            yield f"sm100_sim: {painted(head, 'bold', colour)}"
            yield listed(causes, colour)


def looked_for(seeds: Sequence[int | None] = ()) -> str:
    """Return one line: the GPU that was simulated, the schedules, and what the run looked for.

    seeds: of the launches, None for the plain schedule.
    """
    settings, device = read_settings(), devices.current()
    kinds = dict.fromkeys(seeds or [settings.seed])
    schedule = ", ".join("plain" if seed is None else f"seed {seed}" for seed in kinds)
    what = (
        f"looked for {_READINGS[settings.sanitize]}" if settings.sanitize
        else "looked for errors and hangs alone; --sanitize looks for races, too"
    )  # fmt: skip
    return (
        f"sm100_sim: ran as {device.name.upper()} ({device.sms} SMs, {device.target}), schedule "
        f"{schedule}; {what}"
    )
