"""The handshake: what does not fit is refused on both sides, in words, before a byte moves."""

import contextlib
import json
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate.errors import ArgumentError, DtypeError, HandshakeError
from batchstate.transport.engines import base as endpoints
from batchstate.transport.engines.in_process import InProcessEngine, Network
from batchstate.transport.handshake import MAGIC, MOST_BYTES, Description, check_peers
from batchstate.transport.layout import KVLayout

LAYERS = ("0.keys", "0.values")


def endpoint(instance: str, **fields: Any) -> bytes:
    """What `Engine.endpoint` makes, as far as it matters here."""
    made = {"is": endpoints.MAGIC, "engine": "nixl", "instance": instance, "regions": [], "native": ""}
    return json.dumps(made | fields).encode()


def described(instance: str = "b", **fields: Any) -> Description:
    """A worker with pages of 16 tokens, 8 heads of 32 bytes."""
    whole: dict[str, Any] = {"page_size": 16, "dtype": "float16", "layers": LAYERS, "item_bytes": 256, "heads": 8}
    return Description(f"worker {instance}", instance, KVLayout(**(whole | fields)), endpoint(instance))


def refuses(ours: Description, theirs: Description, *words: str) -> None:
    """Both sides refuse, name `words`, and have a remedy."""
    for here, there in ((ours, theirs), (theirs, ours)):
        with pytest.raises(HandshakeError) as caught:
            check_peers(here, there)
        assert type(caught.value) is HandshakeError
        assert all(word in caught.value.problem for word in words), caught.value
        assert caught.value.remedy in str(caught.value)
        assert caught.value.remedy
        assert caught.value.value is not None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"page_size": 64}, ["page_size", "16", "64"]),
        ({"dtype": "bfloat16"}, ["dtype", "float16 ", "bfloat16"]),
        ({"layers": ("0.keys", "1.values")}, ["layers", "number 1", "'0.values'", "'1.values'"]),
        ({"layers": ("0.values", "0.keys")}, ["layers", "number 0", "'0.values'", "'0.keys'"]),
        ({"layers": (*LAYERS, "1.keys")}, ["layers", "2", "3", "number 2", "missing", "'1.keys'"]),
        ({"item_bytes": 512}, ["item_bytes", "256 at degree 1 (32 a head)", "512 at degree 1 (64 a head)"]),
        ({"item_bytes": 256, "degree": 2}, ["item_bytes", "256 at degree 1 (32", "256 at degree 2 (64"]),
        ({"heads": 4}, ["heads", "8", "4"]),
        ({"replicated": True}, ["replicated", "False", "True"]),
        ({"token_major": False}, ["token_major", "False", "True"]),
    ],
)
def test_mismatched_layouts_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    """The error names the field, both values and a remedy, on both sides."""
    refuses(described("a"), described("b", **fields), *words)


