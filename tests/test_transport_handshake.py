"""The handshake: what does not fit is refused on both sides, in words, before a byte moves; hostile bytes too."""

import base64
import contextlib
import itertools
import json
import zlib
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate.errors import ArgumentError, DtypeError, HandshakeError
from batchstate.transport.engines.base import ENDPOINT, MOST_REGIONS, Endpoint
from batchstate.transport.plan import KVLayout
from batchstate.transport.wire import MOST_BYTES, MOST_TEXT, sealed
from batchstate.transport.workers import DESCRIPTION, Description, check_peers

LAYERS = ("0.keys", "0.values")
Json = dict[str, Any]


NATIVE = base64.b64encode(b"what a loader in C++ parses").decode()
SECRET = b"32 bytes that only they two know"


def nonce(letter: str) -> str:
    """The instance of a worker."""
    return letter * 16


def endpoint(letter: str, /, **fields: Any) -> bytes:
    """What `Engine.endpoint` makes, as far as it matters here, or something like it, with a MAC that fits."""
    secret = base64.b64encode(SECRET).decode()
    made = {"is": ENDPOINT, "engine": "nixl", "instance": nonce(letter), "secret": secret, "regions": [], "native": ""}
    return sealed(made | fields, SECRET)


def resealed(data: bytes, **fields: Any) -> bytes:
    """A description with other fields, and a MAC that fits: what only who knows the secret can make."""
    whole = json.loads(data) | fields
    del whole["mac"]
    return sealed(whole, SECRET)


def described(letter: str = "b", **fields: Any) -> Description:
    """A worker with pages of 16 tokens, 8 heads of 32 bytes."""
    whole: Json = {"page_size": 16, "dtype": "float16", "layers": LAYERS, "item_bytes": 256, "heads": 8}
    return Description(f"worker {letter}", nonce(letter), KVLayout(**(whole | fields)), endpoint(letter))


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


# Peers


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
        ({"per_request": True}, ["per_request", "False", "True"]),
        ({"page_size": 1, "token_major": False}, ["page_size", "16", "1"]),
    ],
)
def test_mismatched_layouts_are_refused(fields: Json, words: list[str]) -> None:
    """The error names the field, both values and a remedy, on both sides."""
    refuses(described("a"), described("b", **fields), *words)


def test_pages_stages_and_degrees_may_differ() -> None:
    """Host pages of one token take KV of any pages; stages fit the whole and each other, and ranks do."""
    stages = [described("b", stage=LAYERS[:1]), described("c", stage=LAYERS[1:])]
    group = [described(f"{degree:x}", degree=2**degree, item_bytes=max(1, 8 >> degree) * 32) for degree in range(5)]
    for some in ([described("a"), described("b", page_size=1)], [described("a"), *stages], group):
        for ours, theirs in itertools.permutations(some, 2):
            check_peers(ours, theirs)
    refuses(described("a", layers=(*LAYERS, "1.keys")), stages[0], "layers", "'1.keys'")


def kinds(*several: KVLayout, letter: str = "b") -> Description:
    """A worker with several kinds of buffers."""
    return Description("worker b", nonce(letter), several, endpoint(letter))


def test_kinds_of_buffers_have_to_agree() -> None:
    """Layouts are as many on both sides and fit one by one; those of one worker have one rank and share no name."""
    layout, index = described().layout, KVLayout(16, "uint8", ("0.index",), 132, replicated=True)
    check_peers(kinds(layout, index), kinds(layout, index, letter="a"))
    assert Description.from_bytes(kinds(layout, index).to_bytes()).layouts == (layout, index)
    refuses(kinds(layout, index), described("a"), "layouts", "1", "2")
    refuses(kinds(layout, index), kinds(index, layout, letter="a"), "dtype")
    wrong: list[list[KVLayout]] = [
        [],
        [layout, layout],
        [layout, attrs.evolve(index, rank=1, degree=2)],
        [attrs.evolve(layout, stage=())],
        [index] * 65,
    ]
    for several in wrong:
        with pytest.raises(ArgumentError):
            kinds(*several)


def test_instances_and_engines_have_to_agree() -> None:
    """The same instance twice, an endpoint of another instance or engine, and a damaged one are refused."""
    mine, other = described("a"), described("b")
    refuses(mine, attrs.evolve(mine, worker="another"), f"instance is {nonce('a')} here", "another")
    with pytest.raises(HandshakeError, match=f"worker b says that its instance is {nonce('b')}, its endpoint is of c"):
        attrs.evolve(other, endpoint=endpoint("c"))
    refuses(mine, attrs.evolve(other, endpoint=endpoint("b", engine="gloo")), "nixl", "gloo")
    for bad in (b"", b"\xff", b"[]", b"null", b"[" * 100_000, endpoint("b")[:-1], endpoint("b", **{"is": "x"})):
        with pytest.raises(HandshakeError, match="expected an endpoint"):
            attrs.evolve(other, endpoint=bad)


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
    lambda letter, layout: Description("w", nonce(letter), layout, endpoint(letter)), st.sampled_from("abc"), layouts
)


