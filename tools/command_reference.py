"""Generate the commands in docs/reference/commands.md from their help: ``python -m tools.command_reference``."""

import re
from contextlib import redirect_stdout
from io import StringIO

from serried import cli, program


def reference() -> str:
    """Return a Markdown section with the help of ``train.py`` and of each command of ``serried``."""
    overview = _printed(["--help"])
    names = re.findall(r"^  (\w+) +\S", overview, re.MULTILINE)
    with redirect_stdout(StringIO()) as train:
        program.main(["--help"])
    # The rest is recipes, choices and keys, which are in configuration.md, and examples.
    usage = train.getvalue().partition("\nrecipes:")[0]
    sections = [("train.py", usage), ("serried", overview)]
    sections += [(f"serried {name}", _printed([name, "--help"])) for name in names]
    return "\n\n".join(f"## {name}\n\n```\n{text.strip()}\n```" for name, text in sections)


def _printed(words: list[str]) -> str:
    with redirect_stdout(StringIO()) as printed:
        assert cli.main(words) == 0, words
    return printed.getvalue()


if __name__ == "__main__":
    print(reference())
