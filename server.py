"""The server: OpenAI's HTTP API over the same `LLM`. This file is its command line; server_parts/ is the rest."""

import argparse
import gc
import ipaddress
import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress

import cli
from engine import LLM

EXAMPLES = """examples:
  python server.py                                  the embedded model on http://127.0.0.1:8000, with a page to try
  python server.py --model Qwen/Qwen3-8B --host 0.0.0.0 --api-key "$KEY"
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'

Every answer carries `seed`, the seed it was drawn with, and `system_fingerprint`, which names everything else that may
change bits: same prompt, parameters, seed and fingerprint, same answer, however busy the server is. A request with
"receipt": true gets, with each choice, what LLM.verify needs to prove it. SIGINT or SIGTERM stops taking requests and
finishes those under way; a second one stops at once.
"""
KEY_VARIABLE = "SAMEBITS_API_KEY"
# A step's launches let go of the interpreter 400 times; each time the event loop, if it is busy, keeps it so long.
GIL_SWITCH_SECONDS = 5e-5
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LIMITS = ("max_pending", "max_n", "max_stop", "max_tokens", "max_body_bytes", "body_timeout", "header_timeout",
          "send_timeout")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="server.py", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="samebits: serve an LLM over OpenAI's HTTP API; answers do not depend on the load.")
    add = parser.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)")
    add("--api-key", metavar="KEY", help=f"bearer token that /v1/ asks for (default: ${KEY_VARIABLE}, else none)")
    add("--allowed-origins", nargs="+", default=[], metavar="URL", help="web origins whose pages may call (CORS)")
    add("--allowed-host", action="append", default=[], metavar="NAME",
        help="a name that clients may call this server by; repeat for more (default: on loopback localhost, 127.0.0.1 "
        "and ::1, so that no web page can reach it under another name; elsewhere any)")
    add("--served-model-name", metavar="NAME", help="what clients call the model (default: --model)")

    add = parser.add_argument_group("limits", "What one client may take from the others.").add_argument
    add("--max-pending", type=int, default=4096, metavar="N",
        help="most completions running and waiting; beyond it clients get 429 (default: %(default)s)")
    add("--max-n", type=int, default=128, metavar="N", help="most choices a prompt (default: %(default)s)")
    add("--max-stop", type=int, default=16, metavar="N", help="most stop strings, and stop token ids")
    add("--max-tokens", type=int, metavar="N", help="most tokens an answer may ask for (default: what fits)")
    add("--max-body-bytes", type=int, default=4 << 20, metavar="N", help="largest request (default: %(default)s)")
    add("--body-timeout", type=float, default=60.0, metavar="S", help="seconds to send it in (default: %(default)s)")
    add("--header-timeout", type=float, default=10.0, metavar="S", help="seconds for its head (default: %(default)s)")
    add("--send-timeout", type=float, default=60.0, metavar="S",
        help="seconds without reading after which a client is cut off (default: %(default)s)")

    # What concerns the engine is said once, in cli.py; argparse has no public way to borrow a group.
    for group in cli.build_parser()._action_groups:
        if group.title in ("model", "engine"):
            borrowed = parser.add_argument_group(group.title, group.description)
            for action in group._group_actions:
                borrowed._add_action(action)
    return parser


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Prompts and answers are never among the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)), "level": record.levelname,
                "logger": record.name, "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging() -> logging.Logger:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return logging.getLogger("samebits")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address, or a name that stands for one."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() in LOOPBACK


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, which clients cannot reach until the server listens. OSError, before any weights are
    read, if it is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from server_parts.api import Settings, build_app
        from server_parts.connection import uvicorn_config
    except ImportError as error:
        raise ValueError(f"the server needs more packages ({error}): pip install -e '.[serve]'") from error

    class Server(uvicorn.Server):
        """uvicorn's, but the second signal of any kind stops at once, and a drained server exits with 0."""

        is_lost = False

        async def startup(self, sockets: list | None = None) -> None:
            await super().startup(sockets)
            log.info("serving", extra={"fields": {"url": f"http://{host}:{listener.getsockname()[1]}", **about}})

        def handle_exit(self, sig: int, frame) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        def lose(self) -> None:
            self.is_lost = self.should_exit = True

    listener, host = bind(args.host, args.port), f"[{args.host}]" if ":" in args.host else args.host
    log = configure_logging()
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    is_local = is_loopback(args.host)
    if not is_local and not key:
        log.warning("listening beyond this machine without an API key: anyone who reaches it may use it")
    llm = LLM(**cli.chosen(args, LLM), progress=sys.stderr.isatty())
    hosts = (*LOOPBACK, args.host, *args.allowed_host) if is_local else tuple(args.allowed_host)
    settings = Settings(args.served_model_name or args.model, key, tuple(args.allowed_origins), allowed_hosts=hosts,
                        **{name: getattr(args, name) for name in LIMITS})
    about = {"model": settings.model_name, "fingerprint": llm.fingerprint, "device": str(llm.device),
             "max_model_len": llm.max_model_len}
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # what there is now stays: a full collection of it took 0.4 s, and no step was made meanwhile
    gc.set_threshold(1_000_000, 50, 50)  # at 100,000 it took 0.1 s with 1,000 requests under way

    app = build_app(llm, settings, on_lost=lambda: server.lose())
    server = Server(uvicorn_config(app, args.header_timeout, args.send_timeout))
    server.run([listener])
    app.state.service.engine.close()
    return 1 if server.is_lost or server.force_exit else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit code 0 (drained), 1 (the device was lost, or a second signal came), 2 (bad arguments, model or
    environment, an address that is taken), 130 (interrupted while starting)."""
    args = (parser := build_parser()).parse_args(argv)
    for name in LIMITS:
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there was anything to drain
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
