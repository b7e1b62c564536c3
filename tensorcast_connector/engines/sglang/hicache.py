"""TensorcastHiCache: the storage behind SGLang's hierarchical cache, one object in every rank.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-mem-layout page_first_direct
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "tensorcast",
        "module_path": "tensorcast_connector.engines.sglang.hicache", "class_name": "TensorcastHiCache",
        "interface_v1": 1, "worker": "unix:/path/worker.sock"}'

SGLang calls it from threads of its own: one asks what exists, one reads, one writes, and its scheduler clears.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from tensorcast_connector.client.attachment import Attachment
from tensorcast_connector.config import STORAGE_PAGES_PER_BATCH, STORAGE_SCATTERED_PAGES_MAX, parse_address
from tensorcast_connector.core.identity import digest
from tensorcast_connector.engines.options import StorageConfig
from tensorcast_connector.engines.sglang import server, weight_hooks
from tensorcast_connector.engines.sglang.host_pages import HostPages, pages_of_tensors
from tensorcast_connector.engines.sglang.live_weights import live
from tensorcast_connector.engines.sglang.namespace import Rank, block_hashes, namespace
from tensorcast_connector.engines.sglang.page_copies import Parts
from tensorcast_connector.engines.sglang.page_store import PageStore
from tensorcast_connector.engines.sglang.restorable import Presence, restorable
from tensorcast_connector.engines.weights_epoch import private_epoch
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import AttachInstance

logger = logging.getLogger(__name__)
Call = TypeVar("Call", bound=Callable[..., Any])
_KV = str(PoolName.KV)


def _harmless(default: Callable[..., Any]) -> Callable[[Call], Call]:
    """A fault of ours is a miss: SGLang's threads end with an exception, and with them storage for good."""

    def wrap(call: Call) -> Call:
        @functools.wraps(call)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except Exception:
                level = logging.DEBUG if call.__name__ in self._faults else logging.ERROR
                self._faults.add(call.__name__)
                logger.log(
                    level, "%s failed; taken for a miss, now and whenever it fails", call.__name__, exc_info=True
                )
                return default(*args, **kwargs)

        return cast(Call, guarded)

    return wrap


