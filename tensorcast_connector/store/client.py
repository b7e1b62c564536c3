"""What people and callers ask the store."""

import random

from tensorcast_connector.config import STORE_TIMEOUT_S
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import Address
from tensorcast_connector.wire.store_messages import Changes


async def read_cluster(network: Network, stores: list[Address], name: str, chance: random.Random) -> ClusterView:
    """The cluster's metadata as it is now.

    Raises:
        TensorcastError: no store answers; says why.
    """
    client = RpcClient(network, stores, "client", name, chance)
    client.start()
    try:
        await client.wait_connected(STORE_TIMEOUT_S, patient=len(stores) > 1)
        view = ClusterView()
        while True:
            view.apply(await client.call(view.ask(0), Changes, STORE_TIMEOUT_S))
            if not view.listing:
                return view
    finally:
        await client.close()