@settings(max_examples=200, deadline=None)
@given(peers, peers)
def test_both_sides_refuse_the_same(ours: Description, theirs: Description) -> None:
    """Whatever one side refuses the other refuses too."""

    def fits(here: Description, there: Description) -> bool:
        try:
            check_peers(here, there)
        except HandshakeError:
            return False
        return True

    assert fits(ours, theirs) == fits(theirs, ours)


# Descriptions as bytes


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1), layouts, st.binary())
def test_description_survives_the_wire(worker: str, layout: KVLayout, data: bytes) -> None:
    """Every description comes back equal."""
    one = Description(worker, nonce("b"), layout, endpoint("b", native=base64.b64encode(data).decode()))
    assert Description.from_bytes(one.to_bytes()) == one


def broken(data: Any, *words: str) -> None:
    """Reading `data` is refused with `words`, and a remedy."""
    with pytest.raises(HandshakeError) as caught:
        Description.from_bytes(data)
    assert all(word in caught.value.problem for word in words), caught.value
    assert caught.value.remedy


def test_foreign_and_truncated_bytes_are_refused() -> None:
    """Neither foreign bytes nor a beginning of a description, nor one with more behind it, are a description."""
    data = described().to_bytes()
    foreign = [b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"is": 1}', b"1" * 5000]
    for one in (*foreign, *(data[:length] for length in range(len(data))), data + b"{}"):
        broken(one, "expected a description of a worker")


def test_oversize_descriptions_are_refused() -> None:
    """Neither side handles a description without bound."""
    broken(b" " * (MOST_BYTES + 1), str(MOST_BYTES + 1))
    with pytest.raises(HandshakeError, match="bytes"):
        attrs.evolve(described(), endpoint=endpoint("b", native="A" * (MOST_BYTES // 4 * 3))).to_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is": ENDPOINT}, [DESCRIPTION]),
        ({"version": 1}, ["version is 4 here, 1 there"]),
        ({"version": True}, ["version is 4 here, True there"]),
        ({"version": None}, ["None there"]),
        ({"worker": ""}, ["worker: expected a string"]),
        ({"worker": 3}, ["worker: expected a string", "3"]),
        ({"instance": ["b"]}, ["instance: expected a string"]),
        ({"instance": "zz"}, ["instance: expected a string like '[0-9a-f]{16}', got 'zz'"]),
        ({"endpoint": None}, ["endpoint: expected a string"]),
        ({"endpoint": "a b"}, ["endpoint", "base64"]),
        ({"endpoint": "é"}, ["endpoint"]),
        ({"colour": "red"}, ["colour"]),
        ({"endpoint": base64.b64encode(b"{}").decode()}, ["endpoint"]),
        ({"worker": "w" * (MOST_TEXT + 1)}, ["worker: expected a string"]),
        ({"worker": "\ud800"}, ["worker"]),
        ({"worker": "w" * 9_999_999}, ["worker"]),
        ({"version": 10**4000}, ["version is 4 here"]),
        ({"version": float("nan")}, ["NaN is not JSON"]),
        ({"version": float("-inf")}, ["-Infinity is not JSON"]),
        ({"layouts": [None]}, ["layouts: expected an object, got None"]),
        ({"layouts": [{}]}, ["layouts: expected a field 'page_size'"]),
    ],
)
def test_malformed_fields_are_refused(change: Json, words: list[str]) -> None:
    """Every field is of its type, known, and of this version."""
    broken(resealed(described().to_bytes(), **change), *words)


@pytest.mark.parametrize("depth", [9, 900, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_nesting_without_end_is_refused(depth: int, brackets: str) -> None:
    """Lists and objects that lie in each other without end are refused, however deep."""
    opened, closed = ("[", "]") if brackets == "[]" else ('{"a":', "}")
    data = json.dumps(json.loads(described().to_bytes()) | {"layouts": "HERE"})
    broken(data.replace('"HERE"', opened * depth + "1" + closed * depth).encode(), "expected a description")


def test_a_field_is_there_once() -> None:
    """Of two fields of one name the second would be taken: such a description is refused."""
    data = described().to_bytes()
    broken(data.replace(b'"version": 4', b'"version": 1, "version": 4'), "a field is there twice")


def test_a_whole_number_is_no_billion_digits() -> None:
    """A number longer than Python reads is refused, and costs nothing."""
    broken(described().to_bytes().replace(b'"version": 4', b'"version": ' + b"9" * 1_000_000), "expected a description")


@pytest.mark.parametrize("field", ["is", "version", "worker", "instance", "layouts", "endpoint", "mac"])
def test_missing_fields_are_refused(field: str) -> None:
    """A description without one of its fields is refused."""
    fields = json.loads(described().to_bytes())
    del fields[field]
    broken(json.dumps(fields).encode(), field)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 0}, ["page_size is 0"]),
        ({"page_size": 16.0}, ["page_size: expected an integer"]),
        ({"page_size": float("nan")}, ["NaN is not JSON"]),
        ({"page_size": 2**40}, ["expected <= "]),
        ({"item_bytes": 2**60}, ["expected <= "]),
        ({"heads": 10**400}, ["heads: expected an integer"]),
        ({"degree": 2**17}, ["expected <= "]),
        ({"degree": 3}, ["8 heads", "3 ranks"]),
        ({"rank": 1}, ["rank of 0 to 0, got 1"]),
        ({"layers": "0.keys"}, ["layers: expected a list"]),
        ({"layers": [1]}, ["layers: expected a string"]),
        ({"layers": [["a"]]}, ["layers: expected a string"]),
        ({"dtype": None}, ["dtype: expected a string"]),
        ({"dtype": "flot32"}, ["expected a dtype, got 'flot32'"]),
        ({"replicated": 0}, ["replicated: expected true or false, got 0"]),
        ({"per_request": 1}, ["per_request: expected true or false"]),
        ({"stage": 3}, ["stage: expected a list"]),
        ({"stage": ["2.keys"]}, ["a stage of", "2.keys"]),
        ({"colour": 1}, ["colour"]),
    ],
)
def test_impossible_layouts_are_refused(change: Json, words: list[str]) -> None:
    """A layout that could not be made here is not taken from a peer: the error says what is wrong, and where."""
    layout = json.loads(described().to_bytes())["layouts"][0] | change
    broken(resealed(described().to_bytes(), layouts=[layout]), *words)


