"""Backward passes: each node runs on the stream of its forward, as torch's engine for CUDA has it.

On a CPU the engine knows no streams. Nodes are numbered in the order in which a thread has made them, so the numbers at
which its current stream has changed tell the stream of each. As torch documents for CUDA: a node comes behind those
that it gets gradients from, and what follows the pass behind all nodes that have left a gradient.
"""

import bisect
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.autograd.graph import get_gradient_edge

_OF_LEAF = (1 << 64) - 1
"""Sequence number of the nodes that add to a leaf: they are made on the stream of the leaf's first use."""


@final
class Turns:
    """The streams that were current in a thread: by the number of the first node that each may have made."""

    def __init__(self) -> None:
        self._from: list[int] = [0]
        self._streams: list[int] = [0]

    def turned(self, stream: int) -> None:
        """A stream is current from here on."""
        now = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self._from[-1] == now:
            self._streams[-1] = stream
        elif self._streams[-1] != stream:
            self._from.append(now)
            self._streams.append(stream)

    def stream_of(self, node: int) -> int:
        """The stream that was current when a node was made."""
        return self._streams[bisect.bisect_right(self._from, node) - 1]


@final
class _Pass:
    """One backward pass, of nodes on several streams."""

    def __init__(self, rt: Any, roots: list[Any], streams: dict[Any, int]) -> None:
        self._rt, self._streams, self.ambient = rt, streams, rt.current_id
        self._behind: dict[
            Any, list[tuple[int, Any]]
        ] = {}  # node -> streams it comes behind; None: all they have by then
        self._gradients: set[tuple[Any, int]] = set()  # that were left for a node, by its input
        start = self._fence(self.ambient)
        for root in roots:
            self._behind.setdefault(root, []).append((self.ambient, start))

    def _fence(self, stream: int) -> Any:
        return self._rt._recorded(self._rt._by_number[stream], "the backward pass")

    def _keep(self, gradient: Any, stream: int) -> None:
        if isinstance(gradient, torch.Tensor) and gradient.is_cuda:
            self._rt.keep_for(gradient, stream)  # as torch's engine does

    def enter(self, node: Any, gradients: Any = ()) -> None:
        """A node, or a hook of its gradient, is about to run."""
        stream = self._streams.get(node)
        if stream is not None:
            for other, fence in self._behind.pop(node, ()):
                if other != stream:
                    self._rt.wait(fence or self._fence(other), stream=self._rt._by_number[stream])
            self._rt.set_current(stream)
            for gradient in gradients:
                self._keep(gradient, stream)

    def leave(self, node: Any, gradients: Any) -> None:
        """A node has run. A second gradient for an input is then added to the first, on the stream of who gets it."""
        stream = self._streams[node]
        fence, twice = self._fence(stream), []
        for (following, at), gradient in zip(node.next_functions, gradients, strict=False):
            if following is not None and gradient is not None:
                self._behind.setdefault(following, []).append((stream, fence))
                self._keep(gradient, self._streams.get(following, stream))
                if (following, at) in self._gradients:
                    twice.append(following)
                self._gradients.add((following, at))
        self._rt.set_current(self.ambient)
        for following in twice:
            self.enter(following)
        for following in twice:
            self._behind[following] = [(self._rt.current_id, None)]

    def end(self, of_leaves: bool) -> None:
        """Later work comes behind the nodes that have left a gradient."""
        left = {stream for node, stream in self._streams.items() if not of_leaves or node._sequence_nr() == _OF_LEAF}
        for stream in sorted(left - {self.ambient}):
            self._rt.wait(self._fence(stream), stream=self._rt._by_number[self.ambient])
        self._rt.set_current(self.ambient)


@final
class StreamedEngine:
    """Torch's engine, with the streams of `rt`; in its place at `Variable._execution_engine`."""

    def __init__(self, engine: Any, rt: Any) -> None:
        self._engine, self._rt = engine, rt
        self._passes: list[_Pass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass; the arguments are torch's, `accumulate_grad` among them."""
        roots = [get_gradient_edge(root).node if isinstance(root, torch.Tensor) else root.node for root in outputs]
        streams = self._streams_of(roots)
        if self._rt.tracer.ended or set(streams.values()) <= {self._rt.current_id}:
            return self._engine.run_backward(outputs, *args, **kwargs)
        now = _Pass(self._rt, roots, streams)
        hooks = []
        for node in streams:
            hooks.append(node.register_prehook(lambda gradients, node=node: now.enter(node, gradients)))
            hooks.append(node.register_hook(lambda gradients, *_, node=node: now.leave(node, gradients)))
        self._passes.append(now)
        try:
            result = self._engine.run_backward(outputs, *args, **kwargs)
            now.end(bool(kwargs.get("accumulate_grad", False)))
        finally:
            self._passes.remove(now)
            self._rt.set_current(now.ambient)
            for hook in hooks:
                hook.remove()
        return result

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """A callback at the end of the pass, which comes behind all gradients."""

        def behind() -> None:
            if self._passes:
                self._passes[-1].end(of_leaves=False)
            callback()

        self._engine.queue_callback(behind)

    def on_stream_of(self, tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A hook of a tensor's gradient, which runs before its node does."""
        node = get_gradient_edge(tensor).node

        def hooked(gradient: Any) -> Any:
            if self._passes:
                self._passes[-1].enter(node)
            return hook(gradient)

        return hooked

    def _streams_of(self, roots: list[Any]) -> dict[Any, int]:
        """All nodes of a pass, each with its stream."""
        turns: Turns = self._rt.entered.turns
        streams: dict[Any, int] = {}
        for node in sorted(_reached(roots), key=lambda node: int(node._sequence_nr())):
            if node._sequence_nr() != _OF_LEAF:
                streams[node] = turns.stream_of(node._sequence_nr())
                for leaf, _ in node.next_functions:
                    if leaf is not None and leaf._sequence_nr() == _OF_LEAF:
                        streams.setdefault(leaf, streams[node])
        return streams


def _reached(roots: list[Any]) -> Iterator[Any]:
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
