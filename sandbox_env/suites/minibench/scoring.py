"""The `tests/test.sh` of an exercise: bash only, because it runs thousands of times, and a few milliseconds each.

It trusts nothing in /app: the expected content is in the script, only regular files are read, and no more than 16 KiB
of them, so that links, folders, pipes or huge files in the place of a result fail a check and never the script. It
leaves the report of every check as proof that it ran (CTRF, https://ctrf.io) and then the reward, 1 or 0.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from sandbox_env.suites.minibench.exercise import Check

PRELUDE = r"""#!/bin/bash
# One check per line at the end; the reward is 1 if all of them pass, else 0.
PATH=/usr/bin:/bin
LC_ALL=C
logs=/logs/verifier
start_ms=$((${EPOCHREALTIME//[.,]/} / 1000)) passed=0 failed=0 report=

check() { # name, function, arguments
  local name=$1 status=failed
  shift
  if "$@" 2> /dev/null; then status=passed passed=$((passed + 1)); else failed=$((failed + 1)); fi
  echo "$status: $name"
  report+="${report:+,}{\"name\":\"$name\",\"status\":\"$status\",\"duration\":0}"
}
is() { # text, wanted text: the same but for a last newline
  [[ $1 == "$2" || $1 == "$2"$'\n' ]]
}
plain() { # path: a regular file, reached without a link
  [[ -f /app/$1 && ! -L /app/$1 && -r /app/$1 && ( $1 != */* || ! -L /app/${1%/*} ) ]]
}
holds() { # path, wanted text
  plain "$1" || return 1
  local text=
  IFS= read -r -N 16384 text < "/app/$1"
  is "$text" "$2"
}
absent() { [[ ! -e /app/$1 && ! -L /app/$1 ]]; }
folder() { [[ -d /app/$1 && ! -L /app/$1 ]]; }
"""

FUNCTIONS = {
    "mode": r"""mode() { # path, pattern of its octal mode
  plain "$1" && [[ $(stat -c %a "/app/$1") == $2 ]]
}
""",
    "packed": r"""packed() { # tar file, member, wanted text
  plain "$1" && is "$(timeout 5 tar -xOf "/app/$1" "$2" | head -c 16384)" "$3"
}
""",
    "zipped": r"""zipped() { # gzip file, wanted text
  plain "$1" && is "$(timeout 5 gzip -dc < "/app/$1" | head -c 16384)" "$2"
}
""",
    "points_to": r"""points_to() { # branch or tag, commit
  [[ $(timeout 5 git -C /app rev-parse -q --verify "$1^{commit}") == "$2" ]]
}
""",
    "committed": r"""committed() { # message, parent
  [[ $(timeout 5 git -C /app log -1 --format='%s %P') == "$1 $2" ]]
}
""",
    "in_commit": r"""in_commit() { # path, wanted text
  is "$(timeout 5 git -C /app show "HEAD:$1" | head -c 16384)" "$2"
}
""",
    "started": r"""started() { # file with the number of a process
  plain "$1" && [[ $(head -c 20 "/app/$1") =~ ^[0-9]+$ ]]
}
""",
    "stopped": r"""runs() { # words, one of which is on the command line of the process
  local file word
  for file in /proc/[0-9]*/cmdline; do
    while IFS= read -r -d '' word; do
      [[ $word == "$1" || $word == "$2" ]] && return 0
    done < "$file"
  done
  return 1
}
stopped() { # process, script: until it is the process, what the script started still has the script's command line
  for _ in 1 2 3 4 5 6 7 8; do # a signal that was sent a moment ago may still be on its way
    runs "$1" "$2" || return 0
    sleep 0.02
  done
  return 1
}
""",
}

EPILOGUE = r"""
[[ -d $logs && ! -L $logs ]] || { rm -rf "$logs"; mkdir -p "$logs"; }
for file in ctrf.json reward.txt reward.json; do
  if [[ -e $logs/$file || -L $logs/$file ]]; then rm -rf "${logs:?}/$file"; fi
done
stop_ms=$((${EPOCHREALTIME//[.,]/} / 1000))
summary="\"tests\":$((passed + failed)),\"passed\":$passed,\"failed\":$failed,\"pending\":0,\"skipped\":0,\"other\":0"
summary+=",\"start\":$start_ms,\"stop\":$stop_ms"
echo "{\"reportFormat\":\"CTRF\",\"specVersion\":\"0.0.0\",\"results\":{\"tool\":{\"name\":\"minibench\"},\
\"summary\":{$summary},\"tests\":[$report]}}" > "$logs/ctrf.json"
echo "$passed passed, $failed failed"
if ((failed == 0 && passed > 0)); then echo 1; else echo 0; fi > "$logs/reward.txt"
"""

_BASIC = ("holds", "absent", "folder")


def test_script(checks: Sequence[Check]) -> str:
    """The whole test.sh for these checks. Raises `ValueError` for a name that JSON would have to escape."""
    used = dict.fromkeys(check.function for check in checks if check.function not in _BASIC)
    lines: list[str] = []
    for check in checks:
        if not re.fullmatch(r"[\w./ -]+", check.name):
            raise ValueError(f"check name {check.name!r}: use letters, digits, spaces and ./_- only")
        arguments = " ".join(shlex.quote(argument) for argument in check.arguments)
        lines.append(f"check {shlex.quote(check.name)} {check.function} {arguments}\n")
    return PRELUDE + "".join(FUNCTIONS[name] for name in used) + "\n" + "".join(lines) + EPILOGUE
