"""A model whose text says whether the state of an engine was right; begin with `hunt`.

Integers in place of weights: an entry of KV memory is a hash of the history behind it, and the next token a hash of all
that the forward was pointed at. The right text of each request is known from its prompt alone, and no rounding excuses
another one. Only `driver` needs hypothesis (extra `testing`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate.testing.exact.driver import ExactReport as ExactReport
    from batchstate.testing.exact.driver import drawn as drawn
    from batchstate.testing.exact.driver import hunt as hunt
    from batchstate.testing.exact.history import Adapter as Adapter
    from batchstate.testing.exact.history import AdapterError as AdapterError
    from batchstate.testing.exact.history import Arrival as Arrival
    from batchstate.testing.exact.history import EngineUnderTest as EngineUnderTest
    from batchstate.testing.exact.history import History as History
    from batchstate.testing.exact.history import Outcome as Outcome
    from batchstate.testing.exact.history import Request as Request
    from batchstate.testing.exact.history import Wave as Wave
    from batchstate.testing.exact.history import play as play
    from batchstate.testing.exact.model import Cache as Cache
    from batchstate.testing.exact.model import ExactModel as ExactModel
    from batchstate.testing.exact.model import Read as Read
    from batchstate.testing.exact.packed import PackedCache as PackedCache
    from batchstate.testing.exact.packed import PagedMemory as PagedMemory
    from batchstate.testing.exact.reduce import Shrunk as Shrunk
    from batchstate.testing.exact.reduce import reduced as reduced
    from batchstate.testing.exact.text import ExactSpec as ExactSpec
    from batchstate.testing.exact.text import Oracle as Oracle
    from batchstate.testing.exact.verify import Verifier as Verifier
    from batchstate.testing.exact.verify import WrongRead as WrongRead
else:
    from batchstate._lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "driver": "ExactReport drawn hunt",
            "history": "Adapter AdapterError Arrival EngineUnderTest History Outcome Request Wave play",
            "model": "Cache ExactModel Read",
            "packed": "PackedCache PagedMemory",
            "reduce": "Shrunk reduced",
            "text": "ExactSpec Oracle",
            "verify": "Verifier WrongRead",
        },
        needs="hypothesis",
        extra="testing",
    )