def test_degrees_may_differ() -> None:
    """Groups of 1 to 16 ranks fit each other as long as a head has the same bytes."""
    group = [described(str(degree), degree=degree, item_bytes=max(1, 8 // degree) * 32) for degree in (1, 2, 4, 8, 16)]
    for ours in group:
        for theirs in group:
            if ours is not theirs:
                check_peers(ours, theirs)


def test_a_worker_is_no_peer_of_itself() -> None:
    """The same instance on both sides is refused, whatever the name."""
    refuses(described("a"), attrs.evolve(described("a"), worker="another"), "instance is a here", "a there")


def test_endpoint_of_another_instance_is_refused() -> None:
    """A description whose endpoint is of an engine that is gone, or not ours, is refused, by its own side too."""
    stale = attrs.evolve(described("b"), endpoint=endpoint("c"))
    refuses(described("a"), stale, "worker b", "instance is b", "of c")
    for bad in (
        b"",
        b"\xff",
        b"[]",
        b'"is"',
        b"null",
        b"[" * 100_000,
        endpoint("b")[:-1],
        endpoint("b", **{"is": "x"}),
    ):
        refuses(described("a"), attrs.evolve(described("b"), endpoint=bad), "worker b", "no endpoint of this library")
    refuses(described("a"), attrs.evolve(described("b"), endpoint=endpoint("b", engine="gloo")), "nixl", "gloo")


layouts = st.builds(
    lambda heads, degree, **rest: KVLayout(heads=heads, degree=degree, item_bytes=max(1, heads // degree) * 8, **rest),
    page_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(["float16", "uint8"]),
    layers=st.sampled_from([("k",), ("k", "v")]),
    heads=st.sampled_from([2, 4]),
    degree=st.sampled_from([1, 2, 8]),
    replicated=st.booleans(),
    token_major=st.booleans(),
)
peers = st.builds(
    lambda instance, layout, said: Description("w", instance, layout, endpoint(said or instance)),
    st.sampled_from("abc"),
    layouts,
    st.sampled_from([None, None, None, "a"]),
)


@settings(max_examples=200, deadline=None)
@given(peers, peers)
def test_both_sides_refuse_the_same(ours: Description, theirs: Description) -> None:
    """Whatever one side refuses the other refuses too."""

    def verdict(here: Description, there: Description) -> bool:
        try:
            check_peers(here, there)
        except HandshakeError:
            return False
        return True

    assert verdict(ours, theirs) == verdict(theirs, ours)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1), st.text(min_size=1), layouts, st.binary())
def test_description_survives_the_wire(worker: str, instance: str, layout: KVLayout, data: bytes) -> None:
    """Every description comes back equal."""
    one = Description(worker, instance, layout, data)
    assert Description.from_bytes(one.to_bytes()) == one


def broken(data: Any, *words: str) -> None:
    """Reading `data` is refused with `words`, and a remedy."""
    with pytest.raises(HandshakeError) as caught:
        Description.from_bytes(data)
    assert all(word in caught.value.problem for word in words), caught.value
    assert caught.value.remedy


def test_truncated_descriptions_are_refused() -> None:
    """No beginning of a description is a description, nor is one with something behind it."""
    data = described().to_bytes()
    for length in range(len(data)):
        broken(data[:length], "no description")
    broken(data + b"{}", "no description")


@pytest.mark.parametrize(
    "data", [b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"is": 1}', b"1" * 5000, "text", 7]
)
def test_foreign_bytes_are_refused(data: Any) -> None:
    """What is no description of this library is said to be none."""
    broken(data, "no description of a worker")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is": "batchstate endpoint 1"}, [MAGIC]),
        ({"version": 2}, ["version is 1 here, 2 there"]),
        ({"version": True}, ["version is 1 here, True there"]),
        ({"version": None}, ["None there"]),
        ({"worker": ""}, ["empty"]),
        ({"worker": 3}, ["worker", "no text"]),
        ({"instance": ["b"]}, ["instance", "no text"]),
        ({"endpoint": None}, ["endpoint", "no text"]),
        ({"endpoint": "a b"}, ["base64"]),
        ({"endpoint": "é"}, ["base64"]),
        ({"colour": "red"}, ["colour"]),
        ({"layout": None}, ["layout", "NoneType"]),
        ({"layout": {}}, ["layout"]),
    ],
)
def test_malformed_fields_are_refused(change: dict[str, Any], words: list[str]) -> None:
    """Every field is of its type, known, and of this version."""
    broken(json.dumps(json.loads(described().to_bytes()) | change).encode(), *words)


@pytest.mark.parametrize("field", ["is", "version", "worker", "instance", "layout", "endpoint"])
def test_missing_fields_are_refused(field: str) -> None:
    """A description without one of its fields is refused."""
    fields = json.loads(described().to_bytes())
    del fields[field]
    broken(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 0}, ["page_size is 0"]),
        ({"page_size": 16.0}, ["page_size is 16.0"]),
        ({"page_size": float("nan")}, ["page_size is nan"]),
        ({"degree": 3}, ["8 heads", "3 ranks"]),
        ({"rank": 1}, ["rank 1 of 1"]),
        ({"layers": "0.keys"}, ["layers"]),
        ({"layers": [1]}, ["layers"]),
        ({"layers": [["a"]]}, ["layers"]),
        ({"dtype": None}, ["dtype is None"]),
        ({"replicated": 0}, ["replicated is 0"]),
    ],
)
def test_impossible_layouts_are_refused(change: dict[str, Any], words: list[str]) -> None:
    """A layout that could not be made here is not taken from a peer: the error names the worker and what is wrong."""
    fields = json.loads(described().to_bytes())
    fields["layout"] |= change
    broken(json.dumps(fields).encode(), "'worker b'", "layout that cannot be", *words)


