"""Mentions of files, names and commands of the project, in pages, docstrings and comments, that do
not exist."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from checkout import ROOT

PACKAGES = ("fa4_hd256", "schedulers", "softmax_emu", "sm100_sim", "bench", "lab")
_ROOMS = (*PACKAGES, "tests", "examples", "docs")
#: Package -> its folder, where that is not of its name.
_FOLDERS = {"sm100_sim": "sm100_sim/src/sm100_sim"}

#: Pages about other projects' files and names, which they tell of by these names.
ABOUT_OTHERS = (
    "sm100_sim/docs/findings.md", "sm100_sim/docs/case_study_clc.md",
    "lab/published/flash_attention.py", "lab/published/nvidia.py",
)  # fmt: skip
#: Names that no code of ours has: of CUDA, SASS, CuTe DSL, CUTLASS, cuDNN, flash-attn-4,
#: SGLang, vLLM, FlashInfer; a kernel's by a number; a row of docs/silicon.md.
FOREIGN = frozenset((
    "__syncthreads", "cudaLaunchConfig_t", "cudaLaunchAttribute", "cudaLaunchAttributeID",
    "CUtensorMap", "IVALL", "FastDivmodDivisorV2", "read_clc_payload", "store_invalid_response",
    "get_Q_block_min_max", "golden_i", "fairness", "lpt_tile_coords", "lpt_l2_tile_coords",
    "L2_SIZE_MIB", "_SCHED_L2_BUDGET_BYTES", "_pack_gqa_wins", "d256_wide_decode_launch",
    "decode_d256_q_tile", "_SM107_WS_BUDGET_BYTES", "_sm107_chunks",
    "ensure_decode_fast_path_is_available", "QLEN_ONLY", "qq_bias", "custom_mask", "use_mem_pool",
))  # fmt: skip
#: Names that a reader replaces, and a user's file in a finding that is shown.
_PLACEHOLDERS = frozenset(("SCRIPT.py", "NAME.py", "epilogue.py"))

#: room/part/part, with or without an ending; not in an address or behind another path.
_PATH = re.compile(rf"(?<![\w/.$<~-])((?:{'|'.join(_ROOMS)})(?:/[\w*-]+)+(?:\.\w+)?)(?![\w*/])")
_FILE = re.compile(r"(?<![\w/.$<~*-])((?:\w+/)*\w+\.py)\b")
_DOTTED = re.compile(rf"(?<![\w/.@])((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")
_NAME = re.compile(r"`([A-Za-z_](?:[\w.]*\w)?)(?:\([^`]*\))?`")
_COMMAND = re.compile(
    rf"python -m ({'|'.join(PACKAGES)})\b(?!\.)(?: ([a-z][\w-]*)(?![\w./-]))?([^`#;|\n]*)"
)
_PROSE = re.compile(r'("""(?:.|\n)*?""")|#(?: |:)([^\n]*)')


def folder_of(package: str) -> str:
    """Return the folder of a package, below ROOT."""
    return _FOLDERS.get(package, package)


@functools.cache
def _files() -> frozenset[str]:
    """Files of the checkout: what git lists, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    return frozenset(name for name in listed if (ROOT / name).exists())


@functools.cache
def _folders() -> frozenset[str]:
    return frozenset(str(parent) for name in _files() for parent in Path(name).parents)


@functools.cache
def _words() -> frozenset[str]:
    """Words of the code, docstrings and comments left out, and of the names of files."""
    words = {word for name in _files() for word in re.findall(r"\w+", name)}
    for name in _files():
        if name.endswith((".py", ".toml", "Makefile")) and Path(name).name != Path(__file__).name:
            words.update(re.findall(r"\w+", _PROSE.sub("", (ROOT / name).read_text("utf-8"))))
    return frozenset(words)


