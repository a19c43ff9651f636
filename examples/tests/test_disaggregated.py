"""Prefill in one process, decode in another: KV comes into the host tier over real engines, and no token differs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, final

import attrs
import pytest
import torch

from batchstate import checks
from batchstate.errors import HandshakeError, TransferError
from batchstate.races.devices import is_tool, open_device, torch_device_of, window_of
from batchstate.transport.connection import TRIES
from batchstate.transport.engines.in_process import Faults, InProcessEngine, Network

pytest.importorskip("transformers")

from examples.disaggregated.__main__ import main
from examples.disaggregated.channel import Channel, ChannelClosedError, Door, Kind, call
from examples.disaggregated.decode import DecodeWorker
from examples.disaggregated.options import AUTHKEY, Options
from examples.disaggregated.prefill import PrefillWorker
from examples.disaggregated.report import Report
from examples.disaggregated.worker import Parts, agreed, requests_of, shared_of
from examples.engine.model import Model
from examples.tests.engine_cases import model_of, right_answers

ROOT = Path(__file__).parents[2]
FIGURES = {
    "transport",
    "requests",
    "tokens",
    "mismatches",
    "violations",
    "page_size",
    "transferred_bytes",
    "seconds",
    "hot_tokens",
    "prefill_degree",
    "leaks",
    "forced_syncs",
    "device_to_host_copies",
    "steps",
    "in_flight_depth_max",
    "retried",
}
NOTHING_WRONG = ("mismatches", "violations", "leaks", "forced_syncs", "device_to_host_copies", "quarantined")
SECRET = "a secret of the tests"
RIGHT = SECRET.encode()


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the commands for their process do not outlive a test."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv(AUTHKEY, SECRET)


# Both workers in one process, on a network with faults


@final
class Both:
    """A decode worker and its prefill workers, turned one after the other. Their clock counts the network's steps."""

    def __init__(
        self,
        device: str,
        options: Options,
        faults: Faults,
        seed: int,
        unheard: frozenset[tuple[str, int]] = frozenset(),
    ) -> None:
        self.unheard = unheard  # attempts whose first token is never told
        self.network = Network(seed)
        workers = 1 + options.prefill_workers
        if is_tool(device):  # which watches one runtime at a time: the workers share it, and its steps
            runtimes = [open_device(device, seed=seed, steps_in_flight=2 * workers)] * workers
        else:
            runtimes = [open_device(device, seed=seed) for _ in range(workers)]
        self.model = model_of("llama", str(runtimes[0].device))
        self.requests = requests_of(options, self.model)
        with contextlib.ExitStack() as windows:
            windows.enter_context(checks(options.checks))
            for runtime in dict.fromkeys(runtimes):
                windows.enter_context(window_of(runtime))
            parts = Parts(runtimes[0], self.model, InProcessEngine(self.network))
            self.decode = DecodeWorker(parts, options, self.requests, clock=lambda: self.network.now)
            self.prefills: list[tuple[PrefillWorker, Channel]] = []
            for rank, runtime in enumerate(runtimes[1:]):
                parts = Parts(runtime, self.model, InProcessEngine(self.network, faults))
                self._add(PrefillWorker(parts, options, rank))
            before = runtimes[0].counters.snapshot()
            end = time.monotonic() + 180  # a GPU that others use too took 60
            while self.busy:
                assert time.monotonic() < end, "the requests are not served"
                self._turn()
            self.cost = runtimes[0].counters - before

    @property
    def busy(self) -> bool:
        """Whether anything is left to do, quarantined memory included."""
        return self.decode.busy or self.decode.quarantined > 0 or any(prefill.busy for prefill, _ in self.prefills)

    def mismatches(self) -> int:
        """Requests whose tokens differ from those of transformers."""
        expected = right_answers(self.model, self.requests)
        return sum(request.output != tokens for request, tokens in zip(self.requests, expected, strict=True))

    def _add(self, prefill: PrefillWorker) -> None:
        ours, theirs = Pipe()
        prefill.sender.accept(self.decode.arrivals.receiver.introduce())
        self.decode.arrivals.connect(Channel(ours, "prefill"), prefill.sender.introduce())
        self.prefills.append((prefill, Channel(theirs, "decode")))

    def _turn(self) -> None:
        self.network.step()
        self.decode.turn()
        for prefill, channel in self.prefills:
            for kind, payload in channel.poll():
                if kind is Kind.TRANSPORT:
                    prefill.sender.on_message(payload, "decode")
                else:
                    prefill.prompt(**Channel.words(payload))
            prefill.turn()
            for words in prefill.words:
                if words.get("first_token") is None or (words["request"], words["attempt"]) not in self.unheard:
                    channel.say(**words)
            for _, message in prefill.sender.outbox:
                channel.send(Kind.TRANSPORT, message)
            prefill.words, prefill.sender.outbox = [], []