def test_oversize_descriptions_are_refused() -> None:
    """Neither side handles a description without bound."""
    broken(b" " * (MOST_BYTES + 1), str(MOST_BYTES + 1))
    with pytest.raises(HandshakeError, match="bytes"):
        attrs.evolve(described(), endpoint=bytes(MOST_BYTES)).to_bytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    """Bytes changed on the way give a description or a `HandshakeError`."""
    wire = bytearray(described().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(HandshakeError):
        Description.from_bytes(bytes(wire))


def test_a_damaged_name_is_no_other_worker() -> None:
    """A description whose fields are whole but not those that were sent is refused."""
    data = described("b").to_bytes()
    for before, after in (
        (b"worker b", b"worker c"),
        (b'"heads": 8', b'"heads": 4'),
        (b'"page_size": 16', b'"page_size": 17'),
    ):
        assert before in data
        broken(data.replace(before, after), "damaged")
    broken(json.dumps(json.loads(data) | {"sum": "7"}).encode(), "damaged")


@pytest.mark.parametrize(
    "region",
    [
        [0, "k", float("inf"), 8],
        [0, "k", 2**63, 8],
        [0, "k", 2**63 - 1, 8],
        [0, "k", -1, 8],
        [0, "k", 8, -8],
        [0, "k", 8, 8.0],
        [0, "k", True, 8],
        [0, "k", "8", 8],
        [-1, "k", 8, 8],
        [0, "k", 8],
    ],
)
def test_numbers_of_an_endpoint_are_addresses(region: list[Any]) -> None:
    """What is no index, address or length is no endpoint."""
    with pytest.raises(HandshakeError, match="no endpoint"):
        endpoints.parsed_endpoint(endpoint("b", regions=[region]))


def test_an_endpoint_has_no_endless_list_of_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """More regions than anyone has, and an index twice, are refused."""
    monkeypatch.setattr(endpoints, "MOST_REGIONS", 2)
    rows = [[index, "k", 64 * index, 64] for index in range(3)]
    assert len(endpoints.parsed_endpoint(endpoint("b", regions=rows[:2]))[2]) == 2
    for wrong in (rows, [rows[0], rows[0]]):
        with pytest.raises(HandshakeError, match="no endpoint"):
            endpoints.parsed_endpoint(endpoint("b", regions=wrong))


def test_engines_refuse_addresses_of_nobody() -> None:
    """An instance that is no nonce, and an address that is no text, lead nowhere."""
    engine = InProcessEngine(Network())
    with pytest.raises(HandshakeError, match="instance is 'zz'"):
        engine.connect(endpoint("zz", engine="in-process"))
    with pytest.raises(HandshakeError, match="no address"):
        engine.connect(endpoint("ab" * 8, engine="in-process", native="/w=="))


@pytest.mark.parametrize(
    "changes", [{"degree": 2**17}, {"page_size": 2**40}, {"item_bytes": 2**60}, {"heads": 10**400}]
)
def test_layouts_have_bounds(changes: dict[str, Any]) -> None:
    """No number of a layout makes anybody count for ever."""
    with pytest.raises(ArgumentError, match="is above"):
        described("b", **changes)


def test_a_dtype_is_one_of_torch() -> None:
    """A dtype that torch lacks is refused, and one of two names is the same as the other."""
    for wrong in ("flot32", "Tensor", ""):
        with pytest.raises(DtypeError, match="dtype is"):
            described("b", dtype=wrong)
    assert described("b", dtype="half").layout == described("b", dtype=torch.float16).layout
