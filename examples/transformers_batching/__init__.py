"""transformers' continuous batching with its block bookkeeping and input preparation on batchstate.

Written for transformers 5.23. Nothing of it is changed. Three subclasses take the places of its own classes while
`adopted()` is open; its manager, its loop, its model runner and its requests stay what they are. Read it in this order:

    blocks       the cache allocator: requests have slots and pages, and give them back together
    scheduling   the scheduler: a step of the same requests as the step before is not scheduled one by one
    inputs       the inputs of the forward: one plan and one copy a step
    adoption     where the three go in
    comparison   the same requests served by both, and the host time of both
    __main__     `python -m examples.transformers_batching`

Not taken over: models with sliding windows, shared prefixes (they are off), several answers to a prompt,
CUDA graphs and asynchronous batching. Each is refused, or not asked for.
"""
