"""Style as a test: non-functional properties of the code itself, each with its reason."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tensorcast_connector", "smetric_router")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400

# pattern -> (what to use instead, files where it is allowed)
BANS: dict[str, tuple[str, tuple[str, ...]]] = {
    r"\btime\.time\(": ("the clock that is passed in; wall time jumps", ("cli.py",)),
    r"\bos\.environ\b|\bos\.getenv\b": ("a field of config.py, the only reader of the environment", ("config.py",)),
    r"(?<![\w.])print\(": ("the logger, or the console in cli.py", ("cli.py",)),
    r"\bexcept\s*:": ("a named exception", ()),
    r"\bpickle\b|\bmarshal\b|(?<![\w.])eval\(|(?<![\w.])exec\(": ("msgspec; bytes from outside are never code", ()),
    r"\bFIXME\b|\bXXX\b": ("fix it, or file it", ()),
    r"\bTODO\b|\bissue \d|(?<!&)#\d": ("fix it; the code speaks of itself alone", ()),
    r"\bTaskGroup\(": ("asyncio.wait: before Python 3.12 a group swallows a cancellation that meets an error", ()),
    r"\btempfile\.mktemp\b": ("mkdtemp", ()),
    r"^from (tensorcast_connector|smetric_router) import|^import (tensorcast_connector|smetric_router)$": (
        "the module that defines the name; a package root that everyone imports makes cycles",
        (),
    ),
}


def tracked(suffix: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", f"*{suffix}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def package_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", package_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES_MAX, f"{path}: {len(lines)} lines; is it still one thing?"
    for number, line in enumerate(lines, 1):
        for pattern, (instead, allowed) in BANS.items():
            if path.name in allowed:
                continue
            assert not re.search(pattern, line.split("#")[0]), f"{path}:{number}: use {instead}"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{path}:{node.lineno}: {node.name} has {length} lines"
    if lines and path.name != "__init__.py":
        assert ast.get_docstring(tree), f"{path}: a module says in its first line what it is for"
    for node in tree.body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
        if public and path.name != "__init__.py":
            assert ast.get_docstring(node), f"{path}:{node.lineno}: public {node.name} has no docstring"  # type: ignore[arg-type]


def test_every_package_folder_is_a_package() -> None:
    for path in package_files():
        assert (path.parent / "__init__.py").exists(), f"{path.parent}: without __init__.py the import linter is blind"


def test_no_module_is_imported_by_nobody() -> None:
    text = "\n".join(path.read_text() for path in [*package_files(), *tracked(".py"), ROOT / "pyproject.toml"])
    for path in package_files():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name in ("__init__.py", "__main__.py"):
            continue
        parent, _, name = module.rpartition(".")
        used = module in text.replace(f"{module} ", "", 0) or re.search(
            rf"from {re.escape(parent)} import [^\n]*\b{name}\b", text
        )
        assert used, f"{module} is imported by nobody"


def test_nothing_machine_specific_is_tracked() -> None:
    # Spelt in pieces, so that this file does not match itself.
    hosts = ["pypi" + ".org", "python" + "hosted", "registry." + "npmjs", "deb." + "debian", "download." + "pytorch"]
    paths = ["/wo" + "rk/", "/ro" + "ot/", "/fa" + "rm/"]
    for path in tracked(""):
        if path.suffix in (".png", ".gz"):
            continue
        text = path.read_text(errors="replace")
        for word in hosts + paths:
            assert word not in text, f"{path} names {word}"


def test_changelog_and_version_agree() -> None:
    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert f"## {version.group(1)}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_module_is_on_the_map() -> None:
    codemap = (ROOT / "ARCHITECTURE.md").read_text().split("## Codemap")[1].split("\n## ")[0]
    for path in package_files():
        assert path.name == "__init__.py" or f"{path.name}`" in codemap, (
            f"{path} is missing in ARCHITECTURE.md's codemap"
        )
