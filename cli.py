"""The entry point: ``fulgurite`` and ``python cli.py`` are the same.

It only dispatches, so that what needs no torch is answered at once.
"""

import sys
from collections.abc import Sequence

HELP = """\
usage: fulgurite COMMAND [options]

  fit | validate | test | predict    run a method; `fulgurite fit --help` lists the options
      --config NAME_OR_FILE          a shipped config such as rocp/cpu, or a file; later ones override earlier ones
      --model NAME --data NAME       by short name; --model.<argument> VALUE, --data.<argument> VALUE,
                                     --trainer.<argument> VALUE set single values
      --ckpt_path best|last|FILE     start from the latest run of the config, or from a checkpoint file
      --trust PACKAGE                allow configs to name classes of this package (a config is code)
  list [SLUG]                        the methods, or one in detail
  reproduce METHOD                   measure the paper's claims against their baselines: `fulgurite reproduce --help`
  --version                          versions of Fulgurite and of what it stands on"""

RUN_COMMANDS = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None takes them from ``sys.argv``.

    Returns:
        The exit code: 0 done, 1 run-time failure, 2 wrong usage or config, 130 or 143 ended by a signal.
    """
    from fulgurite.command_line.streams import prepare_streams, silence

    prepare_streams()
    try:
        code = _command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)  # `| head` has read enough
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            return 0  # rich has silenced the stream itself
        raise
    except KeyboardInterrupt:
        print("error: ended by Ctrl-C", file=sys.stderr)
        return 130
    return code


def _command(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in RUN_COMMANDS:
        from fulgurite.command_line.run import run

        return run(arguments)

    from fulgurite.command_line.errors import UsageError, nearest, print_error

    try:
        if command == "list":
            from fulgurite.command_line.listing import print_listing

            print_listing(arguments[1:])
        elif command == "reproduce":
            from fulgurite.reproduction.command import reproduce

            return reproduce(arguments[1:])
        elif command == "--version":
            from fulgurite.command_line.provenance import package_versions

            print("\n".join(f"{name} {version}" for name, version in package_versions().items()))
        elif command in ("-h", "--help"):
            print(HELP)
        else:
            commands = (*RUN_COMMANDS, "list", "reproduce", "--version", "--help")
            raise UsageError(f"{command!r} is not a command{nearest(command, commands)}")
    except UsageError as error:
        print_error(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
