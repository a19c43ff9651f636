"""An index of one space is used in another."""

import attrs

import batchstate.kv.pages
from batchstate.indices import HostLocations, Pages
from batchstate.kv.pages import Extension
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import Table, TableWrite
from batchstate.violations import Code


@mutant(Code.UNIT_MISMATCH, machine="page_pool", origin="sglang #24039, sglang #14439")
def pages_for_tokens(patch: Patch) -> None:
    """The pool hands out page ids where the request-to-token table takes token positions."""
    patch(batchstate.kv.pages, "Locations", Pages)


@mutant(Code.UNIT_MISMATCH, machine="page_pool", origin="sglang #31482, sglang #31901")
def host_tokens_for_tokens(patch: Patch) -> None:
    """Positions in the host tier are used for the device's KV memory."""
    patch(batchstate.kv.pages, "Locations", HostLocations)


@mutant(Code.SENTINEL_ESCAPED, machine="page_pool", origin="vllm #40768, vllm #48245")
def placeholder_position(patch: Patch) -> None:
    """The position of a first token is computed as that of the last one, -1, and names the last element of a row."""

    def entry(self: Extension, table: Table | None = None) -> TableWrite:
        write: TableWrite = original(attrs.evolve(self, positions=self.positions - 1), table)
        return write

    original = patch(Extension, "entry", entry)
