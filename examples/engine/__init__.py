"""A small continuous-batching engine whose batch state is batchstate and nothing else.

It serves a causal language model of transformers over paged KV memory, overlapped or not, with chunked prefill,
speculation by prompt lookup, retraction, aborts and requests that arrive prebuilt, and its greedy tokens are those of
`model.generate`. Without transformers it serves a plain model of torch's. Read it in this order:

    request     what a client asked for, and the check of it
    batch       the columns of the running requests, and a step on its way
    scheduler   the host's part: who runs, with how many tokens each
    forward     the device's part: inputs, model, publish, prefetch
    engine      the loop that ties both, one step ahead or not
    attention, model, plain, drafting   what runs on the device
    reference, serving           the comparison with transformers, and `python -m examples.engine`
"""