def never_by_itself(device: str) -> bool:
    """Whether fences of a device are complete only after a wait; nothing waits for what is staged."""
    return is_tool(device) and device.startswith("race") and "prompt" not in device


@pytest.mark.parametrize(("page_size", "degree", "speculate"), [(1, 2, 0), (16, 1, 0), (64, 2, 0), (1, 2, 3)])
def test_tokens_are_those_of_transformers(device: str, page_size: int, degree: int, speculate: int) -> None:
    """Whatever page, prefill's degree and guesses: requests on both sides of the hot buffer, direct and staged."""
    staged = 0.0 if never_by_itself(device) else 0.3
    options = Options(
        requests=16,
        page_size=page_size,
        prefill_degree=degree,
        speculate=speculate,
        max_running=8,
        checks="full",
        staged=staged,
        seed=2,  # whose answers are cut at their end while guesses are under way
    )
    both = Both(device, options, Faults(delay=2, split=0.5), seed=page_size)
    assert both.mismatches() == 0
    assert both.decode.leaks == 0
    assert [prefill.leaks for prefill, _ in both.prefills] == [0] * degree
    lengths = {len(request.prompt) > options.hot_tokens for request in both.requests}
    assert lengths == {False, True}
    assert (both.decode.mixed_steps > 0) == (staged > 0)
    assert both.decode.in_flight_depth_max == 2
    assert (both.decode.accepted > 0) == (speculate > 0)
    assert both.decode.accepted <= both.decode.drafted
    written = sum(prefill.bytes_written for prefill, _ in both.prefills)
    assert written == both.decode.arrivals.transferred_bytes > 0


def test_two_stages_of_two_ranks_into_a_host_tier_without_pages(device: str) -> None:
    """Each worker sends its heads of its layers; pages of 16 in prefill, of 1 in the host tier, which takes guesses."""
    if is_tool(device):
        pytest.skip("five workers share the runtime of a tool")
    options = Options(
        requests=12,
        prefill_degree=2,
        prefill_stages=2,
        host_page_size=1,
        speculate=3,
        max_running=6,
        checks="full",
        staged=0.1,
    )
    both = Both(device, options, Faults(delay=2, split=0.5), seed=4)
    assert both.mismatches() == 0
    assert both.decode.leaks == 0
    written = [prefill.bytes_written for prefill, _ in both.prefills]
    assert sum(written) == both.decode.arrivals.transferred_bytes > 0
    assert both.decode.accepted > 0
    assert len(written) == 4
    assert min(written) == max(written)


@pytest.mark.parametrize(("landing", "speculate"), [("device", 0), ("mixed", 3)])
def test_requests_that_land_on_the_device(device: str, landing: str, speculate: int) -> None:
    """KV comes into device pages, where some requests stay and others are staged out, and into the host tier."""
    if never_by_itself(device):
        pytest.skip("what is staged is never over there")
    options = Options(
        requests=24, prefill_degree=2, landing=landing, speculate=speculate, max_running=8, checks="full", seed=2
    )
    both = Both(device, options, Faults(delay=2, split=0.5), seed=5)
    assert both.mismatches() == 0
    assert both.decode.leaks == 0
    arrived = both.decode.arrivals.delivered
    assert 0 < both.decode.ordinary < both.decode.landed
    assert (both.decode.landed == arrived) == (landing == "device")
    assert both.decode.mixed_steps > 0
    assert (both.cost.forced_syncs, both.cost.device_to_host_copies) == (0, both.decode.result_copies) or is_tool(
        device
    )


