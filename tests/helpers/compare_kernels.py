"""Compare the PTX of the kernels that two trees build.

`python tests/helpers/compare_kernels.py OLD [NEW]`: both are directories or git revisions; NEW is
this checkout by default. Each tree runs `python -m fa4_hd256 build` in a process of its own, which
needs no GPU. Names, line information and kernel symbols do not count. The exit status is 0 if all
kernels are equal, else 1.

Without options these are some 3,800 kernels of both architectures.  One takes 2 to 3 s of a core in
each tree: about half an hour of 16 cores, and 8 GB of disk.  What was compiled is kept in --cache,
so an interrupted run goes on where it ended, and the old tree is compiled once. Examples:

    python tests/helpers/compare_kernels.py 2b9ad0b3 . --jobs 16
    python tests/helpers/compare_kernels.py 2b9ad0b3 . --model gemma-1-7b --architecture sm_90a \\
        --use training --form dense --kernels "backward_*"
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

USES = ("decode", "prefill", "training")
FORMS = (
    "dense", "packed", "padded", "cache", "packed-cache", "paged", "packed-paged", "block-mask",
)  # fmt: skip
#: Rows of a page: fewer than a tile has, and as many.
PAGE_SIZES = ("16", "128")
ARCHITECTURES = ("sm_100a", "sm_90a")

#: Folders of a revision that a build reads.
PARTS = ("fa4_hd256", "schedulers", "softmax_emu", "sm100_sim")

#: The command `build` of a tree for kernels whose text matches the first argument.
CHOSEN = """
import fnmatch, sys
from fa4_hd256 import warm
from fa4_hd256.__main__ import main
pattern, build = sys.argv[1], warm.build
warm.build = lambda specs, *rest: build({
    target: [spec for spec in own if fnmatch.fnmatch(f"{spec.kind} {spec!r}", pattern)]
    for target, own in specs.items()
}, *rest)
sys.exit(main(sys.argv[2:]))
"""


# ---------------------------------------------------------------- PTX without names and lines

_DROPPED = re.compile(r"\.(loc|file)\b|\$L__(tmp|func_begin|func_end)\w*:")
_DECLARED = re.compile(
    r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)"
    r"|^(?:\.(?:visible|extern|weak|common)\s+)*\.(?:global|const|shared)\s[^=;]*?([\w$]+)\s*[\[=;]"
)
_TOKEN = re.compile(r"%?[A-Za-z_$][\w$]*")
_PARAMETER = re.compile(r"([\w$]+?)(_param_\d+)")


def normalised(ptx: str) -> list[str]:
    """Return the lines of PTX without comments and line information. Symbols and labels are
    numbered in the order in which they come up; registers keep their names."""
    lines = list(_code(ptx))
    symbols: dict[str, str] = {}
    for line in lines:
        for match in _DECLARED.finditer(line):
            name = match[1] or match[2]
            symbols.setdefault(name, f"symbol{len(symbols)}")
    labels: dict[str, str] = {}

    def renamed(match: re.Match) -> str:
        token = match[0]
        if token in symbols:
            return symbols[token]
        if token.startswith("$"):
            return labels.setdefault(token, f"$label{len(labels)}")
        parameter = _PARAMETER.fullmatch(token)
        if parameter and parameter[1] in symbols:
            return symbols[parameter[1]] + parameter[2]
        return token

    return [_TOKEN.sub(renamed, line) for line in lines]


def _code(ptx: str) -> Iterator[str]:
    """Lines with code, their blanks made alike."""
    in_debug = False
    for line in ptx.splitlines():
        line = " ".join(line.partition("//")[0].split())
        if line.startswith(".section") and ".debug" in line:
            in_debug = True
        if line and not in_debug and not _DROPPED.match(line):
            yield line
        if in_debug and line.startswith("}"):
            in_debug = False


def without_registers(lines: Iterable[str]) -> list[str]:
    """Number registers, too, in the order in which they come up."""
    names: dict[str, str] = {}

    def renamed(match: re.Match) -> str:
        kind = match[0].rstrip("0123456789")
        return names.setdefault(match[0], f"{kind}#{len(names)}")

    return [re.sub(r"%[a-z]+\d+\b", renamed, line) for line in lines if not line.startswith(".reg")]


def without_parameters(lines: Iterable[str]) -> list[str]:
    """Drop declarations of parameters, and number those that are read in the order in which they
    come up."""
    names: dict[str, str] = {}

    def renamed(match: re.Match) -> str:
        return names.setdefault(match[0], f"parameter{len(names)}")

    kept = (line for line in lines if not line.startswith(".param"))
    return [re.sub(r"symbol\d+_param_\d+", renamed, line) for line in kept]


# ---------------------------------------------------------------- kernels of a tree


@dataclass(frozen=True)
class Kernel:
    """A kernel that a tree built. target: what it is compiled for; kind: "forward", say; label:
    what it is specialised for, the same in every tree that has the same classes; path: of its
    entry."""

    target: str
    kind: str
    label: str
    path: Path

    def lines(self) -> list[str]:
        """Return its `normalised` PTX."""
        return normalised(ptx_of(self.path.read_bytes()))

    @cached_property
    def digest(self) -> bytes:
        """Digest of `lines`."""
        return hashlib.sha256("\n".join(self.lines()).encode()).digest()

    def __str__(self) -> str:
        return f"{self.target} {self.kind} {self.label}"


def ptx_of(entry: bytes) -> str:
    """Return the PTX in an entry: the text behind the host object and before the cubin. Raises
    ValueError for an entry without it."""
    begin = entry.rfind(b"\n.version ")
    end = entry.find(b"\x7fELF", begin)
    if begin < 0:
        raise ValueError("the entry of a kernel holds no PTX; accepted: what `build` writes")
    return entry[begin : end if end >= 0 else None].rstrip(b"\0").decode()


def label_of(name: str) -> str:
    """Return the text by which a manifest knows a kernel, without modules of classes."""

    def plain(value: object) -> str:
        if isinstance(value, dict):
            kind = str(value.get("class", "")).rpartition(":")[2]
            fields = (f"{k}={plain(v)}" for k, v in value.items() if k != "class")
            return f"{kind}({', '.join(fields)})" if len(value) > 1 else kind
        if isinstance(value, list):
            return f"[{', '.join(map(plain, value))}]"
        return json.dumps(value)

    read = json.loads(name)
    return f"{plain(read['problem'])} {plain(read['config'])}"


def kernels_in(directory: Path) -> list[Kernel]:
    """Return the kernels of a directory that `build` made."""
    content = (directory / "manifest").read_bytes()
    # A digest, the length of the header, the header: `native_cache`.
    (length,) = struct.unpack_from("<Q", content, 32)
    manifest = json.loads(content[40 : 40 + length])["header"]
    return [
        Kernel(k["target"], k["kind"], label_of(k["kernel"]), directory / f"{key}.kernel")
        for key, k in manifest["kernels"].items()
    ]


def tree_of(given: str, place: Path) -> Path:
    """Return the directory of a tree; a revision's files are put into `place`. Raises ValueError
    for what is neither a directory nor a revision of this repository."""
    if Path(given, "fa4_hd256").is_dir():
        return Path(given).resolve()
    command = ["git", "-C", str(ROOT), "archive", f"{given}^{{commit}}", *PARTS]
    packed = subprocess.run(command, capture_output=True)
    if packed.returncode:
        raise ValueError(
            f"{given!r} is no tree: {packed.stderr.decode().strip()}; accepted: a checkout's "
            "directory or a git revision"
        )
    place.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(place)], input=packed.stdout, check=True)
    return place


def packages_of(tree: Path) -> list[str]:
    """Return the folders of a tree that hold packages. The simulator's is the tree itself in
    revisions without `sm100_sim/src`."""
    return [str(tree), str(tree / "sm100_sim" / "src")]


def build(tree: Path, out: Path, cache: Path, pattern: str | None, options: Sequence[str]) -> None:
    """Run a tree's `build`. Raises RuntimeError where it fails."""
    # The command asks for the version of an installed package.
    installed = out.parent / "installed"
    metadata = installed / "fa4_hd256-0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: fa4-hd256\nVersion: 0\n")
    unset = ("FA4_HD256_", "FA_CLC", "CUTE_DSL_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unset)} | {
        "PYTHONPATH": os.pathsep.join([*packages_of(tree), str(installed)]),
        "FA4_HD256_CACHE_DIR": str(cache),
    }
    start = ["-m", "fa4_hd256"] if pattern is None else ["-c", CHOSEN, pattern]
    command = [sys.executable, *start, "build", *options, "--out", str(out)]
    done = subprocess.run(command, cwd=tree, env=environment)
    if done.returncode:
        raise RuntimeError(f"build failed in {tree}; its options: {' '.join(options)}")


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Pair:
    """Comparison of a kernel in two trees; None on the side that lacks it.

    verdict: "equal"; "parameters", the same code for another list of parameters; "registers", the
    same but for names of registers; "differs"; "only in old"; "only in new".
    """

    old: Kernel | None
    new: Kernel | None

    @cached_property
    def verdict(self) -> str:
        if self.old is None or self.new is None:
            return "only in new" if self.old is None else "only in old"
        if self.old.digest == self.new.digest:
            return "equal"
        both = [without_parameters(kernel.lines()) for kernel in (self.old, self.new)]
        if both[0] == both[1]:
            return "parameters"
        return "registers" if len(set(map(tuple, map(without_registers, both)))) == 1 else "differs"

    def explained(self) -> Iterator[str]:
        """The kernel in a line, then its first differing lines and what instructions it has more
        and less of."""
        yield f"{self.verdict:12}{self.new or self.old}"
        if self.old is None or self.new is None or self.verdict == "equal":
            return
        old, new = self.old.lines(), self.new.lines()
        yield f"    {len(old)} lines, now {len(new)}"
        # The number of registers says little.
        bodies = [[line for line in lines if not line.startswith(".reg")] for lines in (old, new)]
        at = next((i for i, (a, b) in enumerate(zip(*bodies)) if a != b), min(map(len, bodies)))
        for sign, body in zip("-+", bodies):
            yield from (f"    {sign} {line}" for line in body[at : at + 3])
        counts = [Counter(map(_opcode, lines)) for lines in (old, new)]
        changes = {
            name: counts[1][name] - counts[0][name] for name in counts[0].keys() | counts[1].keys()
        }
        most = sorted((k for k in changes if changes[k]), key=lambda k: (-abs(changes[k]), k))
        if most:
            yield "    " + ", ".join(f"{changes[name]:+} {name}" for name in most[:8])


