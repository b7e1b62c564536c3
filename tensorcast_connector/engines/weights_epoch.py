"""The weight epoch of a model folder: what tells one set of weights from another.

A hub snapshot is named by its commit. Anything else is known by the content of its weight files, digested once per
file and remembered beside (size, mtime, inode), so that a restart costs a stat per file.
"""

import json
import logging
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import blake3

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.private import private_directory

logger = logging.getLogger(__name__)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})/?$")


def snapshot_commit(folder: Path) -> str | None:
    """The hub commit if `folder` is a snapshot of a hub cache (immutable by construction)."""
    match = _COMMIT.search(str(folder))
    return match.group(1) if match else None


def weights_epoch(folder: Path, cache_dir: Path, progress: Callable[[str], None] = lambda _: None) -> str:
    """The epoch of the weights in `folder`.

    Args:
        folder: a local model folder.
        cache_dir: where file digests are remembered; a cache that cannot be written is only slower.
        progress: told before each file that must be read.

    Raises:
        ConfigError: no weight files, or unreadable ones.
    """
    if commit := snapshot_commit(folder):
        return f"commit:{commit}"
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
        if not files:
            raise ConfigError(f"{folder} holds no weight files")
        digests = [[path.name, _file_digest(path, cache_dir, progress)] for path in files]
    except OSError as error:
        raise ConfigError(f"cannot read the weights in {folder}: {error.strerror}") from error
    return "content:" + blake3.blake3(json.dumps(digests).encode()).hexdigest()


def private_epoch() -> str:
    """An epoch that nobody else has."""
    return f"private:{secrets.token_hex(16)}"


def hub_snapshot(model: str, revision: str | None, cache_dir: str | None = None) -> Path:
    """The folder of a model of the hub that is on this host.

    Raises:
        ConfigError: it is not.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:
        raise ConfigError(f"the files of {model} were not found on this host") from error


def _file_digest(path: Path, cache_dir: Path, progress: Callable[[str], None]) -> str:
    before = path.stat()
    identity = [before.st_size, before.st_mtime_ns, before.st_ino, before.st_dev]
    entry = cache_dir / (blake3.blake3(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")
    try:
        known = json.loads(entry.read_text())
        if known["identity"] == identity:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or not readable: compute it
    progress(path.name)
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update_mmap(path)
    digest = str(hasher.hexdigest())
    after = path.stat()
    if [after.st_size, after.st_mtime_ns] != identity[:2]:
        raise ConfigError(f"{path} changed while it was read")
    try:
        private_directory(cache_dir)
        partial = entry.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"identity": identity, "digest": digest}))
        partial.rename(entry)
    except (OSError, ConfigError) as error:
        logger.debug("digest of %s is not remembered: %s", path, error)
    return digest