def test_a_first_token_that_is_never_told(device: str) -> None:
    """All KV of a request is there, and its writer has died before it told the token: the request comes again."""
    options = Options(requests=6, max_running=4, checks="full", lease_seconds=60, staged=0.0)
    unheard = frozenset({("request 1", 1), ("request 4", 1), ("request 4", 2)})
    both = Both(device, options, Faults(), seed=0, unheard=unheard)
    assert both.mismatches() == 0
    assert both.decode.arrivals.retried == 3
    assert both.decode.leaks == 0


def test_planning_copies_nothing_from_the_device(device: str) -> None:
    """Each step of the host tier brings its results to the host in one copy; there is no other copy and no wait."""
    if is_tool(device):
        pytest.skip("the workers share the runtime of a tool, and what it counts")
    both = Both(device, Options(requests=12, page_size=16), Faults(), seed=0)
    assert both.cost.forced_syncs == 0
    assert both.cost.device_to_host_copies == both.decode.result_copies > both.decode.steps


@pytest.mark.parametrize(("seed", "landing"), [(0, "host"), (1, "host"), (2, "mixed")])
def test_faults_cost_retries_and_no_tokens(device: str, seed: int, landing: str) -> None:
    """Writes that fail, go on landing, are refused or lose their tags: requests come again, into other memory."""
    if landing != "host" and never_by_itself(device):
        pytest.skip("what is staged is never over there")
    faults = Faults(delay=3, split=0.5, failed=0.1, unknown=0.1, lost_tag=0.05, duplicate_tag=0.2, refused=0.05)
    staged = 0.0 if never_by_itself(device) else 0.1
    options = Options(
        requests=12,
        page_size=16,
        max_running=6,
        checks="full",
        lease_seconds=100,
        prefill_degree=2,
        staged=staged,
        landing=landing,
    )
    both = Both(device, options, faults, seed)
    assert both.mismatches() == 0
    assert both.decode.arrivals.retried > 0
    assert both.decode.quarantined_max > 0
    assert both.decode.leaks == 0
    assert [prefill.leaks for prefill, _ in both.prefills] == [0, 0]


# Processes. But for the first test they have the plain model: four of them import transformers longer than they serve.

WITHOUT_NIXL = ["--transport", "tcp", "--family", "plain"]


