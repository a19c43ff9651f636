"""A small engine that overlaps, on several streams: the machine that races are looked for with.

Read it in this order:

    requests, model     what a request is, and what its tokens should be
    memory              pools, tables, KV, relay and streams of one example
    choices             how one step is run
    schedule, arrivals  the host's part: who runs, and how a request begins
    forward             the device's part
    engine, steps       the loop, and what is in flight
    audit               a stream that only looks
    machine             the rules
"""

from batchstate.testing.machines.overlap.machine import OverlapMachine

__all__ = ["OverlapMachine"]
