"""What brings an engine of your own into plans: an adaptor, and the link that attaches it to the worker of its host.

    from tensorcast_connector.adaptor import attach_instance

    class Adaptor:                                    # an InstanceAdaptor: four coroutines, one for each operation
        async def publish(self, arguments, context): ...

    async with await attach_instance("unix:/run/tensorcast/worker.sock", Adaptor(), instance_id="engine-a") as link:
        ...                                           # the engine serves; steps of plans are done meanwhile

What holds for an adaptor (docs/service.md has a complete one):

- What it takes and gives is plain data (text, bytes, numbers, lists, mappings with text as keys; a result has at most
  PLAN_BYTES_MAX bytes encoded); tensors travel as artifacts, by a `Session` with the worker of the same host.
- A step may come again after a lost answer, with the same `context.key`: doing it twice must have the effect of doing it once.
- Each step runs in a task of its own on the loop of the link, several at once: what has an order among them is up to the adaptor.
  Work that takes long belongs on a thread (`asyncio.to_thread`): meanwhile no other step is taken, answered or cancelled.
- A step that nobody wants any more is cancelled (`asyncio.CancelledError` at its next await): leave the engine as it was.
- An error is the step's end: Unavailable and Exhausted are tried again until the plan's deadline, any other TensorcastError fails
  the plan as what it is, and every other exception does so as an internal error with its name.
"""

from tensorcast_connector.client.instance import InstanceAdaptor, InstanceLink, StepContext, attach_instance
from tensorcast_connector.wire.messages import AttachInstance

__all__ = ["AttachInstance", "InstanceAdaptor", "InstanceLink", "StepContext", "attach_instance"]
