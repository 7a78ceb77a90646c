"""What the source says of its classes beside what Python keeps: the texts under fields."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


@dataclass
class ClassTexts:
    """A class's own text, and those of its fields."""

    text: str = ""
    fields: dict[str, str] = field(default_factory=dict)


@cache
def class_texts(module: ModuleType) -> dict[str, ClassTexts]:
    """Of every class of a module, by name. A field's text is the string under it, or its line in
    the class's "Attributes:"."""
    tree = ast.parse(inspect.getsource(module))
    return {node.name: _texts(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> ClassTexts:
    text, _title, attributes = (ast.get_docstring(node) or "").partition("\n\nAttributes:\n")
    texts = ClassTexts(text, dict(_ATTRIBUTE.findall(attributes)))
    for before, after in itertools.pairwise(node.body):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts.fields[before.target.id] = inspect.cleandoc(str(after.value.value))
    return texts


@cache
def constant_texts(module: ModuleType) -> dict[str, str]:
    """The strings under a module's constants."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        before.targets[0].id: inspect.cleandoc(str(after.value.value))
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.Assign)
        and isinstance(before.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
