"""`python -m pipelines.report RUN_DIR ...` writes the report of each run folder anew."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipelines.report import write_report

USAGE = "usage: python -m pipelines.report RUN_DIR ..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if all reports were written, 1 if one was not, 2 for wrong usage."""
    folders = list(sys.argv[1:] if arguments is None else arguments)
    if not folders or any(folder.startswith("-") for folder in folders):
        print(USAGE, file=sys.stdout if folders and folders[0] in ("-h", "--help") else sys.stderr)
        return 0 if folders and folders[0] in ("-h", "--help") else 2
    failed = False
    for folder in folders:
        try:
            print(write_report(folder))
        except OSError as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