def _nothing(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _nothing_of(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {each.name: [False] * len(each.keys or []) for each in transfers}


@dataclass(slots=True)
class _Cleared:
    """What `clear` has done in this process; it outlives the storage, which can be detached and attached again."""

    times: int = 0
    salt: str = ""


_cleared = _Cleared()


class TensorcastHiCache(HiCacheStorage):
    """See the module.

    Args:
        storage_config: of SGLang; its `extra_config` is what the user gave.
        kwargs: what SGLang may add; nothing of it is used.

    Raises:
        ConfigError: a missing worker, an unknown option or a wrong value.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs
        extra = storage_config.extra_config or {}
        self._options = StorageConfig.from_extra(extra)
        self._zero_copy = bool(extra.get("interface_v1"))
        self._config = storage_config
        self._facts = server.facts()
        self._pools: dict[str, HostPages] = {}
        self._faults: set[str] = set()  # calls whose failure was told
        weight_hooks.install()
        self._name = server.name()
        self._attachment = Attachment(
            SocketNetwork(), parse_address(self._options.worker, "worker"),
            f"{self._name}/tp{storage_config.tp_rank}pp{storage_config.pp_rank}", self._instance(""),
        )  # fmt: skip
        self._store = PageStore(
            self._attachment, time.monotonic, time.sleep,
            self._options.lookup_deadline_s, self._options.transfer_deadline_s,
        )  # fmt: skip
        threading.Thread(target=self._find_weights, name="tensorcast-weights", daemon=True).start()

    def __repr__(self) -> str:
        return f"<TensorcastHiCache {self._name} {self._attachment}>"

    def _instance(self, identity: str) -> AttachInstance | None:
        """How the server is listed; by its first rank alone."""
        config = self._config
        if config.tp_rank or config.pp_rank or config.attn_cp_rank or config.dp_rank:
            return None
        shared = namespace(self._facts, identity, self._options.tenant) if identity else ""
        return AttachInstance(self._name, "sglang", str(config.model_name), shared, self._options.tenant)

    def _find_weights(self) -> None:
        try:
            if live.identity is None or self._options.weight_version:
                live.found(server.weights_at_start(self._options.weight_version))
        except Exception:
            logger.exception("which weights these are was not found out; pages are shared with nobody")
            live.found(private_epoch())
        if live.identity is not None and (instance := self._instance(live.identity)) is not None:
            self._attachment.describe(instance)

    # --- pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host memory of the KV cache exists."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool of host memory exists."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        config = self._config
        rank = Rank(
            config.tp_rank, config.tp_size, config.attn_cp_rank, config.attn_cp_size,
            stage=config.pp_rank, stages=config.pp_size,
        )  # fmt: skip
        if name not in self._pools or self._pools[name].pool is not pool:
            self._pools[name] = HostPages(
                name, pool, rank, config.is_mla_model, config.tp_lcm_size, self._zero_copy
            )  # fmt: skip
            logger.info("host pool %s: %r", name, self._pools[name])

    def _spaces(self, pool: str) -> tuple[list[bytes], Callable[[], bool]] | None:
        """Where pages of a pool live just now, and whether that still holds; None: nowhere, nothing is shared."""
        pages, identity, salt = self._pools.get(pool), live.identity, _cleared.salt
        if pages is None or pages.unusable or identity is None:
            return None
        spaces = pages.spaces(namespace(self._facts, identity, self._options.tenant, salt))
        return spaces, lambda: live.identity == identity and _cleared.salt == salt

    # --- what exists ---

    def exists(self, key: str) -> bool:
        """Whether a page can be had."""
        return self.batch_exists([key]) == 1

    @_harmless(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be had."""
        where = self._spaces(_KV)
        return self._store.leading(where[0], block_hashes(keys)) if where else 0

    @_harmless(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How many leading pages can be had of the KV pool together with what each other pool needs for them."""
        hashes = block_hashes(keys)
        kv_pages = self.batch_exists(keys)
        present = {
            str(each.name): self._presence(each, hashes[:kv_pages])
            for each in pool_transfers or ()
            if each.hit_policy != PoolHitPolicy.BLOCK_GROUPS  # never decides, and we keep none
        }
        lengths, longest = restorable(kv_pages, present)
        hits = {PoolName.KV: kv_pages} | {PoolName(name): pages for name, pages in longest.items() if pages}
        return PoolTransferResult(lengths[-1] if lengths else 0, hits if kv_pages else {}, lengths)

    def _presence(self, transfer: PoolTransfer, hashes: list[bytes]) -> Presence:
        where = self._spaces(str(transfer.name))
        all_pages = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
        window = None if all_pages else max(1, len(transfer.keys or ()))
        if where is None:
            return Presence([False] * len(hashes), window)
        if all_pages:
            count = self._store.leading(where[0], hashes)
            return Presence([place < count for place in range(len(hashes))], window)
        return Presence(self._store.scattered(where[0], hashes, STORAGE_SCATTERED_PAGES_MAX), window)

    # --- reading and writing host memory in place ---

    @_harmless(_nothing)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Reads pages to where they belong in host memory. True for the leading ones that could be had."""
        return self._read(_KV, keys, host_indices)

    @_harmless(_nothing)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Writes pages from host memory. True for the leading ones that are in the pool now."""
        return self._write(_KV, keys, host_indices)

    @_harmless(_nothing_of)
    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[Any, list[bool]]:
        """As batch_get_v1, for each of several pools."""
        return {each.name: self._read(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    @_harmless(_nothing_of)
    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[Any, list[bool]]:
        """As batch_set_v1, for each of several pools; without pages of the KV cache these are of no use."""
        if self._spaces(_KV) is None:
            return _nothing_of(transfers)
        return {each.name: self._write(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def _read(self, pool: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        where = self._spaces(pool)
        if where is None or not keys:
            return [False] * len(keys)
        return self._read_pages(where, keys, self._pools[pool].pages(host_indices, len(keys)))

    def _write(self, pool: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        where = self._spaces(pool)
        if where is None or not keys:
            return [False] * len(keys)
        return self._write_pages(where, keys, self._pools[pool].pages(host_indices, len(keys)))

    def _read_pages(
        self, where: tuple[list[bytes], Callable[[], bool]], keys: list[str], pages: Sequence[Sequence[Parts]]
    ) -> list[bool]:
        """`pages`: of each keyspace, where each page lies."""
        spaces, valid = where
        done = self._in_order(spaces, block_hashes(keys), pages, self._store.read)
        if not valid():  # what was read is of weights that are no longer the engine's
            done = 0
        return [place < done for place in range(len(keys))]

    def _write_pages(
        self, where: tuple[list[bytes], Callable[[], bool]], keys: list[str], pages: Sequence[Sequence[Parts]]
    ) -> list[bool]:
        spaces, valid = where
        done = self._in_order(spaces, block_hashes(keys), pages, functools.partial(self._store.write, valid=valid))
        return [place < done for place in range(len(keys))]

    def _in_order(
        self, spaces: list[bytes], hashes: list[bytes], pages: Sequence[Sequence[Parts]], move: Callable[..., int]
    ) -> int:
        """Moves pages batch by batch, each within its time; how many leading ones were moved in every keyspace."""
        for start in range(0, len(hashes), STORAGE_PAGES_PER_BATCH):
            batch = slice(start, start + STORAGE_PAGES_PER_BATCH)
            wanted = done = len(hashes[batch])
            until = self._store.until()
            for space, places in zip(spaces, pages, strict=True):
                done = min(done, move(space, hashes[batch][:done], places[batch][:done], until=until))
            if done < wanted:
                return start + done
        return len(hashes)

    # --- pages as tensors, for layouts without one place per page ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """One page into a flat tensor, which is returned; None: it could not be had."""
        return self.batch_get([key], [target_location])[0]

    @_harmless(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages into flat tensors, which are returned; None for those behind the leading ones that could be had."""
        where = self._spaces(_KV)
        if where is None or target_locations is None:
            return [None] * len(keys)
        done = self._read_pages(where, keys, [pages_of_tensors(target_locations)])
        return [target if ok else None for target, ok in zip(target_locations, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """One page from a tensor; whether it is in the pool now."""
        return bool(self.batch_set([key], [value]))

    @_harmless(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Pages from tensors; whether all of them are in the pool now."""
        where = self._spaces(_KV)
        if where is None or values is None:
            return False
        flat = [each.contiguous() for each in values]
        return all(self._write_pages(where, keys, [pages_of_tensors(flat)]))

    # --- the rest ---

    def clear(self) -> None:
        """From now on this server finds nothing of what was stored before; other servers keep what they have.

        All ranks of the server do it, and find the same pages afterwards where they share them (MLA).
        """
        _cleared.times += 1
        alone = self._config.tp_size == 1 or not self._config.is_mla_model
        _cleared.salt = private_epoch() if alone else digest([server.common_seed(), _cleared.times])
        logger.info("cleared: what was stored before is not found any more")

    def get_stats(self) -> Any:
        """Pages and GB/s of each batch since the last call, for SGLang's metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        read, written = self._store.take_moved()
        return StorageMetrics(
            list(read.pages), list(written.pages),
            [each / 1e9 for each in read.bytes_per_s], [each / 1e9 for each in written.bytes_per_s],
        )  # fmt: skip

    def close(self) -> None:
        """SGLang has detached the storage."""
        self._attachment.close()
