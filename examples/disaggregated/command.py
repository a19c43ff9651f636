"""The command line: what is asked for, checked before anything is started, and what each role then does."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from batchstate.levels import Level
from examples import console as common
from examples.disaggregated.options import AUTHKEY, LANDINGS, TRANSPORTS

if TYPE_CHECKING:
    from examples.disaggregated.options import Options

Address = tuple[str, int]


def run(arguments: list[str] | None = None) -> int:
    """Serves, prints the table, and returns 0 if every token is right and nothing was found broken."""
    parser = _parser()
    args = parser.parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if args.role == "prefill" and (args.listen is None or args.connect):
        parser.error("--role prefill needs --listen HOST:PORT, and takes no --connect")
    workers = args.prefill_degree * args.prefill_stages
    if args.role == "decode" and len(args.connect) != workers:
        parser.error(f"--role decode needs --connect HOST:PORT for each of {workers} prefill workers")
    if args.role is None and (args.listen or args.connect or args.rank):
        parser.error("--listen, --connect and --rank go with --role")
    if not 0 <= args.rank < workers:
        parser.error(f"--rank {args.rank} of {workers}: ranks count from 0, stage by stage")
    if args.kill_prefill_after is not None and args.role is not None:
        parser.error("--kill-prefill-after needs the supervisor, which starts both processes: leave --role out")
    authkey = os.environ.get(AUTHKEY, "").encode()
    if args.role is not None and not authkey:
        parser.error(f"set {AUTHKEY} to a secret, the same for both workers")

    import torch

    from batchstate import BatchStateError
    from examples.disaggregated.arrivals import WriterFailedError
    from examples.disaggregated.channel import ChannelClosedError
    from examples.disaggregated.options import Options
    from examples.disaggregated.report import report_of, show_report
    from examples.disaggregated.supervisor import RunFailedError, in_one_line, supervise
    from examples.disaggregated.worker import check_degree, random_model, requests_of

    names = (
        "transport", "requests", "page_size", "hot_tokens", "speculate", "prefill_degree", "prefill_stages",
        "host_page_size", "landing", "staged", "seed", "checks", "family",
        "host", "interface", "trusted_network", "kill_prefill_after", "max_prompt",
    )  # fmt: skip
    options = Options(device=common.chosen_device(args.device), **{name: getattr(args, name) for name in names})
    try:
        if args.role == "prefill":
            return _prefill(options, args.rank, args.listen, authkey)
        reference = random_model(options, torch.device(options.device))
        check_degree(options, reference)
        figures = supervise(options) if args.role is None else _decode(options, args.connect, authkey)
        report = report_of(options, reference, requests_of(options, reference), figures)
    except (BatchStateError, ChannelClosedError, WriterFailedError, RunFailedError) as error:
        says = in_one_line(error).replace("trusted_network=True", "--trusted-network")
        print(f"examples.disaggregated: {says}", file=sys.stderr)
        return 2
    show_report(report)
    if report.broken is not None:
        print(f"\n{report.broken}", file=sys.stderr)
    if report.unkilled is not None:
        print(f"\n{report.unkilled}", file=sys.stderr)
    common.write_json(args.json, report.as_dict())
    return 0 if report.clean else 1


def _prefill(options: "Options", rank: int, address: Address, authkey: bytes) -> int:
    from examples.disaggregated.channel import ChannelClosedError, Door
    from examples.disaggregated.roles import serve_prefill
    from examples.disaggregated.worker import opened

    with opened(options) as parts:
        door = Door(address, authkey)
        print(f"listening on {door.address[0]}:{door.address[1]}", flush=True)
        try:
            figures = serve_prefill(parts, options, rank, door, None)
        except ChannelClosedError as error:
            raise ChannelClosedError(f"{error}; start this worker again, and the decode role too") from error
    print(f"{figures['steps']:,} forwards, {figures['bytes']:,} bytes written, {figures['leaks']} leaks")
    return 1 if figures["leaks"] else 0


def _decode(options: "Options", addresses: list[Address], authkey: bytes) -> dict[str, object]:
    from examples.disaggregated.roles import serve_decode
    from examples.disaggregated.worker import opened, requests_of

    with opened(options) as parts:
        requests = requests_of(options, parts.model)
        return {**serve_decode(parts, options, requests, authkey, addresses=addresses), "killed": 0}


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a HOST:PORT")
    return host, int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.disaggregated",
        description="Prefill in one process, decode in another, and compare every token with transformers' own.",
        epilog="Everything is on loopback unless told otherwise. Control channel and the engine tcp let in only who "
        "knows a secret; nothing is encrypted. NIXL opens no port without --interface. With one, and with Mooncake, "
        "whoever reaches a port is let in: see --trusted-network.",
    )
    add = parser.add_argument
    add("--transport", choices=TRANSPORTS, default="tcp", help="default: %(default)s")
    add("--requests", metavar="N", type=common.whole(1), default=200, help="default: %(default)s")
    add("--page-size", metavar="N", type=common.whole(1), default=16, help="tokens a page, as 1, 16, 64 (default: 16)")
    add("--hot-tokens", metavar="N", type=common.whole(2), default=32, help="of a request, on the device (default: 32)")
    add("--speculate", metavar="N", type=common.whole(0), default=0, help="tokens guessed in each decode step")
    add("--prefill-degree", metavar="N", type=common.whole(1), default=1, help="prefill processes that share the heads")
    add("--prefill-stages", metavar="N", type=common.whole(1), default=1, help="pipeline stages that share the layers")
    add("--host-page-size", metavar="N", type=int, choices=(0, 1), default=0, help="1: no pages in the host tier")
    add("--landing", choices=LANDINGS, default="host", help="memory that KV comes into (default: %(default)s)")
    add("--staged", metavar="SHARE", type=common.share, default=0.1, help="share prefilled by decode (default: 0.1)")
    add("--kill-prefill-after", metavar="N", type=common.whole(1), help="kill and restart it after N deliveries")
    add("--max-prompt", metavar="N", type=common.whole(1), default=512, help="longest prompt (default: %(default)s)")
    add("--family", choices=("llama", "qwen3", "plain"), default="llama", help="of the random model (default: llama)")
    add("--checks", choices=[level.value for level in Level], default="cheap", help="default: %(default)s")
    roles = parser.add_argument_group(
        "two machines", f"one role each; {AUTHKEY} holds the secret; the other options are the same on both"
    )
    roles.add_argument("--role", choices=("prefill", "decode"), help="default: both, on this machine")
    roles.add_argument("--listen", metavar="HOST:PORT", type=_address, help="where a prefill worker waits for decode")
    roles.add_argument("--rank", metavar="R", type=common.whole(0), default=0, help="of a prefill worker (default: 0)")
    roles.add_argument(
        "--connect",
        metavar="HOST:PORT",
        type=_address,
        action="append",
        default=[],
        help="once for each rank, in order",
    )
    roles.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="this machine, as the other's engine reaches it"
    )
    roles.add_argument("--interface", metavar="NAME", help="network interface of NIXL (default: shared memory)")
    roles.add_argument(
        "--trusted-network",
        action="store_true",
        help="firewall or namespace keep all but the workers out; wanted by nixl with --interface, and by mooncake",
    )
    common.add_device(parser)
    common.add_seed(parser)
    common.add_json(parser)
    return parser
