"""Files that a run leaves: PTX, findings for code scanning and for CI, a page for people."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sm100_sim.causes import shortened
from sm100_sim.terminal import short_name

from .outcome import Outcome
from .page import page


def write_files(choice: argparse.Namespace, outcome: Outcome) -> None:
    """Write the files that the flags name, and say where each is."""
    if choice.keep_ptx:
        for name, path in keep_ptx(Path(choice.keep_ptx), outcome):
            print(f"sm100_sim: PTX of {short_name(name)} is in {path}", file=sys.stderr)
    for what, path, made in (
        ("SARIF", choice.sarif, lambda: json.dumps(sarif(outcome), indent=1)),
        ("JUnit", choice.junit, lambda: junit(outcome)),
        ("page", choice.html, lambda: page(outcome)),
    ):
        if path:
            Path(path).write_text(made(), encoding="utf-8")
            print(f"sm100_sim: {what} is in {path}", file=sys.stderr)


def keep_ptx(directory: Path, outcome: Outcome) -> Iterator[tuple[str, Path]]:
    """Write the PTX of each kernel's module; yield the kernels and the files."""
    directory.mkdir(parents=True, exist_ok=True)
    known: dict[str, Path] = {}
    for name, text in outcome.modules.items():
        if text not in known:
            plain = re.sub(r"\W+", "_", short_name(name))
            path = directory / f"{plain}.ptx"
            number = 2
            while path in known.values():
                path, number = directory / f"{plain}-{number}.ptx", number + 1
            path.write_text(text, encoding="utf-8")
            known[text] = path
        yield name, known[text]


def sarif(outcome: Outcome) -> dict[str, Any]:
    """The findings and errors as SARIF 2.1.0, a result for each cause."""
    results = []
    for name, causes in outcome.causes().items():
        for cause in causes:
            parties = getattr(cause.findings[0], "parties", ())
            places = [_location(party.source) for party in parties if party.source]
            results.append(_result(cause.kinds[0], f"{short_name(name)}: {cause}", places))
    for failure in outcome.failures:
        source = getattr(getattr(failure, "instruction", None), "source", None)
        kind = type(failure).__name__
        results.append(_result(kind, str(failure), [_location(source)] if source else []))
    rules = [{"id": rule} for rule in sorted({result["ruleId"] for result in results})]
    driver = {"name": "sm100_sim", "version": sys.modules["sm100_sim"].__version__, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(rule: str, text: str, places: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = {"ruleId": rule, "level": "error", "message": {"text": text}, "locations": places[:1]}
    if places[1:]:
        found["relatedLocations"] = places[1:]
    return found


def _location(source: tuple[str, int]) -> dict[str, Any]:
    file, line = source
    below = os.path.relpath(file)
    uri = Path(file).as_posix() if below.startswith("..") else Path(below).as_posix()
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}}


def junit(outcome: Outcome) -> str:
    """A test case for each kernel: failed if anything was found, an error if a launch ended in
    one."""
    suite = ElementTree.Element("testsuite", name="sm100_sim")
    counts = {"failures": 0, "errors": 0, "tests": 0}
    causes, errors = outcome.causes(), {getattr(f, "kernel", None): f for f in outcome.failures}
    for name in dict.fromkeys([*outcome.kernels(), *causes]):
        seconds = sum(report.wall_seconds for report in outcome.kernels().get(name, ()))
        case = ElementTree.SubElement(
            suite, "testcase", name=short_name(name), classname="sm100_sim", time=f"{seconds:.3f}"
        )
        counts["tests"] += 1
        for cause in causes.get(name, ()):
            text = shortened(str(cause))
            said = ElementTree.SubElement(case, "failure", message=text.splitlines()[0])
            said.text = text
        error = errors.get(name)
        if error is not None:
            said = ElementTree.SubElement(case, "error", message=str(error).splitlines()[0])
            said.text = str(error)
        counts["failures"] += bool(causes.get(name))
        counts["errors"] += error is not None
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
