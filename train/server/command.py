"""`fnmodels-server FOLDER`: answers requests of OpenAI's clients with the model of a checkpoint folder."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from params.checkpoint.hub import local_folder
from train.command_line import Parser, program_name, run_command
from train.job.settings.types import integer

TOKEN = "FNMODELS_SERVER_TOKEN"  # a variable of the environment, which other users do not see among processes
CONTEXT = 4096
NEEDS = ("tokenizers", "jinja2", "starlette", "uvicorn")


def _name() -> str:
    return program_name("fnmodels-server", "train.server")


def parser() -> Parser:
    """The flags."""
    flags = Parser(prog=_name(), description="Answer requests of OpenAI's clients over HTTP with a folder's model.")
    flags.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT_FOLDER", help="a run folder, one from Hugging Face, or adapters"
    )
    flags.add_argument("--name", metavar="NAME", help="of the model in requests (default: that of the folder)")
    flags.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default %(default)s, this machine alone")
    flags.add_argument("--port", type=integer(0).parse, default=8000, metavar="N", help="default %(default)s; 0: any")
    flags.add_argument(
        "--token", metavar="TEXT", help=f"what requests must carry (default: ${TOKEN}); needed for other addresses"
    )
    flags.add_argument(
        "--slots", type=integer(1).parse, default=32, metavar="N", help="answers at a time (default %(default)s)"
    )
    flags.add_argument(
        "--context",
        type=integer(2).parse,
        metavar="N",
        help=f"tokens of a prompt and its answer (default: the model's positions, at most {CONTEXT})",
    )
    flags.add_argument(
        "--queue", type=integer(1).parse, default=1024, metavar="N", help="requests that wait (default %(default)s)"
    )
    flags.add_argument(
        "--body-limit", type=integer(1).parse, default=32 << 20, metavar="BYTES", help="default %(default)s"
    )
    flags.add_argument(
        "--grace",
        type=integer(0).parse,
        default=30,
        metavar="SECONDS",
        help="in which running requests end when the server is stopped (default %(default)s)",
    )
    flags.add_argument(
        "--train", action="store_true", help="serve Tinker's protocol too: clients train adapters over the model"
    )
    flags.add_argument(
        "--saves",
        type=Path,
        default=Path("tinker"),
        metavar="FOLDER",
        help="where clients of --train save weights (default %(default)s)",
    )
    flags.add_argument(
        "--models",
        type=integer(1).parse,
        default=64,
        metavar="N",
        help="that clients of --train have at a time, all together (default %(default)s)",
    )
    flags.add_argument(
        "--samplers",
        type=integer(1).parse,
        default=8,
        metavar="N",
        help="momentary ones that are kept of each model of --train, those used last (default %(default)s)",
    )
    exact = "invariant: the same bits in any batch, and for --train in sampling and training (default: the fastest)"
    flags.add_argument("--kernel", choices=("invariant",), help=exact)
    flags.add_argument("--kv-dtype", choices=("int8",), help="cache keys and values in int8 (default: as computed)")
    return flags


def checked_token(host: str, token: str | None) -> str | None:
    """The token of the flags or of the environment. UserError where the address needs one."""
    from .guard import is_loopback

    if token is not None and not token.strip():
        raise UserError("--token is empty: leave it out for a server without a token")
    token = token or os.environ.get(TOKEN) or None
    if token is None and not is_loopback(host):
        raise UserError(f"--host {host} is reached by other machines: set a token with --token or in ${TOKEN}")
    return token


def context_of(asked: int | None, config: Any) -> int:
    """The tokens of a prompt and its answer. UserError where more are asked for than the model has positions.

    asked: of --context; None: the positions, at most `CONTEXT`.
    """
    from fnmodels.models.common.registry import text_config
    from fnmodels.ops.position_range import position_range
    from train.generation.checks import learned_positions

    positions = learned_positions(config) or position_range(text_config(config))
    if asked is None:
        return min(CONTEXT, positions or CONTEXT)
    if positions is not None and asked > positions:
        raise UserError(f"--context {asked} is more than the {positions} positions of the model")
    return asked


def serve(arguments: argparse.Namespace) -> int:
    """Serves until the process is stopped."""
    token = checked_token(arguments.host, arguments.token)
    if arguments.kernel is not None and arguments.kv_dtype is not None:
        raise UserError("--kernel invariant computes answers as training does, without --kv-dtype")
    import torch

    from .app import Limits, Service, application
    from .listening import SWITCH, Listening
    from .model import load
    from .tinker.kept import Bounds
    from .tinker.routes import tinker_routes
    from .tinker.trainer import Trainer

    model = load(local_folder(arguments.checkpoint), arguments.name)
    limits = Limits(
        arguments.slots, context_of(arguments.context, model.served.config), arguments.queue, arguments.body_limit
    )
    kv_dtype = None if arguments.kv_dtype is None else torch.int8
    service = Service(model, limits, kv_dtype, arguments.kernel or "auto")
    bounds = Bounds(models=arguments.models, samplers=arguments.samplers)
    routes = tinker_routes(Trainer(service, arguments.saves, bounds)) if arguments.train else None
    app = application(service, token=token, routes=routes)
    address: dict[str, Any] = {"host": arguments.host, "port": arguments.port, "backlog": 2048}
    sys.setswitchinterval(SWITCH)
    Listening(app, model.name, grace=arguments.grace, drain=service.drain, **address).run()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(_name(), parser, serve, argv, needs=NEEDS)


if __name__ == "__main__":
    sys.exit(main())
