"""The subcommands of ``python -m zmlx``, one per file.

Each module's docstring is its help text; ``configure(parser)`` adds its options and
``run(arguments)`` returns the exit status. Whatever is heavy is imported inside ``run``.
"""
