"""Families about JSON files, with sed and grep: the sandbox need not have Python."""

from __future__ import annotations

from sandbox_env.suites.minibench.draw import Draw
from sandbox_env.suites.minibench.exercise import Action, holds, kept, ok


def json_get(draw: Draw) -> Action:
    """The value of one key."""
    source, target, keys = draw.file("json"), draw.file(), draw.words(4)
    values = dict(zip(keys, draw.numbers(4, 99), strict=True))
    key, other = keys[draw.number(0, 3)], draw.word()
    return Action(
        family="json-get",
        subject=key,
        phrase=draw.pick(f"write the value of {key} in {source} to {target}", f"copy {key} of {source} into {target}"),
        files={source: json_text(values).encode()},
        turn=ok(f"grep {key} {source} | tr -dc 0-9 > {target}"),
        checks=(holds(target, str(values[key])), kept(source, json_text(values))),
        mistakes=(
            ok(f"grep {key} {source} | tr -dc 0-9", str(values[key])),
            ok(f"grep {key} {source} > {target}"),
            ok(f"grep {other} {source} | tr -dc 0-9 > {target}"),
        ),
    )


def json_set(draw: Draw) -> Action:
    """Another value for one key, in place."""
    path, keys = draw.file("json"), draw.words(4)
    numbers = draw.numbers(5, 99)
    values = dict(zip(keys, numbers[:4], strict=True))
    key, value = keys[draw.number(0, 3)], numbers[4]
    changed = json_text({**values, key: value})
    return Action(
        family="json-set",
        subject=key,
        phrase=draw.pick(f"set {key} to {value} in {path}", f"change the value of {key} in {path} to {value}"),
        files={path: json_text(values).encode()},
        turn=ok(f"""sed -i 's/"{key}": [0-9]*/"{key}": {value}/' {path}"""),
        checks=(holds(path, changed),),
        mistakes=(
            ok(f"""sed 's/"{key}": [0-9]*/"{key}": {value}/' {path}""", changed),
            ok(f"sed -i 's/{key}/{value}/' {path}"),
            ok(f"echo {value} > {path}"),
        ),
    )


def json_text(values: dict[str, int]) -> str:
    """A flat object, one key a line."""
    body = ",\n".join(f'  "{key}": {value}' for key, value in values.items())
    return f"{{\n{body}\n}}\n"


ACTIONS = (json_get, json_set)