def _opcode(line: str) -> str:
    words = [word for word in line.rstrip(";").split() if not word.startswith("@")]
    return words[0] if words else ""


def paired(old: Sequence[Kernel], new: Sequence[Kernel]) -> list[Pair]:
    """Pair kernels by what they are called; those whose names have changed by equal PTX."""
    left = list(old)
    found = []
    for same in (lambda one, other: str(one) == str(other), _are_equal):
        for kernel in [k for k in new if not any(k is pair.new for pair in found)]:
            match = next((k for k in left if same(k, kernel)), None)
            if match is not None:
                left.remove(match)
                found.append(Pair(match, kernel))
    found += [Pair(None, k) for k in new if not any(k is pair.new for pair in found)]
    found += [Pair(kernel, None) for kernel in left]
    return sorted(found, key=lambda pair: str(pair.new or pair.old))


def _are_equal(one: Kernel, other: Kernel) -> bool:
    return one.target == other.target and one.digest == other.digest


def compare(old: Path, new: Path, pattern: str | None = None) -> tuple[list[str], Counter[str]]:
    """Return (lines of the report, kernels by verdict) of two directories that `build` made."""
    lines, counts = [], Counter()
    for pair in paired(kernels_in(old), kernels_in(new)):
        lines += pair.explained()
        counts[pair.verdict] += 1
    return lines, counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="directory or git revision")
    parser.add_argument("new", nargs="?", default=str(ROOT), help="default: this checkout")
    for name in ("--model", "--architecture", "--use", "--form", "--page-size"):
        parser.add_argument(name, action="append", help="repeatable; default: all")
    parser.add_argument("--scheduler", choices=("static", "dynamic", "both"), default="both")
    parser.add_argument(
        "--option", action="append", default=[], metavar="WORD",
        help="any other word for `build`, as in --option=--kv-dtype --option=float8_e4m3fn; both "
        "trees must know it",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", metavar="PATTERN",
        help="of the kind and the description of a kernel, as in 'backward_d?*' or "
        "'*softcap=True*'; others are not compiled",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".cache" / "compare_kernels",
        help="directory of compiled kernels (default: %(default)s)",
    )  # fmt: skip
    return parser


