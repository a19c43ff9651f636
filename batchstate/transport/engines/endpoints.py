"""An engine's address as bytes, opaque to whoever carries them: kind, instance, memory, and how to reach it."""

import base64
import json
from collections.abc import Iterable

from batchstate.errors import HandshakeError
from batchstate.transport.regions import Region, RemoteRegion

MAGIC = "batchstate endpoint 1"


def packed_endpoint(engine: str, instance: str, regions: Iterable[Region], native: bytes) -> bytes:
    """What `parsed_endpoint` takes apart. `native` is the engine's own part."""
    described = [[region.index, region.name, region.address, region.nbytes] for region in regions]
    fields = {
        "is": MAGIC,
        "engine": engine,
        "instance": instance,
        "regions": described,
        "native": base64.b64encode(native).decode(),
    }
    return json.dumps(fields).encode()


def parsed_endpoint(endpoint: bytes) -> tuple[str, str, dict[int, RemoteRegion], bytes]:
    """Engine, instance, regions by index, and the engine's own part.

    Raises:
        HandshakeError: that is no endpoint of this library.
    """
    try:
        fields = json.loads(endpoint)
        if fields["is"] != MAGIC:
            raise KeyError("is")
        regions = {
            int(index): RemoteRegion(int(index), str(name), int(address), int(nbytes))
            for index, name, address, nbytes in fields["regions"]
        }
        native = base64.b64decode(fields["native"], validate=True)
        return str(fields["engine"]), str(fields["instance"]), regions, native
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HandshakeError(
            f"{endpoint[:40]!r} is no endpoint of this library",
            value=bytes(endpoint[:40]),
            remedy="pass what the other side's `endpoint()` returned",
        ) from error
