"""What `vllm serve` accepts: its argument parser as a table, one a release, and the check of a command against it.

The variables that a release reads are in its table too.

The tables in data/vllm_flags_*.json are recorded by running vLLM's own parser: `python -m rackplan.engine.parser_table
--write FILE` where that release is installed; `--help` says how. A table holds no defaults: those differ by GPU, so
that a command states all that it means.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from rackplan.engine.errors import InputError

EngineVersion = Literal["0.33", "0.32"]
ENGINE_VERSIONS: tuple[str, ...] = get_args(EngineVersion)

Kind = Literal["text", "int", "float", "json"]
Takes = Literal["none", "one", "optional", "many"]

_JSON_FLAGS = {
    "--eplb-config": "vllm.config.parallel.EPLBConfig",
    "--kv-transfer-config": "vllm.config.kv_transfer.KVTransferConfig",
    "--speculative-config": "vllm.config.speculative.SpeculativeConfig",
    "--compilation-config": "vllm.config.compilation.CompilationConfig",
    "--engram-config": "vllm.config.engram.EngramConfig",
}
"""Flags whose JSON has keys of its own, and the class that names them."""

_PARSER_MODULES = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""Where `make_arg_parser` is: 0.33, 0.32."""


class Flag(BaseModel):
    """One option of `vllm serve`. `names` switch it on or take its value, `negative` switch it off, the one that the
    help shows first. `keys`: what its JSON may hold, where vLLM says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    negative: tuple[str, ...] = ()
    takes: Takes = "one"
    kind: Kind = "text"
    choices: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserTable:
    """What one release takes. `engine`: its exact version, "0.33.0"; `flags`: by every name and negative name;
    `environment`: the variables that it reads."""

    engine: str
    flags: Mapping[str, Flag]
    environment: frozenset[str]

    def negative(self, name: str) -> str:
        """The option that switches `name` off in this release. Raises InputError where there is none."""
        found = self.flags.get(name)
        if found is None or not found.negative:
            raise InputError(f"{name}: vLLM {self.engine} has no option to switch it off; render for another release")
        return found.negative[0]


def recorded_file(version: str) -> Path:
    """The table of a release as it ships."""
    return Path(str(files("rackplan.engine") / "data" / f"vllm_flags_{version}.json"))


@cache
def parser_table(version: str) -> ParserTable:
    """The options of release `version` ("0.33"): of the installed vLLM where it is another patch of that release than
    the recorded one, else as recorded. Raises InputError for a release that has no table."""
    if version not in ENGINE_VERSIONS:
        raise InputError(f"engine_version={version}: unknown; one of {', '.join(ENGINE_VERSIONS)}")
    recorded = json.loads(recorded_file(version).read_text(encoding="utf-8"))
    installed = installed_version()
    if installed and installed.startswith(f"{version}.") and installed != recorded["engine"]:
        return parse_table(record())
    return parse_table(recorded)


def installed_version() -> str | None:
    """The version of the vLLM that is installed here, without its build ("0.32.0" of 0.32.0+cpu); None without one."""
    try:
        return metadata.version("vllm").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def parse_table(data: Mapping[str, Any]) -> ParserTable:
    """A table from its JSON form."""
    flags: dict[str, Flag] = {}
    for row in data["flags"]:
        flag = Flag.model_validate(row)
        flags |= dict.fromkeys((*flag.names, *flag.negative), flag)
    return ParserTable(engine=data["engine"], flags=flags, environment=frozenset(data["environment"]))


def check_environment(env: Mapping[str, str], table: ParserTable) -> None:
    """Raises InputError on a variable of vLLM's that this release does not read: it would ignore it in silence."""
    for name in env:
        if name.startswith("VLLM_") and name not in table.environment:
            raise InputError(f"{name}: vLLM {table.engine} does not read it; render for a release that does")


def check_command(argv: Sequence[str], table: ParserTable) -> None:
    """Would this release parse `vllm serve MODEL ...`? Raises InputError on the first option or value that it would
    not, and on one given twice, of which vLLM would take the last in silence."""
    if tuple(argv[:2]) != ("vllm", "serve") or len(argv) < 3 or argv[2].startswith("-"):
        raise InputError(f"{' '.join(argv[:3])}: not a vLLM command; it begins with vllm serve MODEL")
    rest = list(argv[3:])
    seen: set[str] = set()
    while rest:
        name = rest.pop(0)
        flag = table.flags.get(name)
        if flag is None:
            raise InputError(f"{name}: vLLM {table.engine} has no such option; render for a release that has it")
        if flag.names[0] in seen:
            raise InputError(f"{name}: given twice; vLLM would ignore the first in silence: remove one")
        seen.add(flag.names[0])
        most = {"none": 0, "one": 1, "optional": 1, "many": len(rest)}[flag.takes]
        values: list[str] = []
        while rest and len(values) < most and not (rest[0].startswith("-") and rest[0] in table.flags):
            values.append(rest.pop(0))
        if not values and flag.takes in ("one", "many"):
            raise InputError(f"{name}: vLLM {table.engine} wants a value; give one")
        for value in values:
            _check_value(name, value, flag, table.engine)