def figures_of(path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Runs the command; its figures."""
    file = path / "figures.json"
    assert main([*arguments, "--json", str(file)]) == code
    figures: dict[str, Any] = json.loads(file.read_text())
    assert set(figures) >= FIGURES
    return figures


def test_nixl_between_processes(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One command starts both processes; the table says in plain words that every token is right."""
    pytest.importorskip("nixl")
    nixl = ["--transport", "nixl"]
    figures = figures_of(tmp_path, "--device", torch_device_of(device), *nixl, "--requests", "20")
    assert [figures[name] for name in NOTHING_WRONG] == [0] * len(NOTHING_WRONG)
    assert (figures["transport"], figures["page_size"], figures["in_flight_depth_max"]) == ("nixl", 16, 2)
    assert figures["direct"] + figures["staged"] == 20
    assert figures["transferred_bytes"] > 0
    assert "every token equals that of model.generate" in capsys.readouterr().out


def test_a_killed_prefill_worker_is_followed_by_another(tmp_path: Path, device: str) -> None:
    """SIGKILL to one of two ranks: what it was writing is quarantined, comes again, and no token differs."""
    common = [*WITHOUT_NIXL, "--page-size", "64", "--prefill-degree", "2", "--requests", "24", "--landing", "mixed"]
    arguments = [*common, "--kill-prefill-after", "2"]
    figures = figures_of(tmp_path, "--device", torch_device_of(device), *arguments)
    assert [figures[name] for name in NOTHING_WRONG] == [0] * len(NOTHING_WRONG)
    assert figures["retried"] > 0
    assert figures["quarantined_max"] > 0


@final
@attrs.define
class PrefillRole:
    """`--role prefill` in a process of its own."""

    process: "subprocess.Popen[str]"
    address: str

    @classmethod
    def started(cls, device: str, *arguments: str) -> "PrefillRole":
        """Returns when it listens."""
        command = [sys.executable, "-m", "examples.disaggregated", "--role", "prefill", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(
            [*command, "--device", torch_device_of(device), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return cls(process, process.stdout.readline().strip().removeprefix("listening on "))

    def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def test_two_roles_serve_over_tcp(tmp_path: Path, device: str) -> None:
    """A prefill worker that listens and a decode worker that connects, as on two machines; single-token pages."""
    common = [*WITHOUT_NIXL, "--page-size", "1", "--hot-tokens", "20"]
    role = PrefillRole.started(device, *common)
    decode = ["--role", "decode", "--connect", role.address, "--requests", "12", "--device", torch_device_of(device)]
    try:
        figures = figures_of(tmp_path, *decode, *common)
    finally:
        code, out, err = role.ended()
    assert [figures[name] for name in NOTHING_WRONG] == [0] * len(NOTHING_WRONG)
    assert (code, err) == (0, "")
    assert f"{figures['transferred_bytes']:,} bytes written, 0 leaks" in out


def test_roles_that_do_not_fit_refuse_each_other(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two page sizes: both workers say which, and how to set it right, and return 2. Nothing was written."""
    role = PrefillRole.started(device, *WITHOUT_NIXL, "--page-size", "64")
    decode = ["--role", "decode", "--connect", role.address, "--device", torch_device_of(device)]
    try:
        assert main([*decode, *WITHOUT_NIXL, "--page-size", "16"]) == 2
    finally:
        code, out, err = role.ended()
    assert code == 2
    assert "page_size is 64 here, 16 there" in err
    assert "page_size is 16 here, 64 there" in capsys.readouterr().err
    assert "Traceback" not in err
    assert "bytes" not in out


# Parts


def test_strangers_do_not_come_in() -> None:
    """A caller that does not know the secret is told nothing, and keeps nobody out; the one who knows it comes in."""
    door = Door(("127.0.0.1", 0), RIGHT)
    with pytest.raises(ChannelClosedError, match=f"does not let us in: its {AUTHKEY} is another"):
        call(door.address, b"another secret of the tests", "prefill", 5.0)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(door.address)).sendall(b"GET / HTTP/1.1\r\n\r\n")
        start = time.monotonic()
        channel = call(door.address, RIGHT, "prefill", 5.0)
        assert time.monotonic() - start < 2.0
    end = time.monotonic() + 5
    while (came := door.entered()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    channel.say(prompt=[1, 2])
    kind, payload = Channel(came, "decode").await_one(5.0)
    assert (kind, Channel.words(payload)) == (Kind.WORDS, {"prompt": [1, 2]})
    channel.close()
    with pytest.raises(ChannelClosedError, match="decode is gone"):
        Channel(came, "decode").await_one(5.0)
    came.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door.address)


def test_who_is_not_there_is_waited_for_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens yet: stderr says at once what is waited for and where; in the end the error says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(
        ChannelClosedError, match=r"nothing listens for prefill-0 at 127.0.0.1:.*; start it, or correct"
    ):
        call(address, RIGHT, "prefill-0", 0.2)
    assert capsys.readouterr().err == f"waiting for prefill-0 at 127.0.0.1:{address[1]}\n"


def test_who_hangs_up_is_named() -> None:
    """Another program listens there and hangs up: no reason is left empty."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            for _ in range(TRIES):
                server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ChannelClosedError, match=r"let us in: its .* another, or it is no prefill"):
            call(server.getsockname(), RIGHT, "prefill-0", 5.0)
        thread.join()


def test_workers_started_unlike_each_other_refuse_each_other() -> None:
    """Another seed or family would serve wrong tokens: both sides name each option and both values."""
    model = Model.random("llama", device="cpu")
    ours, theirs = Pipe()
    other = shared_of(Options(seed=1, family="qwen3"), model, 0)
    Channel(theirs, "decode").say(shared=other)
    with pytest.raises(HandshakeError, match=r"^--seed is 0 here, 1 there; --family is llama here, qwen3 there"):
        agreed(Channel(ours, "prefill-0"), shared_of(Options(), model, 0))
    with pytest.raises(HandshakeError, match=r"^--seed is 1 here, 0 there; --family is qwen3 here, llama there"):
        agreed(Channel(theirs, "decode"), other)
    ours.send_bytes(b"Iwho")
    with pytest.raises(ChannelClosedError, match="did not say how it was started"):
        agreed(Channel(theirs, "decode"), other)


def report_with(killed: int, retried: int, kill_prefill_after: int | None) -> Report:
    """A report of a run in which everything is right."""
    right: dict[str, Any] = {field.name: 0 for field in attrs.fields(Report)}
    return Report(
        **right | {"broken": None, "killed": killed, "retried": retried, "kill_prefill_after": kill_prefill_after}
    )


def test_a_kill_that_never_came_is_told() -> None:
    """A run whose kill comes too late, or fails no attempt, has not shown recovery: it is not clean."""
    assert report_with(0, 0, None).clean
    assert report_with(1, 2, 3).clean
    for killed in (0, 3):
        missed = report_with(killed, 0, 3)
        assert not missed.clean
        assert f"{killed} kills of a worker failed 0 attempts, with 0 requests" in str(missed.unkilled)


def test_malformed_messages_are_refused() -> None:
    """Neither an unknown kind nor words that are none are taken, and nothing is unpickled."""
    ours, theirs = Pipe()
    theirs.send_bytes(b"?what")
    with pytest.raises(ChannelClosedError, match="gone"):
        Channel(ours, "decode").poll()
    for payload in (b"[1]", b"{"):
        with pytest.raises(ChannelClosedError, match="no words"):
            Channel.words(payload)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "0"], "expected an integer >= 1, got '0'"),
        (["--hot-tokens", "1"], "expected an integer >= 2, got '1'"),
        (["--transport", "pigeons"], "choose from"),
        (["--role", "prefill"], "needs --listen"),
        (["--role", "decode", "--prefill-degree", "2", "--connect", "localhost:1"], "for each of 2 prefill workers"),
        (["--connect", "localhost"], "not a HOST:PORT"),
        (["--rank", "1"], "go with --role"),
        (["--role", "prefill", "--listen", "localhost:0", "--rank", "1"], "ranks count from 0"),
        (["--role", "prefill", "--listen", "localhost:0", "--kill-prefill-after", "1"], "needs the supervisor"),
    ],
)
def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """An argument that cannot be meant exits with 2, and says which and why."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_roles_need_a_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one no worker listens."""
    monkeypatch.delenv(AUTHKEY)
    with pytest.raises(SystemExit):
        main(["--role", "prefill", "--listen", "127.0.0.1:0"])
    assert f"set {AUTHKEY}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-degree", "3"], "cannot be shared evenly by 3 ranks"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0: "),
        (
            ["--transport", "nixl", "--interface", "lo"],
            "UCX listens on lo with transports cma,posix,tcp{cuda}, and lets every caller",
        ),
        (["--transport", "mooncake"], "and pass --trusted-network; or open"),
        (["--transport", "nixl"], "NIXL cannot be imported: "),
        (["--role", "prefill", "--transport", "tcp", "--listen", "192.0.2.1:0"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    arguments: list[str],
    message: str,
) -> None:
    """Heads that cannot be shared, an address of another machine, an engine that is not installed: one line, and 2."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # a build for CUDA, on a machine with or without a GPU
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setattr(ForkServerProcess, "start", lambda _: pytest.fail("a worker was started"))
    assert main(["--device", torch_device_of(device), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("examples.disaggregated: ")
    assert message.format(cuda=",cuda" if torch.cuda.is_available() else "") in line
    assert "; " in line  # what to do


def descendants(process: int) -> int:
    """Processes that it has started, and those that these have started."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:  # it has ended
        return 0
    return sum(1 + descendants(int(child)) for child in children)


@pytest.mark.skipif(sys.platform != "linux", reason="children are looked up in /proc")
def test_ctrl_c_ends_in_one_line(device: str) -> None:
    """A terminal sends it to every process: one line, exit code 130, no process left behind."""
    options = [*WITHOUT_NIXL, "--requests", "5000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.disaggregated", *options, "--device", torch_device_of(device)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        end = time.monotonic() + 60
        while descendants(process.pid) < 4:  # multiprocessing's tracker and fork server, and the two workers
            assert time.monotonic() < end
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # else its pipes would be a later test's warning
    assert (process.returncode, out, err) == (130, "", "examples.disaggregated: interrupted\n")


def test_heads_that_cannot_be_shared_are_refused(device: str) -> None:
    """Three prefill ranks for two heads: told before anything is opened for transfer."""
    runtime = open_device(device)
    parts = Parts(runtime, Model.random("llama", device=runtime.device), InProcessEngine(Network()))
    with pytest.raises((TransferError, ValueError), match="cannot be shared evenly by 3 ranks"):
        PrefillWorker(parts, Options(prefill_degree=3), 0)
