"""The limits that this project sets itself, as functions from a checkout to a list of offences.

Each returns one line an offence, so that one test names all of them at once.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import import_graph as graphs

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
# A warp role is one loop of waits, work and signals that reads worse in pieces.
MAX_ROLE_LINES = 150
MAX_PARAMETERS = 8

# Limits raised on purpose, each with its reason: (file, function) -> parameters.
MORE_PARAMETERS = {
    # The signature of the field's libraries, which users call by these names.
    ("fa4_hd256/interface.py", "flash_attn_func"): 26,
    ("fa4_hd256/interface.py", "flash_attn_varlen_func"): 35,
    ("fa4_hd256/kv_cache.py", "flash_attn_with_kvcache"): 38,
    ("fa4_hd256/metadata.py", "get_scheduler_metadata"): 9,
    # The fields of a record, by name.
    ("fa4_hd256/plans.py", "call_fields"): 14,
    ("fa4_hd256/integrations/context_parallel/attention.py", "ring_attention"): 19,
    ("fa4_hd256/integrations/flex_attention.py", "flex_attention"): 11,
    ("fa4_hd256/integrations/hub/functions.py", "flash_attn_func"): 10,
    ("fa4_hd256/integrations/hub/functions.py", "flash_attn_varlen_func"): 15,
    # vLLM passes these by position.
    ("fa4_hd256/integrations/vllm/backend.py", "__init__"): 11,
    ("fa4_hd256/integrations/vllm/backend.py", "forward"): 9,
}

# Signatures of flash-attention's libraries: any number of parameters, and as many lines more.
COMPATIBLE = ("fa4_hd256/compat/flash_attn_2.py", "fa4_hd256/compat/flash_attn_3.py",
              "fa4_hd256/compat/flash_attn_4.py")  # fmt: skip

# (file, function) -> lines.
MORE_LINES = {
    # Signatures of the field: one line per parameter, and its meaning.
    ("fa4_hd256/kv_cache.py", "flash_attn_with_kvcache"): 143,
    ("fa4_hd256/interface.py", "flash_attn_func"): 121,
    ("fa4_hd256/interface.py", "flash_attn_varlen_func"): 130,
    ("fa4_hd256/integrations/flex_attention.py", "flex_attention"): 68,
}

_LIBRARIES = ("schedulers", "softmax_emu")
_SETTINGS = ("fa4_hd256/architectures", "fa4_hd256/environment", "fa4_hd256/package_name")
_KERNELS = ("fa4_hd256/words", *_SETTINGS, *_LIBRARIES)
_SHARED = ("fa4_hd256/kernels", *_KERNELS)
_CALL = ("fa4_hd256/gpus", "fa4_hd256/private_torch", *_SHARED)
_RUN = (
    "fa4_hd256/call", "fa4_hd256/interrupt", "fa4_hd256/models", "fa4_hd256/progress",
    "fa4_hd256/waiting", *_CALL,
)  # fmt: skip
_SIMULATED = "fa4_hd256/gpus/simulated"
#: That plans work: imported by what compiles kernels and by no kernel.
_PROOF = "fa4_hd256/kernels/proof"
_OPERATOR = (_PROOF, "fa4_hd256/run", _SIMULATED, *_RUN)
_FOLDERS = ("blackwell", "hopper")
_LOWER = ("", "/forward", "/backward")
_OWN = tuple(
    f"fa4_hd256/kernels/{folder}{package}"
    for folder in _FOLDERS
    for package in ("", "/architecture", "/forward", "/backward")
)
_CHECK = (*_OWN, "fa4_hd256", "fa4_hd256/compat", "fa4_hd256/integrations", "sm100_sim", *_OPERATOR)

_KNOWN = ("fa4_hd256/check", *_CHECK)
#: Packages of bench and of the lab, from the lowest.
_BENCH = ("bench/suite", "bench/processes", "bench/peers", "bench/tables", "bench/measure",
          "bench/serving", "bench/bringup", "bench/options", "bench/modelled")  # fmt: skip
_LAB = ("lab/paths", "lab/published", "lab/measure", "lab/whole", "lab/model", "lab/tables",
        "lab/validation")  # fmt: skip

#: Packages -> other packages that each may import (docs/architecture.md): those below it. A module
#: is in the package of the longest name that its path begins with; a single file has its own name.
PACKAGES = {
    "schedulers": (),
    "softmax_emu": (),
    "sm100_sim": (),
    "fa4_hd256/architectures": (),
    "fa4_hd256/environment": ("fa4_hd256/architectures",),
    "fa4_hd256/interrupt": (),
    "fa4_hd256/package_name": (),
    "fa4_hd256/private_torch": (),
    "fa4_hd256/progress": ("fa4_hd256/environment", "fa4_hd256/waiting"),
    "fa4_hd256/waiting": (),
    "fa4_hd256/models": ("fa4_hd256/words",),
    "fa4_hd256/words": (),
    "fa4_hd256/gpus": (_SIMULATED, *_SETTINGS),
    # Calls on CPU tensors go there: the one package beside check that knows the simulator.
    _SIMULATED: ("sm100_sim", "fa4_hd256/gpus", *_SETTINGS),
    # Modules shared by all architectures know none of them, and the forward not the backward.
    "fa4_hd256/kernels": _KERNELS,
    _PROOF: _SHARED,
    # No architecture knows another; what calls kernels finds them by `kernel_set`.
    **{
        f"fa4_hd256/kernels/{folder}{package}": (*own, *_SHARED)
        for folder in _FOLDERS
        for package, own in (
            ("", ()),
            ("/forward", (f"fa4_hd256/kernels/{folder}",)),
            ("/backward", (f"fa4_hd256/kernels/{folder}",)),
            ("/architecture", [f"fa4_hd256/kernels/{folder}{lower}" for lower in _LOWER]),
            ("/proof", [_PROOF, *(f"fa4_hd256/kernels/{folder}{lower}" for lower in _LOWER)]),
        )
    },
    "fa4_hd256/call": _CALL,
    "fa4_hd256/run": (_PROOF, _SIMULATED, *_RUN),
    # The top also names what users import of an architecture.
    "fa4_hd256": (*_OWN, *_OPERATOR),
    # flash-attention's functions, on ours.
    "fa4_hd256/compat": ("fa4_hd256", *_OPERATOR),
    "fa4_hd256/integrations": ("fa4_hd256/compat", "fa4_hd256", *_OPERATOR),
    "fa4_hd256/check": _CHECK,
    # The commands: above all packages, and imported by none.
    "fa4_hd256/__main__": ("fa4_hd256/check", *_CHECK),
    # Modules of commands are imported when these are called.
    "bench/__main__": ("bench/command_line", "fa4_hd256", *_OPERATOR),
    "bench/command_line": ("bench/modelled", "bench/tables", "fa4_hd256", *_OPERATOR),
    "bench/options": (*_BENCH, *_KNOWN),
    "bench/suite": _CHECK,
    "bench/processes": _CHECK,
    "bench/peers": ("bench/suite", *_CHECK),
    "bench/tables": (*_BENCH[:3], *_KNOWN),
    "bench/measure": (*_BENCH[:4], *_KNOWN),
    "bench/serving": (*_BENCH[:5], *_KNOWN),
    "bench/bringup": (*_BENCH[:5], *_KNOWN),
    "bench/modelled": (),
    "bench/commands": (*_BENCH, *_KNOWN),
    "bench": (*_BENCH, "bench/commands", *_KNOWN),
    "lab/__main__": ("bench/command_line", "fa4_hd256", *_OPERATOR),
    "lab/paths": (*_BENCH, *_KNOWN),
    "lab/published": ("lab/paths", *_BENCH, *_KNOWN),
    "lab/measure": ("lab/paths", *_BENCH, *_KNOWN),
    "lab/whole": _KNOWN,
    "lab/model": (*_BENCH, *_LAB[:4], *_KNOWN),
    "lab/tables": ("bench/__main__", *_BENCH, *_KNOWN),
    "lab/validation": (*_BENCH, *_LAB[:5], *_KNOWN),
    "lab/modelled": ("bench/commands", *_BENCH, *_LAB, *_KNOWN),
    "lab/pictures": ("bench/__main__", "lab/__main__", *_BENCH, *_LAB, *_KNOWN),
    "lab/options": (*_BENCH, *_LAB, *_KNOWN),
    "lab/commands": (*_BENCH, *_LAB, "lab/options", "lab/pictures", *_KNOWN),
    # Imported by nothing but the lab.
    "lab": (
        *_BENCH,
        *_LAB,
        "bench",
        "bench/command_line",
        "bench/commands",
        "lab/commands",
        "lab/options",
        "lab/pictures",
        *_KNOWN,
    ),
}
#: Openings that neither are a verb nor name a thing: question words, bare references, conjunctions.
_FRAGMENT = re.compile(
    r"""[(`\[]?(
        (of|what|which|whether|as|those|that|none|how|where|why|who|whom|whose|by|its|theirs?|it
        |they|these|and|so|but|also|not|nor|likewise|else|otherwise|such)\b
        | this(?=[:,.]|\ (is|was|has)\b)
        | the\ (same|others?|ones?|like|rest)\b
    )""",
    re.IGNORECASE | re.VERBOSE,
)
#: A docstring that only refers to another one.
_REFERENCE = re.compile(r"(see|as|like|likewise as) `?[\w.]+`?\.?", re.IGNORECASE)
#: Private words -> the field's word, and how often the private one may still stand in the sources,
#: tests of this table aside. Only ever lower it.
GLOSSARY = {
    "anew": ("again, or recomputed", 3),
    "by turns": ("interleaved", 0),
    "take turns": ("are interleaved", 0),
    "mended": ("fixed", 0),
    "for good": ("sustained", 8),
    "the begin": ("the start", 0),
    "drafted tokens": ("tree mask", 0),
    "functions? of scores": ("score_mod", 0),
    "functions? of masks?": ("mask_mod", 0),
    "parts of (?:the )?keys": ("KV splits", 0),
    "lists? of parts": ("scheduler metadata", 0),
    "divided keys": ("KV splits", 0),
    "row[ _]places?": ("row addresses", 3),
    "portions?": ("chunks", 0),
    "asked for": ("requested", 0),
}
#: Packages of the operator.
OPERATOR = ("fa4_hd256", *_LIBRARIES)
#: Annotations that say too little, or switch the formatter off -> a better one, how many may be
#: left in the operator, and how many elsewhere. Only ever lower these.
ANNOTATIONS = {
    r"(?:: |-> )tuple\b(?![\[(])": ("tuple[...], or a NamedTuple", 0, 70),
    r"\bcontext: Any\b": ("the context's class", 0, 0),
    r"# fmt: skip": ("as ruff formats it", 55, 1230),
}
#: Folders of architectures: counterparts of two have one name (docs/architecture.md).
COUNTERPARTS = ("fa4_hd256/kernels/blackwell/", "fa4_hd256/kernels/hopper/")
_CHECKERS = ("tests/helpers/style.py", "tests/test_style_checks.py")
TOPS = tuple(sorted({package.split("/")[0] for package in PACKAGES}))

TEXT = ("", ".cfg", ".html", ".json", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml")


def sources(root: Path) -> list[str]:
    """Python files of the checkout, relative to `root`, sorted; not those of environments, caches
    and builds inside it."""
    found = []
    for top in (*TOPS, "examples", "tests"):
        for folder, inside, files in os.walk(root / top):
            inside[:] = [name for name in inside if name != "build" and not name.startswith(".")]
            found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def known_as(source: str) -> str:
    """Return the path by which packages and imports know a file: the simulator's are in folders of
    its project."""
    return source.removeprefix("sm100_sim/src/").replace("sm100_sim/tests/", "tests/")


def _functions(source: str, tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yield (function, whether it is a warp role) of a file.

    Roles are the methods that a kernel's dispatch names: `self.role(context)`.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [argument.arg for argument in node.args.args]
            yield node, source.startswith("fa4_hd256/kernels/") and names == ["self", "context"]


def sizes(root: Path) -> list[str]:
    """Files, functions and parameter lists over their limits."""
    found = []
    for source in sources(root):
        text = (root / source).read_text()
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            found.append(f"{source} has {lines} lines, at most {MAX_FILE_LINES}")
        for function, is_role in _functions(source, ast.parse(text, source)):
            where = f"{source}:{function.lineno}: {function.name}"
            length = function.end_lineno - function.lineno + 1
            limit = MAX_ROLE_LINES if is_role else MAX_FUNCTION_LINES
            limit = MORE_LINES.get((source, function.name), limit)
            parameters = function.args
            count = len(parameters.posonlyargs + parameters.args + parameters.kwonlyargs)
            if source in COMPATIBLE:
                limit += count
            if length > limit:
                found.append(f"{where} has {length} lines, at most {limit}")
            count -= bool(parameters.args) and parameters.args[0].arg in ("self", "cls")
            most = MORE_PARAMETERS.get((source, function.name), MAX_PARAMETERS)
            if count > most and source not in COMPATIBLE:
                found.append(f"{where} has {count} parameters, at most {most}")
    return found


def import_graph(root: Path) -> dict[str, set[str]]:
    """Modules of the packages -> modules of these that they import, as paths without .py."""
    paths = {known_as(source): root / source for source in sources(root)}
    files = {name: path for name, path in paths.items() if name.split("/")[0] in TOPS}
    return graphs.import_graph(files, at_the_top)


def at_the_top(path: str) -> str:
    """The path of a module in the checkout, where the package's name for a library is a link."""
    package, _, rest = path.partition("/")
    return rest if package == "fa4_hd256" and rest.split("/")[0] in _LIBRARIES else path


def _absolute_names(path: Path) -> list[str]:
    """Return the modules that a file imports by their full names."""
    found = []
    for node in graphs.import_statements(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif not node.level:
            found.append(node.module or "")
    return found


def bare_imports(root: Path) -> list[str]:
    """Imports of a library by a name that a user's own package may have (CONTRIBUTING.md)."""
    return [
        f"{source} imports {name}; write fa4_hd256.{name}"
        for source in sources(root)
        for name in _absolute_names(root / source)
        if name.split(".")[0] in _LIBRARIES
    ]


def absolute_imports(root: Path) -> list[str]:
    """Imports of the package by its name in the package: it is also loaded under other names."""
    return [
        f"{source} imports {name}; write a relative import"
        for source in sources(root)
        if source.split("/")[0] in ("fa4_hd256", *_LIBRARIES)
        for name in _absolute_names(root / source)
        if name.split(".")[0] == "fa4_hd256"
    ]


#: Modules beside packages' `__init__` from which users import: `__all__` is what they publish.
#: Elsewhere a leading underscore says what is a module's own.
PUBLISHED = ("fa4_hd256/masks.py", "fa4_hd256/mask_mods.py", "fa4_hd256/score_mods.py", *COMPATIBLE)


def exports(root: Path) -> list[str]:
    """Modules of the operator with an `__all__` that nobody reads."""
    return [
        f"{source} has __all__; users import nothing from it"
        for source in sources(root)
        if source.split("/")[0] in OPERATOR and source not in PUBLISHED
        if not source.endswith("/__init__.py") and not (root / source).is_symlink()
        if any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for node in ast.parse((root / source).read_text("utf-8"), source).body
        )
    ]


def private_names(root: Path) -> list[str]:
    """Return the lines of the operator that name `torch._C`, but for those of the one file that has
    all of PyTorch's private API."""
    return [
        f"{name}:{number}: torch._C outside of private_torch"
        for name in sources(root)
        if name.startswith("fa4_hd256/") and not name.endswith("/private_torch.py")
        for number, line in enumerate((root / name).read_text("utf-8").splitlines(), 1)
        if "torch._C" in line
    ]


def _package(module: str) -> str:
    return max((package for package in PACKAGES if f"{module}/".startswith(f"{package}/")), key=len)


def imports(root: Path) -> list[str]:
    """Imports that `PACKAGES` does not allow, and import circles."""
    graph, found = import_graph(root), []
    for module, imported in sorted(graph.items()):
        if module.startswith("lab/tests/"):
            continue
        package = _package(module)
        for name in sorted(imported):
            other = _package(name)
            if other not in (package, *PACKAGES[package]):
                found.append(f"{module} (package {package}) imports {name} (package {other})")
    return found + graphs.circles(graph)


#: Folders of tests -> products that their modules must not import.
FORBIDDEN_IN_TESTS = {
    "tests/": ("lab",),
    "tests/helpers/": ("bench",),
    "tests/schedulers/": ("bench",),
    "tests/softmax_emu/": ("bench",),
    "tests/operator/": ("bench",),
}
#: What tests of the operator may have of bench: calls without launches.
STAND_IN = "bench/measure/host"


def imports_of_tests(root: Path) -> list[str]:
    """Imports that `FORBIDDEN_IN_TESTS` does not allow: `make test` works without the lab."""
    found = []
    for source in sources(root):
        tops = {top for place, tops in FORBIDDEN_IN_TESTS.items() if source.startswith(place)
                for top in tops}  # fmt: skip
        found += [
            f"{source} imports {name}; move what it tests to that product's tests"
            for name in sorted(graphs.names_imported(root / source, Path(source).parent.as_posix()))
            if name.split("/")[0] in tops and name != STAND_IN
        ]
    return found


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, docstring) of each module, class and function that has one."""
    for source in sources(root):
        for node in ast.walk(ast.parse((root / source).read_text(), source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield f"{source}:{node.body[0].lineno}", text


def openings(root: Path) -> list[str]:
    """Docstrings that begin with a fragment (`_FRAGMENT`), and that only refer to another one."""
    found = []
    for where, text in docstrings(root):
        if _REFERENCE.fullmatch(text):
            found.append(f"{where}: '{text}' refers to another docstring; write or delete it")
        elif word := _FRAGMENT.match(text):
            begun = " ".join(text.split()[:4])
            found.append(
                f"{where}: '{begun}' begins with {word[1]!r}; begin with a verb, or name the thing"
            )
    return found


def _too_often(
    root: Path, names: list[str], table: dict[str, tuple[str, int]], gap: str
) -> list[str]:
    """Patterns of a table that occur in files more often than it allows. gap: what a space stands
    for."""
    texts = {s: (root / s).read_text() for s in names if s not in _CHECKERS}
    found = []
    for pattern, (better, ceiling) in table.items():
        expression = re.compile(pattern.replace(" ", gap))
        counts = {s: n for s, text in texts.items() if (n := len(expression.findall(text)))}
        if (total := sum(counts.values())) > ceiling:
            where = ", ".join(f"{s} {n}" for s, n in counts.items())
            most = f"at most {ceiling}; write {better}"
            found.append(f"{pattern!r} stands {total} times, {most}: {where}")
    return found


def words(root: Path) -> list[str]:
    """Words of `GLOSSARY` that stand more often than it allows."""
    bounded = {rf"\b(?:{phrase})\b": limit for phrase, limit in GLOSSARY.items()}
    return _too_often(root, sources(root), bounded, r"(?:\s|#:?)+")


def annotations(root: Path) -> list[str]:
    """Annotations of `ANNOTATIONS` that stand more often than it allows."""
    found = []
    for elsewhere in (False, True):
        table = {p: (better, most[elsewhere]) for p, (better, *most) in ANNOTATIONS.items()}
        names = [s for s in sources(root) if (s.split("/")[0] not in OPERATOR) == elsewhere]
        found += _too_often(root, names, table, " ")
    return found


def class_names(root: Path) -> list[str]:
    """Names of several classes of the operator, other than a pair of counterparts."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in sources(root):
        if name.startswith("fa4_hd256/"):
            for node in ast.walk(ast.parse((root / name).read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(name)
    return [
        f"{len(where)} classes are called {name}: {', '.join(where)}"
        for name, where in places.items()
        if len(where) > 1 and not _are_counterparts(where)
    ]


def _are_counterparts(where: list[str]) -> bool:
    """Return True for two modules of different architectures."""
    folders = [folder for module in where for folder in COUNTERPARTS if module.startswith(folder)]
    return len(where) == len(folders) == len(set(folders))


def copies(root: Path) -> list[str]:
    """Source files of the same content: one is a link to the other (CONTRIBUTING.md)."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in sources(root):
        text = (root / name).read_text()
        if text.count("\n") > 5 and not (root / name).is_symlink():
            places[text].append(name)
    return [f"{' and '.join(names)} are equal" for names in places.values() if len(names) > 1]


def module_names(root: Path) -> list[str]:
    """Test modules that share a name.

    pytest imports them by their names alone: the second of a pair cannot be collected.
    """
    tests = (s for s in sources(root) if known_as(s).startswith("tests/"))
    names = Counter(Path(s).name for s in tests)
    return [f"{count} files of tests are called {name}" for name, count in names.items()
            if count > 1 and name != "conftest.py"]  # fmt: skip


def machine_paths(root: Path) -> list[str]:
    """Files that hold a path which exists on one machine only."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else sources(root)
    pattern = re.compile("/(?:" + "|".join(("work", "home", "Users", "farm", "root")) + ")/")
    found = []
    for name in names:
        path = root / name
        if path.suffix in TEXT and path.is_file():
            match = pattern.search(path.read_text(errors="ignore"))
            if match:
                found.append(f"{name} holds {match[0]}")
    return found