_READ: Mapping[Kind, Callable[[str], Any]] = {"text": str, "int": int, "float": float, "json": json.loads}


def _check_value(name: str, value: str, flag: Flag, engine: str) -> None:
    if flag.choices is not None and value not in flag.choices:
        raise InputError(f"{name} {value}: vLLM {engine} takes one of {', '.join(flag.choices)}")
    try:
        found = _READ[flag.kind](value)
    except ValueError:
        raise InputError(f"{name} {value}: vLLM {engine} wants {flag.kind}; correct it") from None
    if flag.keys is not None:
        unknown = sorted(set(found) - set(flag.keys))
        if unknown:
            raise InputError(f"{name} {unknown[0]}: vLLM {engine} knows no such key; one of {', '.join(flag.keys)}")


def record() -> dict[str, Any]:
    """The JSON form of the installed vLLM's table, by running its parser. Needs vLLM; no GPU."""
    parser = _vllm_parser()
    flags = [_flag_of(a, parser) for a in parser._actions if a.option_strings and a.dest != "help"]
    rows = [f.model_dump(mode="json", exclude_defaults=True) for f in flags]
    return {
        "engine": installed_version(),
        "environment": sorted(import_module("vllm.envs").environment_variables),
        "flags": sorted(rows, key=lambda r: r["names"][0]),
    }


def _vllm_parser() -> argparse.ArgumentParser:
    for name in _PARSER_MODULES:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        parser_class = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
        return module.make_arg_parser(parser_class())
    raise InputError(f"vLLM {installed_version()}: its parser is in none of {', '.join(_PARSER_MODULES)}")


def _flag_of(action: argparse.Action, parser: argparse.ArgumentParser) -> Flag:
    # The parser accepts more names than the help shows: 0.33 shows --disable-x and still takes --no-enable-x.
    accepted = [n for n, a in parser._option_string_actions.items() if a is action]
    shown = [*action.option_strings, *(n for n in accepted if n not in action.option_strings)]
    off = getattr(action, "negative_option_strings", None)
    if off is None:
        off = {n for n in shown if n.startswith("--no-")} if isinstance(action, argparse.BooleanOptionalAction) else ()
    main = next(n for n in shown if n.startswith("--") and n not in off)
    takes: Takes = "one"
    if action.nargs == 0:
        takes = "none"
    elif action.nargs in ("?", "+", "*"):
        takes = "optional" if action.nargs == "?" else "many"
    choices = tuple(str(c) for c in action.choices if c is not None) if action.choices else None
    return Flag(
        names=(main, *(n for n in shown if n not in off and n != main)),
        negative=tuple(n for n in shown if n in off),
        takes=takes,
        kind="text" if takes == "none" or choices else _kind(action.type),
        choices=choices,
        keys=_keys(main),
    )


def _kind(read: Any) -> Kind:
    """What a reader of values wants, found by asking it."""
    if read is None:
        return "text"
    samples: tuple[tuple[Kind, str], ...] = (("text", "a b"), ("json", "{}"), ("float", "0.5"), ("int", "8"))
    for kind, sample in samples:
        try:
            read(sample)
        except Exception:
            continue
        return kind
    return "text"


def _keys(name: str) -> tuple[str, ...] | None:
    if name not in _JSON_FLAGS:
        return None
    module, _, cls = _JSON_FLAGS[name].rpartition(".")
    found = getattr(import_module(module), cls)
    return tuple(f.name for f in fields(found) if f.init) if is_dataclass(found) else None


def main() -> int:
    """Records the installed vLLM's table, or compares it with the one that ships."""
    parser = argparse.ArgumentParser(
        description="Record the argument parser of the installed vLLM. On a machine without a GPU set "
        "VLLM_TARGET_DEVICE=cpu; the parser is the same."
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to; without it: compare with what ships")
    args = parser.parse_args()
    found = record()
    if args.write:
        rows = ",\n".join(json.dumps(row) for row in found["flags"])
        head = json.dumps({k: v for k, v in found.items() if k != "flags"})[:-1]
        text = f'{head}, "flags": [\n{rows}\n]}}\n'
        args.write.write_text(text, encoding="utf-8")
        print(f"{args.write}: {len(found['flags'])} options of vLLM {found['engine']}")
        return 0
    same = found == json.loads(recorded_file(found["engine"].rpartition(".")[0]).read_text(encoding="utf-8"))
    print(f"vLLM {found['engine']}: {'as recorded' if same else 'differs from what is recorded'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