def test_an_impossible_layout_names_its_worker() -> None:
    """Each field may be right by itself: the error names the worker whose layout cannot be."""
    layout = json.loads(described().to_bytes())["layouts"][0] | {"rank": 1}
    broken(resealed(described().to_bytes(), layouts=[layout]), "'worker b'", "impossible layout")


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"worker b", b"worker c"), (b'"heads": 8', b'"heads": 4'), (b'"page_size": 16', b'"page_size": 17')],
)
def test_a_damaged_name_is_no_other_worker(before: bytes, after: bytes) -> None:
    """A description whose fields are whole but not those that were sent is refused; so is one with a MAC made up."""
    data = described("b").to_bytes()
    assert before in data
    broken(data.replace(before, after), "damaged")
    changed = json.loads(data.replace(before, after))
    del changed["mac"]
    broken(sealed(changed, bytes(32)), "damaged")
    broken(json.dumps({**changed, "mac": zlib.crc32(data)}).encode(), "mac: expected a string")


@pytest.mark.parametrize("whole", [described().to_bytes(), endpoint("b", native=NATIVE)], ids=["worker", "endpoint"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_reach_no_loader(whole: bytes, data: st.DataObject) -> None:
    """No byte can be changed without notice: a `HandshakeError`, so that a loader in C++ sees only what was sent."""
    read: Any = Description.from_bytes if b"worker b" in whole else Endpoint.from_bytes
    wire = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(HandshakeError):
        assert read(bytes(wire)) == read(whole)


def test_a_dtype_is_one_of_torch() -> None:
    """A dtype that torch lacks is refused, and one of two names is the same as the other."""
    for wrong in ("flot32", "Tensor", ""):
        with pytest.raises(DtypeError, match="expected a dtype, got"):
            described("b", dtype=wrong)
    assert described("b", dtype="half").layout == described("b", dtype=torch.float16).layout


# Endpoints as bytes

ROWS: list[list[object]] = [[index, "k", 64 * index, 64] for index in range(MOST_REGIONS + 1)]


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"regions": [region]}
            for region in (
                [0, "k", float("inf"), 8],
                [0, "k", 2**63, 8],
                [0, "k", 2**63 - 1, 8],
                [0, "k", -1, 8],
                [0, "k", 8, -8],
                [0, "k", 8, 8.0],
                [0, "k", True, 8],
                [0, "k", "8", 8],
                [0, 7, 8, 8],
                [-1, "k", 8, 8],
                [0, "k", 8],
                [0, "k", 8, 8, 8],
            )
        ),
        {"regions": ROWS},
        {"regions": [ROWS[0], ROWS[0]]},
        {"regions": {}},
        {"native": "a b"},
        {"engine": None},
        {"instance": "zz"},
        {"more": 1},
        {"secret": ""},
        {"secret": base64.b64encode(b"short").decode()},
    ],
    ids=range(21),
)
def test_fields_of_an_endpoint_are_checked(change: Json) -> None:
    """Numbers are indices, addresses and lengths; regions are limited and distinct; nothing is missing or more."""
    with pytest.raises(HandshakeError, match="expected an endpoint"):
        Endpoint.from_bytes(endpoint("b", **change))


def test_an_endpoint_has_many_regions() -> None:
    """As many as are taken come back by their index."""
    assert len(Endpoint.from_bytes(endpoint("b", regions=ROWS[:-1])).regions) == MOST_REGIONS