def texts() -> Iterator[tuple[str, str]]:
    """Yield (file, prose): pages but for printed tables, and docstrings and comments of the
    code."""
    for name in sorted(_files()):
        if name.endswith(".md") and "docs/tables/" not in name:
            yield name, (ROOT / name).read_text("utf-8")
        elif name.endswith(".py"):
            found = _PROSE.findall((ROOT / name).read_text("utf-8"))
            yield name, "\n".join(docstring or comment for docstring, comment in found)


def named_at_the_top(text: str) -> str:
    """The text with the names of the libraries as their folders have them."""
    return re.sub(r"\bfa4_hd256([./](?:schedulers|softmax_emu)\b)", lambda m: m[1][1:], text)


def offences(place: str, text: str) -> list[str]:
    """Return what a text mentions that the checkout does not hold, one line each.

    place: the text's file below ROOT, whose folder relative paths begin at.
    """
    text = named_at_the_top(text)
    project = next((top for top in ("sm100_sim/", "lab/") if place.startswith(top)), "")
    found = [
        f"path {path}"
        for path in _PATH.findall(text)
        if not _is_there(path) and not _is_there(f"{project}{path}")
    ]
    found += [f"name {name}" for name in _DOTTED.findall(text) if not _resolves(name)]
    found += [
        f"command python -m {package} {command}".rstrip()
        for package, command, _ in _COMMAND.findall(text)
        if not _runs(package, command)
    ]
    found += [
        f"option {option} of python -m {package}"
        for package, _, rest in _COMMAND.findall(text)
        for option in re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", rest.split(".py")[0])
        if option not in _options(package)
    ]
    if place not in ABOUT_OTHERS:
        found += [f"file {name}" for name in _FILE.findall(text) if not _is_file(name)]
        found += [f"name {name}" for name in _NAME.findall(text) if not _is_known(name)]
    return [f"{place}: {offence}" for offence in sorted(set(found))]


def _is_there(path: str) -> bool:
    """A file, a folder, a module without its ending, or a pattern that matches one of them."""
    if Path(path).name in _PLACEHOLDERS:
        return True
    if "*" in path:
        return any(True for _ in ROOT.glob(path))
    return path in _files() or path in _folders() or f"{path}.py" in _files()


def _is_file(name: str) -> bool:
    """The end of some file's path."""
    known = (f"/{file}".endswith(f"/{name}") for file in _files())
    return Path(name).name in _PLACEHOLDERS or any(known)


def _is_known(name: str) -> bool:
    """Every part of it is a word of the code."""
    return all(part in _words() or part in FOREIGN for part in name.split("."))


def _resolves(name: str) -> bool:
    """The longest module of a dotted name exists, and its text has the next part."""
    parts = name.split(".")
    if parts[-1] in ("py", "md", "json", "svg") or parts[1].startswith("__"):
        return True
    for length in range(len(parts), 0, -1):
        path = "/".join((folder_of(parts[0]), *parts[1:length]))
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in _files():
                text = (ROOT / file).read_text("utf-8")
                return length == len(parts) or re.search(rf"\b{parts[length]}\b", text) is not None
        if path in _folders():
            return length == len(parts)
    return False


@functools.cache
def commands() -> dict[str, frozenset[str]]:
    """Package -> what may stand behind `python -m package`, read from its __main__."""
    found = {}
    for package in PACKAGES:
        main = ROOT / folder_of(package) / "__main__.py"
        if not main.exists():
            continue
        words = set()
        for node in ast.walk(ast.parse(main.read_text("utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS":
                words.update(ast.literal_eval(key) for key in node.value.keys)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_parser"):
                words.update(arg.value for arg in node.args if isinstance(arg, ast.Constant))
        found[package] = frozenset(words)
    return found


@functools.cache
def _options(package: str) -> frozenset[str]:
    """Options that some parser of the package takes, and those of every one."""
    texts = [
        (ROOT / name).read_text("utf-8")
        for name in _files()
        if name.startswith(f"{package}/") and name.endswith(".py")
    ]
    return frozenset(("--help", *re.findall(r'"(--[a-z][\w-]*)"', "\n".join(texts))))


def _runs(package: str, command: str) -> bool:
    return package in commands() and (not command or command in commands()[package])
