"""Options of an engine."""

import attrs
from attrs.validators import ge


@attrs.frozen
class EngineSettings:
    """Sizes and modes.

    Attributes:
        max_running: requests in the batch at most.
        num_pages, page_size: KV memory; at least enough for one request of `max_tokens_per_request`.
        max_tokens_per_request: longest prompt with its answer.
        max_tokens_per_step: tokens of one step: decodes first, then chunks of prompts.
        overlap: plan and launch step N + 1 before the results of step N are read.
        mixed: let chunks of prompts and decodes share a step; else prompts go first, alone.
        num_drafts: tokens guessed by prompt lookup and verified in each decode; 0 for plain decoding.
    """

    max_running: int = attrs.field(default=32, validator=ge(1))
    num_pages: int = attrs.field(default=256, validator=ge(1))
    page_size: int = attrs.field(default=16, validator=ge(1))
    max_tokens_per_request: int = attrs.field(default=512, validator=ge(2))
    max_tokens_per_step: int = attrs.field(default=128, validator=ge(1))
    overlap: bool = True
    mixed: bool = True
    num_drafts: int = attrs.field(default=0, validator=ge(0))

    @property
    def decode_len(self) -> int:
        """Tokens scheduled for a decoding request: its last one and the drafts."""
        return 1 + self.num_drafts

    @property
    def row_width(self) -> int:
        """Positions of a request in the token table: what it may have, and what two steps in flight may overshoot."""
        return self.max_tokens_per_request + 3 * self.decode_len
