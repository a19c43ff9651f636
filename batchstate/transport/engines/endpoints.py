"""An engine's address as bytes, opaque to whoever carries them: kind, instance, memory, and how to reach it."""

import base64
import json
from collections.abc import Iterable

from batchstate.errors import HandshakeError
from batchstate.transport.regions import Region, RemoteRegion

MAGIC = "batchstate endpoint 1"
MOST_REGIONS = 65_536


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
    if not isinstance(endpoint, bytes | bytearray):
        raise _malformed(repr(endpoint).encode(), f"{type(endpoint).__name__} instead of bytes")
    try:
        fields = json.loads(endpoint)
        if fields["is"] != MAGIC:
            raise KeyError("is")
        regions = dict(_region(*one) for one in fields["regions"])
        if len(regions) != len(fields["regions"]) or len(regions) > MOST_REGIONS:
            raise ValueError(f"{len(fields['regions'])} regions, or an index twice")
        native = base64.b64decode(fields["native"], validate=True)
        return str(fields["engine"]), str(fields["instance"]), regions, native
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _malformed(bytes(endpoint), str(error)[:80]) from error


def _region(index: object, name: object, address: object, nbytes: object) -> tuple[int, RemoteRegion]:
    for number in (index, address, nbytes):
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"a region with the number {number!r}"[:80])
    region = RemoteRegion(index, str(name), address, nbytes)  # type: ignore[arg-type]
    if region.address + region.nbytes >= 2**63:
        raise ValueError(f"a region of {nbytes} bytes from {address} on")
    return region.index, region


def _malformed(endpoint: bytes, reason: str) -> HandshakeError:
    return HandshakeError(
        f"{endpoint[:40]!r} is no endpoint of this library: {reason}",
        value=endpoint[:40],
        remedy="pass what the other side's `endpoint()` returned",
    )
