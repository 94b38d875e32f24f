"""Manifests as YAML that people can read: scripts as they are, nothing by reference."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """The documents in order, keys in theirs; `yaml.safe_load_all` gives equal ones."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10**6, explicit_start=False)
