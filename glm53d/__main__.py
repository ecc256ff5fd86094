"""The command line: argv -> Config -> what is asked of it. No torch, no event loop before the world starts."""

import argparse
import gc
import sys
from collections.abc import Callable

from glm53d import config as configuration
from glm53d.config import Config
from glm53d.errors import StartError
from glm53d.version import VERSION


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 for a start that was refused, with one line that says why."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if args.print_reference:
        print(configuration.reference_toml(), end="")
        return 0
    try:
        if unknown:
            raise configuration.unknown_option(unknown[0])
        if args.command not in (None, "topology"):
            parser.error(f"there is no command {args.command!r}; topology is the only one, without it glm53d serves")

        def read() -> Config:
            return configuration.load(args.config, args.set + _shorthands(args))

        config = read()
        if args.command == "topology":
            return _topology(config)
        return _check(config) if args.check else _run(config, read)
    except StartError as error:
        print(f"glm53d: {error.message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="glm53d", description="Serve GLM-5.3.")
    parser.add_argument("command", nargs="?", metavar="topology", help="print processes and channels, exit")
    parser.add_argument("--config", metavar="FILE", help="TOML; without it, the built-in model on the CPU")
    parser.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="set one field; repeatable"
    )
    parser.add_argument("--host", help="short for --set server.host=HOST")
    parser.add_argument("--port", help="short for --set server.port=PORT")
    parser.add_argument("--chat-template", metavar="FILE", help="short for --set template.path=FILE")
    parser.add_argument("--check", action="store_true", help="check the configuration, print the memory plan, exit")
    parser.add_argument(
        "--print-reference", action="store_true", help="print every field with its default and meaning, exit"
    )
    parser.add_argument("--version", action="version", version=f"glm53d {VERSION}")
    return parser


def _shorthands(args: argparse.Namespace) -> list[str]:
    given = {"server.host": args.host, "server.port": args.port, "template.path": args.chat_template}
    return [f"{name}={value}" for name, value in given.items() if value is not None]


def _topology(config: Config) -> int:
    from glm53d.world.topology import describe

    print(describe(config))
    return 0


def _check(config: Config) -> int:
    from glm53d.world.plan import check_report

    print(check_report(config))
    return 0


def _run(config: Config, read: Callable[[], Config]) -> int:
    gc.disable()  # what imports make stays: to look for garbage in it, while or after, is a sixth of their time
    from glm53d.obs import log
    from glm53d.world import supervisor

    gc.freeze()
    gc.enable()

    log.setup(config.log.level)
    return supervisor.run(config, read)


if __name__ == "__main__":
    sys.exit(main())
