"""`StepPlanner` and the pools against requests in a dict: each token of each forward is computed again from lists.

A forward writes the ids that it is given into KV memory, reads all KV of its requests through the token table, and
finds the next token from that: one wrong id, position, place, length or row of the table, or a missing wait, ends in
other tokens. Requests join with a prompt, prefilled, or with pages of others; they are chunked, speculate, are
truncated, moved onto cached pages, padded and leave, over two forward streams.

`python -m tests.test_step_model SEED OPERATIONS [DEVICE]` runs one history.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    FutureMap,
    MirroredTensor,
    PagePool,
    PoolExhaustedError,
    PrefixCache,
    Runtime,
    SlotPool,
    StepPlanner,
    checks,
    mirrored,
    relay_field,
    slot_column,
)
from batchstate.races import declared_kernel
from batchstate.races.devices import open_device, window_of

LONGEST, SIZE, NUM_SLOTS, NUM_PAGES = 30, 3, 6, 40
INT32 = ("positions", "slot_mapping", "last_token_indices", "input_ids")


class Exact(Batch):
    """Requests whose lengths the host knows."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    tag = mirrored(torch.int64)
    encoder = mirrored(torch.int32)
    pair = mirrored(torch.int16, shape=(2,))


class Narrow(Exact):
    """The same, in 32 bits."""

    seq_lens = mirrored(torch.int32)


class Bounded(Exact):
    """Requests of which it may know bounds."""

    seq_lens = mirrored(torch.int64, contract="upper_bound")


@attrs.define(eq=False)
class Request:
    """Tokens that are there, `length` of them in KV memory; those from `length` on are put in by the host if `told`."""

    tag: int
    tokens: list[int]
    length: int
    encoder: int
    told: bool
    bound: int = 0  # what the host takes for the length

    @property
    def held(self) -> int:
        return self.bound + self.encoder if self.bound else 0


def token_after(tokens: Sequence[int], encoder: int) -> int:
    """The next token, by all that lies before it."""
    return (sum(token * (at % 7 + 1) for at, token in enumerate(tokens)) + 31 * encoder + len(tokens)) % 997 + 1


def guesses(tokens: Sequence[int], encoder: int, k: int) -> list[int]:
    """Drafts, some of them right."""
    ahead = list(tokens)
    for j in range(k):
        right = token_after(ahead, encoder)
        ahead.append(right if (right + j) % 3 else right % 997 + 1)
    return ahead[len(tokens) :]


