"""The commands of `weight-broker`, a file for each group of them.

Each file has `add_to(commands)`, which adds its commands to the parser (cli.py), and the functions
that carry them out: options in, exit code out, a `BrokerError` for whatever cannot be done. What a
command needs is imported when it runs, so that `--help` is quick.
"""