def options_of(arguments: argparse.Namespace, tree: Path) -> list[str]:
    """Return the options of `build`."""
    forms = arguments.form or FORMS
    given = {
        "--model": arguments.model or models_of(tree),
        "--arch": arguments.architecture or ARCHITECTURES,
        "--use": arguments.use or USES,
        "--form": forms,
        "--page-size": arguments.page_size or (PAGE_SIZES if _has_pages(forms) else ()),
    }
    words = [word for name, values in given.items() for value in values for word in (name, value)]
    jobs = str(arguments.jobs)
    return [*words, "--scheduler", arguments.scheduler, "--jobs", jobs, *arguments.option]


def _has_pages(forms: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(form, "*paged") for form in forms)


def models_of(tree: Path) -> list[str]:
    """Return the names of a tree's table of models."""
    code = "from fa4_hd256.models import MODELS; print(*MODELS)"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(packages_of(tree))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree} has no table of models: {done.stderr.strip()}")
    return done.stdout.split()


def main(words: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status."""
    arguments = _parser().parse_args(words)
    cache = arguments.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="compare_", dir=cache))
    try:
        trees = [
            tree_of(given, scratch / side / "tree")
            for side, given in (("old", arguments.old), ("new", arguments.new))
        ]
        options = options_of(arguments, trees[1])
        outs = [scratch / side / "out" for side in ("old", "new")]
        for tree, out in zip(trees, outs):
            out.parent.mkdir(exist_ok=True)
            build(tree, out, cache / "compiled", arguments.kernels, options)
        lines, counts = compare(*outs)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(scratch)
    print("\n".join(lines))
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "none")
    return 0 if set(counts) == {"equal"} else 1


if __name__ == "__main__":
    sys.exit(main())