class Model:
    """One engine, and what it should be."""

    def __init__(self, seed: int, rt: Runtime) -> None:
        self.rt, self.dice = rt, random.Random(seed)
        dice = self.dice
        self.level = dice.choice(["off", "cheap", "cheap", "full"])
        self.drafts = dice.choice([0, 0, 1, 3])
        self.ragged = self.drafts > 0 and dice.random() < 0.5
        self.bounded = dice.random() < (0.6 if self.drafts else 0.2)
        self.encoders = dice.random() < 0.3
        int32 = [name for name in INT32 if dice.random() < 0.2]
        self.layouts = () if self.encoders or dice.random() < 0.7 else ("flash_attention",)
        self.slots = SlotPool(rt, NUM_SLOTS)
        self.table = self.slots.table("req_to_token", (LONGEST,), torch.int32, holds="location", host=True)
        self.pages = PagePool(rt, self.slots, NUM_PAGES, SIZE, max_tokens_per_request=LONGEST, req_to_token=self.table)
        self.cache = PrefixCache(self.pages) if dice.random() < 0.6 else None
        ids = torch.int32 if "input_ids" in int32 else torch.int64
        fields = {"last": relay_field(ids, non_negative=True)}
        if self.drafts:
            fields["drafts"] = relay_field(ids, (self.drafts,), non_negative=True, ragged=self.ragged)
        self.sent = list(fields)
        if self.bounded:
            fields["lens"] = relay_field(torch.int64, non_negative=True)
            fields["kept"] = relay_field(dice.choice([torch.int32, torch.int64]), read_by="host")
        fields["found"] = relay_field(torch.int64, (self.drafts + 3,), read_by="host")
        self.relay = FutureMap(self.slots, fields)
        self.kind: Any = Bounded if self.bounded else dice.choice([Exact, Narrow])
        self.planner = StepPlanner(
            self.kind,
            pages=self.pages,
            relay=self.relay,
            ids=("last", "drafts") if self.drafts else "last",
            lengths="lens" if self.bounded else None,
            accepted="kept" if self.bounded else None,
            results=("found", "kept") if self.bounded else ("found",),
            int32=int32,
            kv_offset="encoder" if self.encoders else None,
            layouts=self.layouts,
        )
        self.streams = [rt.stream("one"), rt.stream("two")][: dice.choice([1, 2])]
        self.plans = dice.choice([None, rt.stream("plans")])
        self.kv = [rt.device_zeros((SIZE,), torch.int64, name=f"page {i}") for i in range(NUM_PAGES + 1)]
        self.batch: Any = self.kind.empty(rt)
        self.running: list[Request] = []  # as the rows of the batch
        self.leases: list[tuple[Any, list[int], int]] = []  # with the tokens and the encoder of their pages
        self.results: list[tuple[Any, list[list[int]]]] = []
        self.moved: set[int] = set()  # tags of those whose rows of the table are to be written anew
        self.done: Any = None
        self.ended: list[list[Any]] = []  # fences behind what steps have launched
        self.drawn = self.steps = 0

    # Parts of histories

    def act(self) -> None:
        acts: list[Any] = [self.step] * 8 + [self.leave, self.reorder, self.grow, self.read, self.read, self.settle]
        acts += [self.hold, self.drop, self.truncate, self.rebase, self.tell, self.tighten]
        self.dice.choice(acts)()
        with checks("full") if self.dice.random() < 0.2 else checks(self.level):
            self.check()

    def tell(self) -> None:
        """A request whose pages lie in a batch of its own joins by a merge."""
        req = self.drawn_request(self.dice.randrange(1, 6))
        if self.slots.stats.free and len(self.running) < NUM_SLOTS:
            self.batch = self.batch.merge(self.built(self.slots.take(1), [req]))
            self.running.append(req)

    def drawn_request(self, length: int, *, prefix: Sequence[int] = (), encoder: int | None = None) -> Request:
        """A request with a prompt, of which nothing is in its pages."""
        self.drawn += 1
        tokens = [*prefix, *((self.drawn * 37 + at * 11) % 997 + 1 for at in range(length))]
        if self.dice.random() < 0.5:  # prompts that others have too
            tokens = [*prefix, *(at * 5 + 1 for at in range(length))]
        if encoder is None:
            encoder = self.dice.choice([0, 2, 4]) if self.encoders else 0
        return Request(self.drawn, tokens, 0, encoder, True)

    def columns(self, requests: Sequence[Request]) -> dict[str, Any]:
        tags = np.array([req.tag for req in requests], dtype=np.int64)
        return {
            "seq_lens": np.array([req.length for req in requests]),
            "tag": tags,
            "encoder": np.array([req.encoder for req in requests], dtype=np.int32),
            "pair": np.stack([tags, -tags], axis=1).astype(np.int16),
        }

    def built(self, slots: Any, requests: Sequence[Request]) -> Any:
        return self.kind.build(self.rt, slots=slots, **self.columns(requests))

    def joining(self) -> tuple[list[Request], Any, dict[str, Any] | None]:
        """Requests that join with the next step: columns, and the values that they start from."""
        free = min(NUM_SLOTS - len(self.running), self.slots.stats.free)
        if not free or self.dice.random() < 0.5:
            return [], None, None
        how = self.dice.choice(["prompts", "prefilled", "shared", "cached"])
        if how == "shared" or (how == "cached" and self.cache is not None):
            return self.beginning(how)
        requests = [self.drawn_request(self.dice.randrange(1, 8)) for _ in range(self.dice.randrange(1, free + 1))]
        if how == "prompts":
            return requests, self.columns(requests), None
        for req in requests:
            req.length = req.bound = len(req.tokens)
            req.tokens.append(token_after(req.tokens, req.encoder))
            req.told = False
        try:
            slots = self.pages.take_requests([req.held for req in requests])
        except PoolExhaustedError:
            return [], None, None
        self.fill(slots, requests)
        return requests, {"slots": slots, **self.columns(requests)}, self.first(requests)

    def first(self, requests: Sequence[Request]) -> dict[str, Any]:
        first: dict[str, Any] = {"last": [req.tokens[-1] for req in requests]}
        if self.drafts:
            first["drafts"] = np.array([guesses(req.tokens, req.encoder, self.drafts) for req in requests])
        return first | ({"lens": [req.length for req in requests]} if self.bounded else {})

    def beginning(self, how: str) -> tuple[list[Request], Any, None]:
        """A request that begins with pages of another, or of the cache."""
        if how == "shared":
            sources = [(self.batch.slots.filter([row]), req.tokens, req.encoder) for row, req in self.settled()]
            sources += self.leases
            if not sources:
                return [], None, None
            source, tokens, encoder = self.dice.choice(sources)
            there = source.tokens if hasattr(source, "tokens") else int(self.pages.committed(source)[0])
            n = there // SIZE * SIZE
        else:
            tokens = [at * 5 + 1 for at in range(12)]
            encoder = self.dice.choice([0, 2, 4]) if self.encoders else 0
            source = self.cache.match(self.keys(tokens, encoder, 3))  # type: ignore[union-attr]
            n = source.tokens
        if n <= encoder:
            if how == "cached":
                source.release(after=None)
            return [], None, None
        slots = self.slots.take(1)
        self.pages.share(source, slots, n)
        if how == "cached":
            source.release(after=None)
        req = self.drawn_request(self.dice.randrange(1, 6), prefix=tokens[: n - encoder], encoder=encoder)
        req.length = req.bound = n - encoder
        return [req], {"slots": slots, **self.columns([req])}, None

    def settled(self) -> list[tuple[int, Request]]:
        """Requests with KV, whose length the host knows: none of their guesses was rejected."""
        rows = [row for row, req in enumerate(self.running) if 0 < req.length == req.bound and self.done is not None]
        if rows:
            held = [self.running[row].held for row in rows]
            self.pages.accept(self.batch.slots.filter(rows), held)
        return [(row, self.running[row]) for row in rows]

    def keys(self, tokens: Sequence[int], encoder: int, most: int) -> list[Any]:
        """A key of each page."""
        ends = [SIZE * (i + 1) - encoder for i in range(most)]
        return [(encoder, *tokens[: max(0, end)], end) for end in ends]

    def fill(self, slots: Any, requests: Sequence[Request]) -> None:
        """KV that arrived from elsewhere."""
        for row, req in enumerate(requests):
            pages = self.pages.page_table[int(slots.np[row])].tolist()
            values = [*(500 + i for i in range(req.encoder)), *req.tokens[: req.length]]
            for i in range(0, len(values), SIZE):
                part = self.rt.upload([np.array(values[i : i + SIZE])]).view(0)
                target = self.kv[pages[i // SIZE]]
                self.rt.launch(_put, target, part, reads=(part,), writes=(target,), name="arrive")

    # The forward

    def queries(self, requests: Sequence[Request]) -> list[int]:
        """Tokens that each puts in."""
        numbers = []
        for req in requests:
            if req.told:
                numbers.append(self.dice.randrange(0, len(req.tokens) - req.length + 1))
            else:
                numbers.append(1 + (self.dice.randrange(self.drafts + 1) if self.ragged else self.drafts))
            if not req.told and self.dice.random() < 0.1:
                numbers[-1] = 0
        return numbers

    def step(self) -> None:
        """Some leave, others come, and all put in what they have."""
        dice, rt = self.dice, self.rt
        new, joining, published = self.joining()
        leaves = {row for row in range(len(self.running)) if dice.random() < 0.08}
        stays = [row for row in range(len(self.running)) if row not in leaves]
        requests = [self.running[row] for row in stays] + new
        if any(req.held + 2 + self.drafts > LONGEST for req in requests):
            if new and joining is not None and "slots" in joining:
                self.pages.release_requests(joining["slots"], after=rt.record())
            return self.settle() if any(req.bound != req.length for req in requests) else self.leave(most=LONGEST)
        queries = self.queries(requests)
        rooms = [LONGEST - (req.held or req.encoder) for req in requests]
        queries = [min(n, room) for n, room in zip(queries, rooms, strict=True)]
        ends = [not req.told or req.length + n == len(req.tokens) for req, n in zip(requests, queries, strict=True)]
        samples = [end and n > 0 for end, n in zip(ends, queries, strict=True)]
        prompts: Any = [
            req.tokens[req.length : req.length + n] if req.told else None
            for req, n in zip(requests, queries, strict=True)
        ]
        options: dict[str, Any] = {"query_lens": np.array(queries, dtype=np.int64), "samples": np.array(samples, bool)}
        if any(req.told for req in requests):
            options["prompt_ids"] = prompts
        if leaves or dice.random() < 0.2:
            options |= {"keep": stays, "after": self.done}
        if new:
            options |= {"joining": joining, "published": published}
        if dice.random() < 0.3:
            options["pad_rows"] = len(requests) + dice.randrange(3)
            options["pad_tokens"] = sum(queries) + dice.randrange(4)
        if dice.random() < 0.3:
            options["extras"] = {"salt": np.arange(self.steps, self.steps + 3)}
        if len(self.results) >= 2:
            self.read()
        self.ended.append([rt.record()] if self.done is None else [rt.record(), self.done])
        if len(self.ended) > 1:
            for fence in self.ended.pop(0):
                fence.wait()
        rt.next_step()
        moved = [row for row in stays if self.running[row].tag in self.moved]
        writes = [self.pages.entry(self.batch.slots.filter(moved))] if moved else []
        with rt.use(self.plans or rt.current_stream):
            try:
                step = self.planner.plan(self.batch, writes=writes, **options)
            except PoolExhaustedError:
                if new and "slots" in joining:
                    self.pages.release_requests(joining["slots"], after=rt.record())
                while self.results:
                    self.read()
                return None
        self.steps += 1
        self.moved.clear()
        with rt.use(dice.choice(self.streams)):
            self.forward(step, requests, queries, samples, options)
        self.batch, self.running = self.batch_after, requests
        return None

    def forward(
        self, step: Any, requests: list[Request], queries: list[int], samples: list[bool], options: dict[str, Any]
    ) -> None:
        """Runs a step, and says what it should have found."""
        rt, k = self.rt, self.drafts
        inputs = step.inputs()
        if "extras" in options:
            assert rt.inspect(step.extras["salt"]).tolist() == options["extras"]["salt"].tolist()
        fed = [not req.told and n > 0 for req, n in zip(requests, queries, strict=True)]
        slots = step.batch.slots.np.tolist()
        pages = sorted({int(page) for slot in slots for page in self.pages.page_table[slot] if page})
        device = {page: self.kv[page] for page in pages}
        ends = [req.bound + n for req, n in zip(requests, queries, strict=True)]
        held = [end + req.encoder if end else 0 for req, end in zip(requests, ends, strict=True)]
        table = self.table.device_for(step.batch.slots.filter(np.array(held, dtype=np.int64) > 0)).view(-1)
        places = [slot * LONGEST + np.arange(n) for slot, n in zip(slots, held, strict=True)]
        index = rt.upload([np.concatenate([np.zeros(0, np.int64), *places])]).view(0)
        table = table.index_select(0, index)
        encoders = [req.encoder if self.encoders else 0 for req in requests]
        rows, tokens = (inputs.slots, inputs.query_start_loc, inputs.kv_lens), (inputs.positions, inputs.slot_mapping)
        arrays = *rows, *tokens, inputs.input_ids, step.batch.seq_lens.device
        ids = self.relay.fields["last"].dtype
        reads = (table, *arrays, *device.values())
        n, wide = sum(samples), torch.int64
        kept = self.relay.fields["kept"].dtype if self.bounded else wide
        made = [((n,), ids), ((n, k), ids), ((n,), kept), ((n, k + 3), wide), ((len(requests),), wide)]
        out = [rt.device_zeros(shape, dtype, name=f"output {i}") for i, (shape, dtype) in enumerate(made)]
        kernel = list(device.values()), list(device), table, held, arrays, encoders, fed, samples, out
        rt.launch(_forward, *kernel, reads=reads, writes=(*device.values(), *out), name="forward")
        values = dict(zip(("last", "drafts", "kept", "found"), out, strict=False))
        lens = out[4]
        if any(samples):
            if self.bounded:
                true = rt.inspect(step.accept(values["kept"]))
                assert true.tolist() == rt.inspect(values["found"])[:, 0].tolist()
            step.publish(**{name: values[name] for name in (*self.sent, "found")})
        if self.layouts and step.plan.num_reqs:
            blocks = rt.inspect(inputs.block_table).tolist()
            for row, slot in enumerate(slots):
                n = -(-int(step.batch.seq_lens.np[row]) // SIZE)
                if step.batch.seq_lens.contract.value == "exact" and n <= len(blocks[row]):
                    assert blocks[row][:n] == self.pages.page_table[slot][:n].tolist()
        self.done = rt.record()
        self.table.read_until(self.done)
        self.batch_after = step.batch
        expected = []
        for req, n, samples_too, is_fed in zip(requests, queries, samples, fed, strict=True):
            put_in = [req.tokens[-1], *guesses(req.tokens, req.encoder, k)][:n] if is_fed else []
            req.bound += n
            if req.told:
                req.length += n
                if samples_too:
                    req.tokens.append(token_after(req.tokens, req.encoder))
                    req.told = False
                    expected.append([req.length, 1, req.tokens[-1]])
            elif is_fed:
                start = len(req.tokens)
                for draft in put_in[1:]:
                    if draft != token_after(req.tokens, req.encoder):
                        break
                    req.tokens.append(draft)
                req.tokens.append(token_after(req.tokens, req.encoder))
                req.length = len(req.tokens) - 1
                expected.append([req.length, len(req.tokens) - start, *req.tokens[start:]])
        if any(samples):
            self.results.append((step.results, expected))
        guessed = any(is_fed and n > 1 for is_fed, n in zip(fed, queries, strict=True))
        if self.bounded and (guessed or any(req.bound != req.length for req in requests)):
            bounds = [req.bound for req in requests]
            column = MirroredTensor.from_pair(rt, bounds, lens, contract="upper_bound", name="seq_lens")
            self.batch_after = self.batch_after.replace(seq_lens=column)
        elif any(req.bound != req.length for req in requests):  # the host waits for what was accepted
            self.running, self.batch = requests, self.batch_after
            self.settle()
            self.batch_after = self.batch

    # Other calls

    def read(self) -> None:
        if self.results:
            results, expected = self.results.pop(0)
            found = [row[: 2 + row[1]] for row in results["found"].np.tolist()]
            assert found == expected

    def settle(self) -> None:
        """The host reads what was found, and knows the lengths."""
        while self.results:
            self.read()
        if all(req.bound == req.length for req in self.running):
            return
        for req in self.running:
            req.bound = req.length
        slots = self.batch.slots
        self.pages.truncate(slots, [req.held for req in self.running], after=self.done)
        self.batch = self.batch.replace(seq_lens=[req.length for req in self.running])

    def tighten(self) -> None:
        """Bounds come down to what the host has read by now."""
        if self.bounded and self.running and not self.results and any(req.bound != req.length for req in self.running):
            bounds = [self.dice.choice([req.length, req.bound]) for req in self.running]
            for req, bound in zip(self.running, bounds, strict=True):
                req.bound = bound
            self.pages.truncate(self.batch.slots, [req.held for req in self.running], after=self.done)
            self.batch = self.batch.tighten("seq_lens", np.array(bounds), slots=self.batch.slots)

    def leave(self, most: int = 0) -> None:
        rows = [row for row, req in enumerate(self.running) if req.held + 2 + self.drafts > LONGEST] if most else []
        if not rows and self.running:
            rows = [self.dice.randrange(len(self.running))]
        keep = [row for row in range(len(self.running)) if row not in rows]
        self.pages.release_requests(self.batch.filter(rows).slots, after=self.done)
        self.batch, self.running = self.batch.filter(keep), [self.running[row] for row in keep]

    def reorder(self) -> None:
        order = list(range(len(self.running)))
        self.dice.shuffle(order)
        self.batch, self.running = self.batch.filter(order), [self.running[row] for row in order]

    def grow(self) -> None:
        """Pages before they are needed."""
        if self.running:
            row = self.dice.randrange(len(self.running))
            req = self.running[row]
            try:
                self.pages.grow(self.batch.slots.filter([row]), min(LONGEST, req.held + self.dice.randrange(9)))
            except PoolExhaustedError:
                return

    def hold(self) -> None:
        """A lease on a prefix, or keys for it."""
        rows = self.settled()
        if not rows:
            return
        row, req = self.dice.choice(rows)
        slots, n = self.batch.slots.filter([row]), req.held // SIZE
        if n and self.cache is not None and self.dice.random() < 0.6:
            self.cache.insert(slots, self.keys(req.tokens, req.encoder, n))
        elif n:
            self.leases.append((self.pages.hold(slots, n * SIZE), list(req.tokens), req.encoder))

    def drop(self) -> None:
        if self.leases:
            self.leases.pop(self.dice.randrange(len(self.leases)))[0].release(after=self.done)
        if self.cache is not None and self.dice.random() < 0.3:
            self.cache.evict(self.dice.randrange(3))

    def truncate(self) -> None:
        """Tokens are taken back, and put in again by the host."""
        self.settle()
        rows = [(row, req) for row, req in self.settled() if not req.told]
        if not rows:
            return
        row, req = self.dice.choice(rows)
        slots = self.batch.slots.filter([row])
        shared = 0  # pages that others hold stay whole
        for i, page in enumerate(self.pages.page_table[int(slots.np[0])].tolist()):
            if page and int(self.pages._rows.arrays["holders"][page]) > 1:
                shared = SIZE * (i + 1)
        least = max(0, shared - req.encoder, 1)
        if self.cache is not None or least >= req.length:
            return
        req.length = req.bound = self.dice.randrange(least, req.length)
        req.told = True
        self.pages.truncate(slots, req.held, after=self.done)
        self.relay.discard(slots)
        self.batch = self.batch.replace(seq_lens=[one.length for one in self.running])

    def rebase(self) -> None:
        """A request moves onto the cached pages of another with the same tokens."""
        rows = self.settled()
        if self.cache is None or not rows:
            return
        row, req = self.dice.choice(rows)
        slots, keys = self.batch.slots.filter([row]), self.keys(req.tokens, req.encoder, req.held // SIZE)
        if keys and self.cache.insert(slots, keys):
            hit = self.cache.match(keys)
            moved = self.pages.rebase(slots, hit, hit.tokens, after=self.done)
            hit.release(after=None)
            pages = self.pages.page_table[int(slots.np[0])][: hit.tokens // SIZE]
            assert moved.locations.np.tolist()[::SIZE] == (pages * SIZE).tolist()
            self.moved.add(req.tag)

    def check(self) -> None:
        """What the host sees."""
        batch = self.batch
        assert batch.tag.np.tolist() == [req.tag for req in self.running]
        assert batch.pair.np.tolist() == [[req.tag, -req.tag] for req in self.running]
        assert batch.seq_lens.np.tolist() == [req.bound for req in self.running]
        assert self.pages.committed(batch.slots).tolist() == [req.held for req in self.running]
        if self.dice.random() < 0.3:
            assert self.rt.inspect(batch.tag.device).tolist() == batch.tag.np.tolist()
            assert self.rt.inspect(batch.slots.device).tolist() == batch.slots.np.tolist()
        self.slots.verify()
        self.pages.verify()
        self.relay.check()

    def end(self) -> None:
        """Everything is given back."""
        self.settle()
        self.pages.release_requests(self.batch.slots, after=self.done)
        for lease, _tokens, _encoder in self.leases:
            lease.release(after=self.done)
        self.rt.synchronize()
        self.slots.expect_idle()
        self.pages.expect_idle()


@declared_kernel(reads=["part"], writes=["target"])
def _put(target: torch.Tensor, part: torch.Tensor) -> None:
    target[: part.numel()] = part


@declared_kernel(reads=["pages", "table", "arrays"], writes=["pages", "out"])
def _forward(
    pages: Sequence[torch.Tensor],
    numbers: Sequence[int],
    table: torch.Tensor,
    held: Sequence[int],
    arrays: Sequence[torch.Tensor],
    encoders: Sequence[int],
    fed: Sequence[bool],
    samples: Sequence[bool],
    out: Sequence[torch.Tensor],
) -> None:
    k, kv = out[1].shape[1], dict(zip(numbers, pages, strict=True))
    _slots, starts, lens, positions, mapping, ids, column = (array.tolist() for array in arrays)
    last, drafts, kept, found, every = [], [], [], [], []
    rows = np.split(np.array(table.tolist(), dtype=np.int64), np.cumsum(held)[:-1])
    for row, encoder in enumerate(encoders):
        start, stop, places = starts[row], starts[row + 1], rows[row].tolist()
        assert positions[start:stop] == list(range(lens[row] - stop + start, lens[row]))
        if start < stop and positions[start] == 0:
            for i in range(encoder):
                kv[places[i] // SIZE][places[i] % SIZE] = 500 + i
        for t in range(start, stop):
            assert mapping[t] == places[encoder + positions[t]], "the table and the slot mapping differ"
            kv[mapping[t] // SIZE][mapping[t] % SIZE] = ids[t]
        length = lens[row]
        if start == stop:
            every.append(column[row])  # one that pauses, whose length no forward has corrected
            continue
        there = [int(kv[place // SIZE][place % SIZE]) for place in places[: encoder + length]]
        assert there[:encoder] == [500 + i for i in range(encoder)]
        tokens = there[encoder:]
        if samples[row]:
            accepted = 0
            if fed[row]:
                before = length - (stop - start) + 1
                while before + accepted < length:
                    if tokens[before + accepted] != token_after(tokens[: before + accepted], encoder):
                        break
                    accepted += 1
                length = before + accepted
            begin = length - accepted if fed[row] else length
            tokens = [*tokens[:length], token_after(tokens[:length], encoder)]
            last.append(tokens[-1])
            drafts.append(guesses(tokens, encoder, k))
            kept.append(length - lens[row] + stop - start)
            new = tokens[begin:]
            found.append([length, len(new), *new, *[0] * k][: k + 3])
        every.append(length)
    for target, values in zip(out, (last, drafts, kept, found, every), strict=True):
        target.copy_(torch.tensor(values, dtype=target.dtype).reshape(target.shape))


def history(seed: int, operations: int, device: str) -> int:
    """Runs one; the steps that it had."""
    with window_of(open_device(device, seed=seed)) as rt:
        model = Model(seed, rt)
        with checks(model.level):
            for _ in range(operations):
                model.act()
            model.end()
    return model.steps


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_a_history(seed: int, device: str) -> None:
    """Nothing differs from the lists."""
    assert history(seed, 60, device)


if __name__ == "__main__":
    seed, operations, *rest = sys.argv[1:]
    print(history(int(seed), int(operations), *(rest or ["cpu"])), "steps")
